"""Calls of several passes on an emulated machine: what one rank with room for all rows computes.

y, dx and dw have its bits. Weight gradients are added up over the passes in float32: exact where
all sums are, and within that rounding elsewhere.
"""

import functools
from typing import Any

import numpy as np
import pytest

from jax_megamoe import _ffi
from jax_megamoe.plan import forward_steps, make_plan
from tests import cases, compare, emulated
from tests.cases import BF16, F32, ROUTINGS, Batch, Results

# K, H and I; T and E are those of the ranks.
K, H, I = 3, 64, 128


def normal(ids: np.ndarray, experts: int) -> Batch:
    return cases.normal(ids, num_experts=experts, hidden=H, intermediate=I, dtype=BF16)


def routed(routing: str, ranks: int, *, tokens: int = 120) -> Batch:
    """With two experts on each rank; "rank r": all routes go to those of that one."""
    shape, experts = (tokens, K), 2 * ranks
    if routing.startswith("rank "):
        owner = int(routing.split()[1])
        ids = np.random.default_rng(owner).integers(2 * owner, 2 * owner + 2, shape)
        return normal(ids.astype(np.int32), experts)
    return normal(ROUTINGS[routing](tokens=tokens, choices=K, experts=experts), experts)


def passes(batch: Batch, ranks: int, pool_factor: float) -> list[int]:
    """How many each rank needs."""
    dims = emulated.dims_of(batch, ranks, pool_factor)
    ids = batch.expert_idx.reshape(dims.R, dims.T, dims.K)
    plans = [make_plan(ids, dims, rank, forward_steps(dims)) for rank in range(ranks)]
    return [int(plan.totals[2]) for plan in plans]


def run(batch: Batch, ranks: int, **how: Any) -> Results:
    y = emulated.forward(batch, ranks=ranks, **how)
    return Results(y, *emulated.backward(batch, ranks=ranks, weight_dtype=F32, **how))


@functools.cache
def of_one_rank(routing: str, ranks: int) -> Results:
    batch = routed(routing, ranks)
    return Results(emulated.forward(batch), *emulated.backward(batch, weight_dtype=F32))


def assert_right(found: Results, right: Results) -> None:
    for name, a, b in zip(Results._fields[:3], found, right, strict=False):
        compare.assert_bitwise(a, b, name)
    compare.assert_within(found, Results(*(a.astype(F32) for a in right)), 1e-6)


CASES = (
    (2, "rank 0", 1.25, [2, 1]),
    (2, "rank 1", 1.0, [1, 2]),
    (4, "rank 2", 1.0, [1, 1, 5, 1]),
    (4, "skewed", 1.25, [4, 1, 1, 1]),
    (4, "one_expert", 1.25, [1, 1, 1, 4]),
    (8, "rank 0", 2.0, [5, 1, 1, 1, 1, 1, 1, 1]),
)


