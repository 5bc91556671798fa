"""Programs of the scorecard (docs/reliability.md), each for a process of its own:

    python -m tests.reliability_programs NAME ARGUMENTS

A BACKEND is one of `mega_moe`: with "reference" each runs on the CPU too, and some with "emulated",
the kernels on the emulated machine. As in tests.forward_programs, a program that did its work says
in its last line what it counted.
"""

import functools
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jax_megamoe.config import SAVES
from tests import (
    backward_programs,
    drift,
    forward_programs,
    fp8_backward,
    fp8_programs,
    layer,
    memory_limits,
    mesh_refusal_cases,
    nan_cases,
    process,
    processes,
    races,
    rank_programs,
    refusal_cases,
    routing_fuzz,
    stalls,
    transform_cases,
)
from tests.cases import Size, normal_of
from tests.forward_programs import done
from tests.mutations import error_of
from tests.rank_programs import Skewed

PASSES: dict[str, ModuleType] = {
    "forward": forward_programs,
    "backward": backward_programs,
    "forward_fp8": fp8_programs,
    "backward_fp8": fp8_backward,
}
# T, K, E, H, I: what `hashes` runs, with the next whole groups in FP8.
REPEATED: tuple[Size, ...] = (
    (5, 8, 16, 64, 64),
    (777, 3, 8, 256, 192),
    (2048, 8, 128, 512, 256),
    (600, 32, 64, 448, 320),
)
FRACTIONS = ("0.5", "0.65", "0.8", "0.95")
# Of a wait: turns of the emulated machine, or ms.
DEADLINES = {"emulated": 30_000, "cuda": 2000}


def fuzz(
    backend: str, ranks: str, first: str, count: str, routings: str, precision: str = "bf16"
) -> None:
    """`count` of `routing_fuzz.SHAPES` from `first` on, so many routings of each."""
    shapes = routing_fuzz.SHAPES[int(first) : int(first) + int(count)]
    wrong = [
        fault
        for shape in shapes
        for fault in routing_fuzz.faults_of(
            shape,
            backend=backend,
            ranks=int(ranks),
            routings=int(routings),
            precision=precision,
        )
    ]
    done(routings=len(shapes) * int(routings), shapes=len(shapes), wrong=len(wrong))


def refusals() -> None:
    done(**judged_refusals())


def judged_refusals() -> dict[str, Any]:
    """How many kinds of bad input are refused, how many texts are no own ones, and the longest time
    of one."""
    asked = [(refusal_cases.refuse, bad) for bad in refusal_cases.BAD]
    asked += [(mesh_refusal_cases.refuse_mesh, bad) for bad in mesh_refusal_cases.BAD_MESH]
    texts, slowest_s = set(), 0.0
    for ask, bad in asked:
        start = time.perf_counter()
        texts.add(ask(bad))
        slowest_s = max(slowest_s, time.perf_counter() - start)
    alike = len(asked) - len(texts)
    return {"classes": len(asked), "alike": alike, "slowest_s": round(slowest_s, 3)}


def isolation(backend: str, precision: str = "bf16") -> None:
    """What is not finite reaches nothing that does not depend on it."""
    sizes = nan_cases.SMALL_SIZES if backend == "emulated" else nan_cases.SIZES
    done(**judged(nan_cases.checks(sizes[precision], backend=backend, precision=precision)))


def transforms(backend: str, precision: str = "bf16") -> None:
    done(**judged(transform_cases.checks(backend, precision)))


def judged(checks: Mapping[str, Callable[[], None]]) -> dict[str, int]:
    """How many checks there are, and how many fail, which are printed."""
    wrong = 0
    for name, check in checks.items():
        if error := error_of(check):
            print(f"{name}: {error}", flush=True)
            wrong += 1
    return {"cases": len(checks), "wrong": wrong}


