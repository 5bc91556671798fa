"""The kernels of several ranks on an emulated machine: the bits of one rank with all experts.

Each rank's kernel runs on a device of its own, all at once, in random orders of events.
"""

from typing import Any

import numpy as np
import pytest

from jax_megamoe import _ffi
from tests import compare, emulated
from tests.cases import F32, ROUTINGS, Batch, Results, normal_of

# T of all ranks, K, E, H, I and the routing.
CASES = (
    ((8, 8, 16, 64, 64), "distinct"),
    ((160, 2, 8, 128, 192), "skewed"),
    ((304, 3, 8, 320, 64), "invalid"),
    ((200, 2, 8, 64, 320), "duplicates"),
    ((136, 2, 8, 576, 256), "one_expert"),
    ((40, 2, 8, 64, 64), "nothing"),
    ((0, 2, 8, 64, 64), "distinct"),
)
IDS = [f"{size}-{routing}" for size, routing in CASES]


def assert_as_one_rank(batch: Batch, ranks: int, **how: Any) -> None:
    how["pool_factor"] = float(ranks)  # one pass
    right = emulated.forward(batch), *emulated.backward(batch, weight_dtype=F32)
    found = (
        emulated.forward(batch, ranks=ranks, **how),
        *emulated.backward(batch, ranks=ranks, weight_dtype=F32, **how),
    )
    compare.assert_results_bitwise(Results(*found), Results(*right))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_every_bit_is_that_of_one_rank(size: tuple[int, ...], routing: str, ranks: int) -> None:
    assert_as_one_rank(normal_of(size, routing), ranks, seed=ranks)


def test_rows_in_several_batches() -> None:
    assert_as_one_rank(normal_of((8, 2, 8, 4160, 64), "distinct"), 2)


@pytest.mark.parametrize("multiprocessors", [2, 6])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_every_order_and_with_any_number_of_blocks(seed: int, multiprocessors: int) -> None:
    assert_as_one_rank(normal_of(*CASES[2]), 2, seed=seed, multiprocessors=multiprocessors)


def test_parts_one_after_another() -> None:
    batch = normal_of(*CASES[2])
    right = emulated.forward(batch), *emulated.backward(batch)
    y = emulated.forward(batch, ranks=2, launches=_ffi.UNFUSED)
    found = y, *emulated.backward(batch, ranks=2, launches=_ffi.BACKWARD_UNFUSED)
    compare.assert_results_bitwise(Results(*found), Results(*right))


@pytest.mark.parametrize("owner", [0, 1])
def test_all_tokens_to_one_rank(owner: int) -> None:
    """The other one has no rows."""
    size = (200, 2, 8, 64, 64)
    ids = np.random.default_rng(owner).integers(0, 4, size[:2]).astype(np.int32) + 4 * owner
    assert_as_one_rank(normal_of(size, ids), 2)


