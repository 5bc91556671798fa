"""The programs of one of two processes that share the experts of a layer, each with a device:

    python -m tests.rank_programs PORT PROCESS PROGRAM ARGUMENT...

    bits PATH BACKEND               saves this rank's part of the results on BATCHES in PATH
    train FAILURE PASS [DEADLINE_S] runs steps; in step FAILING_STEP before its PASS, "forward" or
                                    "backward", rank 1 has a FAILURE of `fail`
    differ KIND                     one call, for which rank 1 has one of DIFFERENCES
    skewed BACKEND FIRST RUNS       calls that are launched late, with delays inside; says `Skewed`

Each says its process id first. `train` then says the time at the failure and, where a call
raises, `Raised` as JSON; the error ends it as it would end a training script. So does `differ`.
"""

import functools
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jax_megamoe
from jax_megamoe import _ffi
from tests import layer, processes
from tests.cases import Batch, Results
from tests.forward import random_batch
from tests.processes import say

AXIS = PartitionSpec("expert")
# T of both ranks, K, E, H, I; the routing.
BATCHES = (((200, 2, 8, 128, 128), "distinct"), ((512, 8, 32, 256, 192), "skewed"))
FAILING_STEP = 7
STALL_S = 60.0
# Far below the deadline that waits have by default.
LATE_S = 90.0
# By which a call of either rank is late, at most.
MAX_SKEW_S = 0.05
# T of both ranks, K, E, H, I and options of rank 1, where rank 0 has the first of BATCHES and none.
DIFFERENCES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "tokens": ((400, 2, 8, 128, 128), {}),
    "choices": ((200, 3, 8, 128, 128), {}),
    "width": ((200, 2, 8, 128, 192), {}),
    "activation": (BATCHES[0][0], {"activation": "geglu"}),
    "sums": (BATCHES[0][0], {"combine_dtype": "bfloat16"}),
    "pool_factor": (BATCHES[0][0], {"pool_factor": 1.0}),
}
# The other rank has left when this one makes its next call.
LEAVE_S = 2.0


class Raised(NamedTuple):
    """What a call raised, and when, in seconds of the host's clock."""

    text: str
    at_s: float


class Skewed(NamedTuple):
    """How many calls gave other bits than the first of their batch, and a hash of these."""

    iterations: int
    different: int
    right: list[str]


def bits(rank: int, path: str, backend: str) -> None:
    found: dict[str, Any] = {
        f"{i}_{name}": _bytes(local(result))
        for i, (size, routing) in enumerate(BATCHES)
        for name, result in zip(Results._fields, results(size, routing, backend), strict=True)
    }
    np.savez(Path(path) / str(rank), **found)


def results(size: tuple[int, ...], routing: str, backend: str) -> Results:
    return layer.compiled(2, backend=backend)(*on_ranks(random_batch(size, routing)))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def assert_bits(path: Path, backend: str) -> None:
    """What `bits` has saved are the results of one process with both devices."""
    for i, (size, routing) in enumerate(BATCHES):
        right = layer.run(random_batch(size, routing), 2, backend=backend)
        for rank in range(2):
            found = np.load(path / f"{rank}.npz")
            for name, array in zip(Results._fields, right, strict=True):
                mine = _bytes(np.split(array, 2)[rank])
                np.testing.assert_array_equal(found[f"{i}_{name}"], mine, f"{name} of rank {rank}")


def on_ranks(batch: Batch) -> list[jax.Array]:
    """Its arrays over the devices of both processes."""
    mesh = layer.expert_mesh(2)
    rank = jax.process_index()

    def place(array: np.ndarray) -> jax.Array:
        mine = np.split(array, 2)[rank]
        sharding = NamedSharding(mesh, AXIS)
        return jax.make_array_from_process_local_data(sharding, mine, array.shape)

    return [place(array) for array in batch]


def local(array: jax.Array) -> np.ndarray:
    (shard,) = array.addressable_shards
    return np.asarray(shard.data)


