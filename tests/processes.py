"""A program in two processes that run together under `jax.distributed`, each with a device."""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

import jax

from tests.process import start_on_gpu

# The devices that each process of a pair sees.
OWN_GPU = ((0,), (1,))
# In either order, and where each sees both.
ORDERS = (OWN_GPU, ((1,), (0,)), ((0, 1), (0, 1)), ((1, 0), (1, 0)))
# Of a pair that needs no GPU.
ON_CPU: dict[str, Any] = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


class Ended(NamedTuple):
    """What a process has left: its exit status, what it said, its standard error."""

    code: int
    said: list[str]
    errors: str


# Libraries print what they like.
_MARK = "said: "


def say(text: object) -> None:
    """To who has started this process of a pair."""
    print(f"{_MARK}{text}", flush=True)


def join(port: str, process: str) -> int:
    """What a program of a pair does first; its rank.

    A process takes one device, also where it sees those of the other, and does not wait for long
    when it ends and the other has.
    """
    rank = int(process)
    sees_all = len(os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")) > 1
    jax.distributed.initialize(
        f"localhost:{port}",
        2,
        rank,
        local_device_ids=[rank] if sees_all else None,
        shutdown_timeout_seconds=5,
    )
    return rank


def run_pair(
    module: str,
    *arguments: str,
    visible: Sequence[Sequence[int]] = OWN_GPU,
    until: Sequence[int] = (0, 1),
    timeout_s: float = 100,
    **environment: str,
) -> list[Ended]:
    """Runs `python -m module PORT PROCESS ARGUMENT...` twice at once, PROCESS being 0 and 1.

    Args:
      visible: the devices that each process sees, of those that this one does, in their order.
      until: the processes that are waited for; what still runs of the others then is killed.
      timeout_s: for all of them; then they are killed, and those waited for have a negative code.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    port = str(_free_port())
    environments = [
        {
            "JAX_PLATFORMS": "cuda",
            "CUDA_VISIBLE_DEVICES": ",".join(devices[i] for i in sees),
            # Else the processes compile together, and some compile different programs.
            "XLA_FLAGS": "--xla_gpu_shard_autotuning=false",
            **environment,
        }
        for sees in visible
    ]
    with contextlib.ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in "oe"] for _ in visible]
        processes = [
            start_on_gpu("-m", module, port, str(i), *arguments, stdout=out, stderr=err, **env)
            for i, ((out, err), env) in enumerate(zip(files, environments, strict=True))
        ]
        try:
            _wait(processes, until, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        return [
            Ended(process.returncode, _said(_text(out)), _text(err))
            for process, (out, err) in zip(processes, files, strict=True)
        ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _wait(processes: Sequence[subprocess.Popen[str]], until: Sequence[int], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    for i in until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[i].wait(max(end - time.monotonic(), 0))


def _said(output: str) -> list[str]:
    lines = output.splitlines()
    return [line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)]


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