def leaks(backend: str, layers: str, cycles: str, steps: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # A model that comes again is compiled once.
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        done(**drift.measure(backend, int(layers), int(cycles), int(steps)))


def hashes(backend: str, sizes: str, precision: str = "bf16") -> None:
    """Prints a hash of the results of the first of REPEATED, twice."""
    print(*(_hash(backend, REPEATED[: int(sizes)], precision) for _ in range(2)))


def _hash(backend: str, sizes: Sequence[Size], precision: str) -> str:
    """What the forward keeps takes turns with sizes."""
    found = hashlib.sha256()
    for i, (*routed, hidden, inner) in enumerate(sizes):
        widths = (hidden, inner)
        if precision == "fp8_block":
            widths = (routing_fuzz.whole(hidden), routing_fuzz.whole(inner))
        how: dict[str, Any] = {
            "backend": backend,
            "precision": precision,
            "save": SAVES[i % len(SAVES)],
        }
        for result in layer.run(normal_of((*routed, *widths), "skewed"), **how):
            found.update(result.tobytes())
    return found.hexdigest()


def repeats(backend: str, count: str, sizes: str, precision: str = "bf16") -> None:
    """`hashes` in so many processes, one after another."""
    arguments = ("tests.reliability_programs", "hashes", backend, sizes, precision)
    found: list[str] = []
    for _ in range(int(count)):
        if backend == "cuda":
            result = process.run_on_gpu("-m", *arguments)
        else:
            result = process.run_module(*arguments)
        assert result.returncode == 0, result.stderr
        found += result.stdout.splitlines()[-1].split()
    print(*sorted(set(found)), sep="\n")
    done(processes=int(count), runs=len(found), different=len(set(found)) - 1)


def stress(pass_name: str, runs: str) -> None:
    """Delays in every role; the right bits are those of the extension that users run."""
    with tempfile.TemporaryDirectory() as folder:
        delays = races.delayed_runs(PASSES[pass_name], Path(folder), int(runs), timeout_s=420)
    done(iterations=int(runs), fewest_delays_of_a_role=min(delays.values()))


def stress_ranks(backend: str, first: str, runs: str) -> None:
    """Two processes whose calls are launched late, with delays in every role."""
    how: dict[str, Any] = {"JAX_MEGAMOE_EXTENSION": "_cuda_delays"}
    arguments = ("tests.rank_programs", "skewed", backend, first, runs)
    how = how if backend == "cuda" else processes.ON_CPU
    pair = processes.run_pair(*arguments, timeout_s=450, **how)
    assert [process.code for process in pair] == [0, 0], pair
    found = [Skewed(**json.loads(process.said[-1])) for process in pair]
    print(*found, sep="\n")
    different = sum(of_rank.different for of_rank in found)
    done(iterations=min(of_rank.iterations for of_rank in found), different=different)


def pairs(backend: str, order: str, count: str) -> None:
    """The bits of one process in fresh pairs, which see their GPUs in one of `processes.ORDERS`."""
    how: dict[str, Any] = {} if backend == "cuda" else processes.ON_CPU
    for _ in range(int(count)):
        with tempfile.TemporaryDirectory() as folder:
            arguments = ("tests.rank_programs", "bits", folder, backend)
            pair = processes.run_pair(*arguments, visible=processes.ORDERS[int(order)], **how)
            assert [process.code for process in pair] == [0, 0], pair
            rank_programs.assert_bits(Path(folder), backend)
    done(pairs=int(count))


def stalled(backend: str) -> None:
    """A peer that stalls in each phase of a call; on a GPU the ranks share its multiprocessors."""
    how: dict[str, Any] = {"deadline": DEADLINES[backend]}
    if backend == "cuda":
        how |= {"one_gpu": True, "multiprocessors": 64}
    seconds: list[float] = []

    def judge(name: str) -> None:
        seconds.append(stalls.judge(name, **how))

    found = judged({name: functools.partial(judge, name) for name in stalls.CASES})
    # Turns of the machine are no time.
    late = {"slowest_s": max(seconds, default=0) - how["deadline"] / 1000}
    done(**found, **(late if backend == "cuda" else {}))


def fractions() -> None:
    """Too little memory, for each share of the device that JAX may take, taken at once or not."""
    seconds = [
        memory_limits.refused_s(fraction, preallocate)
        for fraction in FRACTIONS
        for preallocate in ("true", "false")
    ]
    done(settings=len(seconds), slowest_s=max(seconds))


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (
        *(fuzz, refusals, isolation, transforms, leaks, hashes, repeats, stress),
        *(stress_ranks, pairs, stalled, fractions),
    )
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    PROGRAMS[name](*arguments)