@pytest.mark.parametrize("source", [0, 1])
def test_a_rank_without_routes(source: int) -> None:
    """None of its tokens goes anywhere."""
    size = (200, 2, 8, 64, 64)
    ids = ROUTINGS["distinct"](tokens=200, choices=2, experts=8).copy()
    ids[100 * source : 100 * (source + 1)] = -1
    assert_as_one_rank(normal_of(size, ids), 2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_kept_changes_no_bit(ranks: int) -> None:
    batch = normal_of(*CASES[2])
    right = emulated.forward(batch), *emulated.backward(batch)
    how: dict[str, Any] = {"ranks": ranks, "pool_factor": float(ranks)}
    y, gate_up = emulated.forward_keeping(batch, **how)
    found = emulated.backward(batch, gate_up=gate_up, **how)
    compare.assert_results_bitwise(Results(y, *found), Results(*right))


def test_nan_stays_with_its_token() -> None:
    """Of a token of one rank, in the rows of another."""
    batch = normal_of(*CASES[1])
    clean = emulated.forward(batch, ranks=2)
    x = batch.x.copy()
    x[0] = np.nan
    found = emulated.forward(batch._replace(x=x), ranks=2)
    assert np.isnan(found[0].astype(F32)).all()
    compare.assert_bitwise(found[1:], clean[1:], "y")


@pytest.mark.parametrize("seed", range(3))
def test_calls_that_have_failed_end(seed: int) -> None:
    """On all ranks: their waits come back early, those for peers too."""
    batch = normal_of(*CASES[1])
    how: dict[str, Any] = {"ranks": 2, "seed": seed, "failed_ranks": (0, 1)}
    assert emulated.forward(batch, **how).shape == batch.x.shape
    assert emulated.backward(batch, **how)[0].shape == batch.x.shape
    for part in _ffi.UNFUSED:
        assert emulated.forward(batch, launches=(part,), **how).shape == batch.x.shape
    for part in _ffi.BACKWARD_UNFUSED:
        assert emulated.backward(batch, launches=(part,), **how)[0].shape == batch.x.shape


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_calls_one_after_another_in_the_same_memory(seed: int, ranks: int) -> None:
    """Of other tokens and routes each; a rank begins a call while others end the one before."""
    routings = ("invalid", "one_expert", "distinct", "nothing", "skewed")
    size = (120, 3, 8, 64, 64)
    batches = []
    for i, routing in enumerate(routings):
        batch = normal_of(size, routing)
        roll = {f: np.roll(getattr(batch, f), 7 * i + 1, axis=0) for f in ("x", "dy")}
        batches.append(batch._replace(**roll))
    calls = [emulated.Call(b, is_backward=i) for b in batches for i in (False, True)]
    how: dict[str, Any] = {"pool_factor": float(ranks), "seed": seed, "multiprocessors": 2}
    found = emulated.run(calls, ranks=ranks, **how)
    for i, batch in enumerate(batches):
        right = emulated.forward(batch), *emulated.backward(batch)
        (y,), gradients = found[2 * i : 2 * i + 2]
        compare.assert_results_bitwise(Results(y, *gradients), Results(*right))


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_that_needs_nothing_goes_ahead(seed: int) -> None:
    """In every other call no token goes anywhere, so no sums tell a rank how far the others are:
    they may still make their plans of its routes when it sends those of the next call."""
    size = (8, 2, 8, 64, 64)
    batches = [normal_of(size, ("distinct", "nothing")[i % 2]) for i in range(10)]
    right = [emulated.forward(batch) for batch in batches[:2]]
    found = emulated.run([emulated.Call(b) for b in batches], ranks=2, seed=seed, multiprocessors=2)
    for i, (y,) in enumerate(found):
        compare.assert_bitwise(y, right[i % 2], "y")


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(("ranks", "failed"), [(2, 0), (4, 3)])
def test_ranks_that_need_a_failed_one_fail_too(ranks: int, failed: int, is_backward: bool) -> None:
    """None takes the garbage of a failed rank for sums. All end, when their own waits give up."""
    batch = normal_of((64, 8, 8, 64, 64), "distinct")
    call = emulated.Call(batch, is_backward=is_backward)
    found = emulated.failed_ranks([call], ranks=ranks, failed_ranks=(failed,), deadline=5000)
    assert found == list(range(ranks))


@pytest.mark.parametrize("is_backward", [False, True])
def test_nobody_waits_for_a_rank_whose_process_has_ended(is_backward: bool) -> None:
    """There is no deadline: what the host says ends the waits."""
    call = emulated.Call(normal_of((64, 8, 8, 64, 64), "distinct"), is_backward=is_backward)
    gone = {"failed_ranks": (1,), "ended_ranks": (1,)}
    assert emulated.failed_ranks([call], ranks=2, **gone) == [0, 1]


def test_the_end_of_a_rank_ends_no_wait_for_others() -> None:
    """It may have left with its work done, before the others have ended theirs."""
    batch = normal_of((256, 2, 8, 64, 64), "distinct")
    ids = np.where(batch.expert_idx < 6, batch.expert_idx, -1)
    ids[192:] = -1  # the last rank neither sends nor gets a row
    batch = batch._replace(expert_idx=ids)
    right = emulated.forward(batch)
    for seed in range(3):
        y = emulated.forward(batch, ranks=4, seed=seed, ended_ranks=(3,), multiprocessors=2)
        compare.assert_bitwise(y, right, "y")


def test_calls_behind_one_that_failed_do_not_wait_again() -> None:
    """The machine gives up where ranks wait to the deadline of more than one call."""
    call = emulated.Call(normal_of((64, 8, 8, 64, 64), "distinct"))
    late = {"failed_ranks": (1,), "deadline": 80_000}
    assert emulated.failed_ranks([call] * 4, ranks=2, **late) == [0, 1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_byte_behind_an_array_is_found(ranks: int) -> None:
    """Here one that no kernel has written; so every other run shows that none is."""
    batch = normal_of(*CASES[0])
    with emulated.with_fault(-1), pytest.raises(AssertionError, match="behind one of its arrays"):
        emulated.forward(batch, ranks=ranks)