def passes() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward, and the backward alone, of the arrays of a batch."""
    op = layer.bind(axis_name="expert", backend="cuda")
    pullback = layer.results_and_pullback(op)

    def program(run: Callable[..., Any]) -> Callable[..., Any]:
        mesh = layer.expert_mesh(2)
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=AXIS, out_specs=AXIS))

    return program(lambda *arrays: op(*arrays[:-1])), program(lambda *arrays: pullback(*arrays)[1:])


def fail(rank: int, failure: str) -> None:
    """Rank 1 fails; the other one does what goes with it."""
    if failure == "leave" and rank == 0:
        time.sleep(LEAVE_S)
        jax_megamoe.check_faults()
    say(time.time())
    kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
    if failure == "none" or rank == 0:
        return
    elif failure == "kill":
        kill()
    elif failure == "kill_later":  # at any moment of the steps that follow
        threading.Timer(0.5, kill).start()
    elif failure == "interrupt":  # as Ctrl-C
        os.kill(os.getpid(), signal.SIGINT)
    elif failure == "stall":
        time.sleep(STALL_S)
    elif failure == "late":
        time.sleep(LATE_S)
    elif failure == "leave":  # as who has ended its part
        os._exit(0)
    else:
        raise ValueError(failure)


def set_deadline(seconds: float) -> None:
    """Of all waits; it is no option of the layer."""
    for name in ("forward_call", "backward_call"):
        call = getattr(_ffi, name)
        setattr(_ffi, name, functools.partial(call, deadline_s=seconds))


def train(rank: int, failure: str, where: str, deadline_s: str | None = None) -> None:
    if deadline_s is not None:
        set_deadline(float(deadline_s))
    batch = on_ranks(random_batch(*BATCHES[1]))
    forward, backward = passes()
    for step in itertools.count(1):
        for name, run in (("forward", forward), ("backward", backward)):
            if (step, name) == (FAILING_STEP, where):
                fail(rank, failure)
            try:
                jax.block_until_ready(run(*batch))
            except jax.errors.JaxRuntimeError as error:
                say(json.dumps(Raised(str(error), time.time())._asdict()))
                raise
        if failure in ("none", "late") and step > FAILING_STEP:
            jax_megamoe.check_faults()
            return


def differ(rank: int, kind: str) -> None:
    size, options = DIFFERENCES[kind] if rank == 1 else (BATCHES[0][0], {})
    batch = on_ranks(random_batch(size, "distinct"))
    say(time.time())
    try:
        jax.block_until_ready(layer.compiled(2, backend="cuda", **options)(*batch))
    except jax.errors.JaxRuntimeError as error:
        say(json.dumps(Raised(str(error), time.time())._asdict()))
        raise


def skewed(rank: int, backend: str, first: str, runs: str) -> None:
    """FIRST is the number of the first call, of which all seeds are made.

    Delays inside of calls are those of the test build, which the kernels then have to be of.
    """

    def set_seed(seed: int) -> None:
        if backend == "cuda":
            module, reason = _ffi.extension()
            assert module is not None, reason
            module.set_delay_seed(seed)

    def hash_of(batch: list[jax.Array]) -> str:
        found = hashlib.sha256()
        for result in layer.compiled(2, backend=backend)(*batch):
            found.update(local(result).tobytes())
        return found.hexdigest()

    batches = [on_ranks(random_batch(*b)) for b in BATCHES]
    right = [hash_of(batch) for batch in batches]
    rng = np.random.default_rng((int(first), rank))
    different = 0
    for i in range(int(runs)):
        time.sleep(rng.uniform(0, MAX_SKEW_S))
        set_seed(int(first) + i + 1)
        b = i % len(batches)
        different += hash_of(batches[b]) != right[b]
    jax_megamoe.check_faults()
    say(json.dumps(Skewed(int(runs), different, right)._asdict()))


if __name__ == "__main__":
    port, process, program, *arguments = sys.argv[1:]
    say(os.getpid())
    programs: dict[str, Callable[..., None]] = {
        program.__name__: program for program in (bits, train, differ, skewed)
    }
    programs[program](processes.join(port, process), *arguments)
