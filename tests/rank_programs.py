"""The programs of one of two processes that share the experts of a layer, each with a device:

    python -m tests.rank_programs PORT PROCESS PROGRAM ARGUMENT...

    bits PATH BACKEND               saves this rank's part of the results on BATCHES in PATH
    train FAILURE PASS [DEADLINE_S] runs steps; in step FAILING_STEP before its PASS, "forward" or
                                    "backward", rank 1 has a FAILURE of `fail`

Each says its process id first. `train` then says the time at the failure and, where a call
raises, `Raised` as JSON; the error ends it as it would end a training script.
"""

import functools
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
# The other rank has left when this one makes its next call.
LEAVE_S = 2.0


class Raised(NamedTuple):
    """What a call raised, and when, in seconds of the host's clock."""

    text: str
    at_s: float


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


if __name__ == "__main__":
    port, process, program, *arguments = sys.argv[1:]
    say(os.getpid())
    {"bits": bits, "train": train}[program](processes.join(port, process), *arguments)
