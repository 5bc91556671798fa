"""GPUs of one host reach each other's memory, whatever processes, meshes and sizes they come in."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests import peers, processes
from tests.peer_programs import OTHER_CONFIGURATIONS, OTHER_SIZES, SIZES, Found

pytestmark = pytest.mark.multi_gpu(2)

AXIS = "expert"


def mesh_of(*order: int) -> Mesh:
    devices = jax.devices("cuda")
    return Mesh(np.array([devices[i] for i in order]), (AXIS,))


def assert_all_receive(mesh: Mesh, axis: str, N: int, first: int = 0) -> None:
    row = peers.rows(mesh.size, N, first)
    received = np.asarray(peers.probe(mesh, axis)(row))
    np.testing.assert_array_equal(received, np.asarray(peers.all_gather(mesh, axis)(row)))
    np.testing.assert_array_equal(received, np.stack([row] * mesh.size))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_every_rank_receives_the_rows_of_all_in_the_order_of_the_axis(
    order: tuple[int, ...],
) -> None:
    """The sizes grow, beyond the workspace too, and shrink."""
    for N in (7, 3_000_000, 7, 5_000_000):
        assert_all_receive(mesh_of(*order), AXIS, N, first=N)


@pytest.mark.parametrize("N", [1, 20_000])
def test_a_thousand_steps_with_a_late_rank(N: int) -> None:
    wrong = peers.count_wrong(mesh_of(0, 1), AXIS, 1000)(peers.rows(2, N))
    np.testing.assert_array_equal(np.asarray(wrong), [0, 0])


def test_meshes_and_axes_take_turns_in_one_process() -> None:
    named_otherwise = Mesh(np.array(jax.devices("cuda")[:2]).reshape(1, 2), ("data", "model"))
    for turn in range(3):
        assert_all_receive(mesh_of(0, 1), AXIS, 100, first=turn)
        assert_all_receive(mesh_of(1, 0), AXIS, 300, first=turn)
        assert_all_receive(named_otherwise, "model", 200, first=turn)


def test_calls_that_nobody_waits_for_keep_their_order() -> None:
    first, second = (peers.probe(mesh_of(*order), AXIS) for order in ((0, 1), (1, 0)))
    sent = [peers.rows(2, 33, first=i) for i in range(100)]
    pending = [(first(row), second(row)) for row in sent]
    for row, received in zip(sent, pending, strict=True):
        for array in received:
            np.testing.assert_array_equal(np.asarray(array), np.stack([row] * 2))


def _run_pair() -> list[Found]:
    """tests.peer_programs in two processes, each of which sees one GPU."""
    pair = processes.run_pair("tests.peer_programs")
    assert [process.code for process in pair] == [0, 0], pair
    return [Found(**json.loads(process.said[-1])) for process in pair]


def test_a_process_for_each_gpu() -> None:
    """The same rows; and what differs between the processes is refused in both, by name."""
    pair = _run_pair()
    for found in pair:
        assert found.local_devices == 1
        assert found.wrong == [0] * len(SIZES)
        assert found.wrong_in_steps == 0 and found.wrong_afterwards == 0
        # Flags, and two halves of two rows in steps of 16 bytes.
        bytes_of = [256 + 2 * -(-2 * N * 4 // 16) * 16 for N in OTHER_SIZES]
        assert (
            f"rank 0 asks for a workspace of {bytes_of[0]} bytes and rank 1 for {bytes_of[1]}"
            in found.size_error
        )
        first, second = (f"0x{c:016x}" for c in OTHER_CONFIGURATIONS)
        assert f"rank 0 has configuration {first} and rank 1 {second}" in found.configuration_error