@pytest.mark.parametrize(("ranks", "routing", "pool_factor", "num_passes"), CASES)
def test_results_are_those_of_one_rank(
    ranks: int, routing: str, pool_factor: float, num_passes: list[int]
) -> None:
    """Of whatever numbers of passes the ranks need, one beside several."""
    batch = routed(routing, ranks)
    assert passes(batch, ranks, pool_factor) == num_passes
    found = run(batch, ranks, pool_factor=pool_factor, seed=ranks, multiprocessors=2)
    assert_right(found, of_one_rank(routing, ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_oracle_is_exact(ranks: int) -> None:
    """Weight gradients too."""
    ids = routed("rank 1", ranks).expert_idx
    sizes: dict[str, Any] = {"num_experts": 2 * ranks, "hidden": H, "intermediate": I}
    batch = cases.oracle(ids, 0.5, dtype=BF16, **sizes)
    assert passes(batch, ranks, 1.25)[1] > 1
    found = run(batch, ranks, pool_factor=1.25)
    compare.assert_results_exact(found, cases.oracle_results(batch))


@pytest.mark.parametrize("multiprocessors", [2, 6])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_every_order_and_with_any_number_of_blocks(seed: int, multiprocessors: int) -> None:
    how = {"pool_factor": 1.0, "seed": seed, "multiprocessors": multiprocessors}
    assert_right(run(routed("rank 2", 4), 4, **how), of_one_rank("rank 2", 4))


def test_parts_one_after_another() -> None:
    batch, how = routed("rank 1", 2), {"ranks": 2, "pool_factor": 1.0}
    y = emulated.forward(batch, launches=_ffi.UNFUSED, **how)
    launches = _ffi.BACKWARD_UNFUSED
    gradients = emulated.backward(batch, weight_dtype=F32, launches=launches, **how)
    assert_right(Results(y, *gradients), of_one_rank("rank 1", 2))


def test_ranks_without_tokens() -> None:
    """One has no routes, and nobody has any to three."""
    batch = routed("rank 2", 4)
    ids = batch.expert_idx.copy()
    ids[30:60] = -1
    batch = batch._replace(expert_idx=ids)
    assert passes(batch, 4, 1.0) == [1, 1, 5, 1]
    right = emulated.forward(batch), *emulated.backward(batch, weight_dtype=F32)
    assert_right(run(batch, 4, pool_factor=1.0), Results(*right))


@pytest.mark.parametrize(("routing", "ranks"), [("rank 1", 2), ("skewed", 4), ("distinct", 4)])
def test_what_is_kept_changes_no_bit(routing: str, ranks: int) -> None:
    """Of the first pass g and u are kept, and of the others computed again."""
    batch, how = routed(routing, ranks), {"ranks": ranks, "pool_factor": 1.0}
    y, gate_up = emulated.forward_keeping(batch, **how)
    assert not np.isnan(gate_up.astype(F32)).any()
    found = emulated.backward(batch, gate_up=gate_up, **how)
    right = emulated.forward(batch, **how), *emulated.backward(batch, **how)
    compare.assert_results_bitwise(Results(y, *found), Results(*right))
    # What nobody has written would be NaN.
    nothing = emulated.backward(batch, gate_up=np.zeros_like(gate_up), **how)
    assert np.any(nothing[0] != found[0])


def test_without_weight_gradients() -> None:
    batch = routed("rank 1", 2)
    dx, dw = emulated.backward(batch, ranks=2, pool_factor=1.0, trainable=False)
    right = of_one_rank("rank 1", 2)
    compare.assert_bitwise(dx, right.dx, "dx")
    compare.assert_bitwise(dw, right.dw, "dw")


@pytest.mark.parametrize("seed", range(3))
def test_calls_one_after_another_in_the_same_memory(seed: int) -> None:
    """Of one pass and of several in turn, and of other ranks each: none sees what another left."""
    routings = ("rank 0", "distinct", "rank 3", "nothing", "skewed")
    batches = [routed(routing, 4) for routing in routings]
    calls = [emulated.Call(b, is_backward=i) for b in batches for i in (False, True)]
    found = emulated.run(calls, ranks=4, pool_factor=1.25, seed=seed, multiprocessors=2)
    for i, routing in enumerate(routings):
        (y,), gradients = found[2 * i : 2 * i + 2]
        assert_right(Results(y, *gradients), of_one_rank(routing, 4))


@pytest.mark.parametrize("failed", [0, 2])
def test_a_call_that_fails_ends_on_all_ranks(failed: int) -> None:
    """One with several passes or with one, at the beginning, and the others when they wait for it:
    no further pass is begun."""
    for is_backward in (False, True):
        call = emulated.Call(routed("rank 2", 4), is_backward=is_backward)
        how = {"pool_factor": 1.0, "deadline": 5000, "failed_ranks": (failed,)}
        assert failed in emulated.failed_ranks([call], ranks=4, **how)
