"""Several processes of one run: how they meet, what each has, and what they decide together.

Each has the whole text and makes the rows of every step, of which its devices get theirs. The first
one alone writes and speaks.
"""

import argparse
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from lm.terminal import StopRequest, UsageError

from jax_megamoe.models import training

AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several processes, each started with the same options but I")
    add = group.add_argument
    where = "where process 0 listens; auto: as Slurm, Open MPI and others that JAX knows say"
    add("--coordinator", metavar="HOST:PORT", help=where)
    add("--num-processes", type=int, metavar="N", help="of the run, with HOST:PORT")
    add("--process-id", type=int, metavar="I", help="of this one, from 0, with HOST:PORT")


def join(args: argparse.Namespace) -> None:
    """Meets the other processes, if there are any. Before JAX looks for devices.

    Raises:
      UsageError: options that do not fit each other, or the processes do not meet.
    """
    numbers = (args.num_processes, args.process_id)
    if args.coordinator in (None, AUTO):
        if numbers != (None, None):
            raise UsageError("--num-processes and --process-id need --coordinator HOST:PORT.")
        if args.coordinator is None:
            return
    elif None in numbers:
        raise UsageError("--coordinator HOST:PORT needs --num-processes and --process-id.")
    elif args.num_processes < 1:
        raise UsageError(f"--num-processes must be at least 1, but it is {args.num_processes}.")
    elif not 0 <= args.process_id < args.num_processes:
        raise UsageError(
            f"--process-id must be in 0..{args.num_processes - 1}, but it is {args.process_id}."
        )
    where = () if args.coordinator == AUTO else (args.coordinator, *numbers)
    try:
        jax.distributed.initialize(*where)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"--coordinator {args.coordinator}: {error}") from error


def is_first() -> bool:
    return jax.process_index() == 0


def check_same(what: str, value: Any) -> None:
    """Raises UsageError in each process unless all of them have the same JSON `value`."""
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    of_all = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    if different := [i for i, row in enumerate(of_all) if not np.array_equal(row, of_all[0])]:
        raise UsageError(f"process {different[0]} has {what} other than process 0.")


class Placing:
    """Puts the rows of a batch, which each process has all of, on the devices of the mesh."""

    def __init__(self, mesh: jax.sharding.Mesh, num_microbatches: int) -> None:
        self._sharding = jax.NamedSharding(mesh, training.BATCH_SPEC)
        self._num_microbatches = num_microbatches

    def __call__(self, tokens: np.ndarray, segment_ids: np.ndarray) -> training.Batch:
        """Of int32 [B, S + 1] each, made for it: on a CPU the devices may use their memory."""
        shape = (self._num_microbatches, -1, tokens.shape[1])
        parts = (a.reshape(shape) for a in (tokens, segment_ids))
        make = jax.make_array_from_process_local_data
        return training.Batch(*(make(self._sharding, part, part.shape) for part in parts))


class SharedStop:
    """Whether a process was asked to stop. Several processes decide it by sums over all devices,
    which are read a step later, when they are there, so that no device waits for them."""

    def __init__(self, own: StopRequest, mesh: jax.sharding.Mesh) -> None:
        self._own, self._num_devices = own, mesh.size
        self._split = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
        self._sum = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, jax.P()))
        self._earlier: jax.Array | None = None

    def asked(self) -> bool:
        """To be called once in each step, by all processes."""
        if jax.process_count() == 1:
            return self._own.asked
        earlier = self._earlier
        own = np.int32(self._own.asked)
        flags = jax.make_array_from_callback(
            (self._num_devices,), self._split, lambda index: np.full(1, own, np.int32)
        )
        self._earlier = self._sum(flags)
        return earlier is not None and bool(earlier)
