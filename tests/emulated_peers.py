"""How the ranks of a group find each other, on an emulated machine: tests/emulator/peers.cc."""

import subprocess

from tests.emulated import program


def peers(num_ranks: int, *arguments: str) -> list[list[str]]:
    """What each call of each rank returned, [step][rank]; the arguments are those of
    tests/emulator/peers.cc."""
    return peers_and_warnings(num_ranks, *arguments)[0]


def peers_and_warnings(num_ranks: int, *arguments: str) -> tuple[list[list[str]], list[str]]:
    """The same, and the lines on standard error."""
    command = [program("peers"), str(num_ranks), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    texts = [line.split(" ", 2)[2] for line in run.stdout.splitlines()]
    steps = [texts[i : i + num_ranks] for i in range(0, len(texts), num_ranks)]
    return steps, run.stderr.splitlines()
