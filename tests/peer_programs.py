"""The program of one of two processes, each with a GPU of its own:

    python -m tests.peer_programs PORT PROCESS

It says one line, the fields of `Found` as JSON.
"""

import json
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests import peers, processes

AXIS = "expert"
SIZES = (5, 100_000, 17)
NUM_STEPS = 1000
# Of the two processes, where they differ.
OTHER_SIZES = (1_000_001, 2_000_002)
OTHER_CONFIGURATIONS = (0x101, 0x202)


class Found(NamedTuple):
    """What one process saw."""

    local_devices: int
    wrong: list[int]  # numbers of the rows, for each of SIZES
    wrong_in_steps: int
    size_error: str
    configuration_error: str
    wrong_afterwards: int


def main(port: str, process: str) -> None:
    rank = processes.join(port, process)
    mesh = Mesh(np.array(jax.devices("cuda")), (AXIS,))
    found = Found(
        local_devices=len(jax.local_devices(backend="cuda")),
        wrong=[count_wrong(mesh, rank, N) for N in SIZES],
        wrong_in_steps=int(local(peers.count_wrong(mesh, AXIS, NUM_STEPS), mesh, rank, 64)),
        size_error=error(peers.probe(mesh, AXIS), mesh, rank, OTHER_SIZES[rank]),
        configuration_error=error(
            peers.probe(mesh, AXIS, OTHER_CONFIGURATIONS[rank]), mesh, rank, 8
        ),
        wrong_afterwards=count_wrong(mesh, rank, SIZES[0]),
    )
    processes.say(json.dumps(found._asdict()))


def local(f: Any, mesh: Mesh, rank: int, N: int) -> np.ndarray:
    """The result on the own device for rows of N numbers."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    row = peers.rows(2, N)[rank : rank + 1]
    result = f(jax.make_array_from_process_local_data(sharding, row, (2, N)))
    (shard,) = result.addressable_shards
    return np.asarray(shard.data)[0]


def count_wrong(mesh: Mesh, rank: int, N: int) -> int:
    want = peers.rows(2, N)
    gathered = local(peers.all_gather(mesh, AXIS), mesh, rank, N)
    received = local(peers.probe(mesh, AXIS), mesh, rank, N)
    return int(np.sum(received != want) + np.sum(gathered != want))


def error(f: Any, mesh: Mesh, rank: int, N: int) -> str:
    try:
        local(f, mesh, rank, N)
    except jax.errors.JaxRuntimeError as raised:
        return str(raised)
    return ""


if __name__ == "__main__":
    main(*sys.argv[1:])
