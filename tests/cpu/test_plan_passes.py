"""Plans of calls whose rows do not fit the pool at once: each pass is proved on its own."""

import math

import numpy as np
import pytest

from jax_megamoe.config import TILE_ROWS, Dims
from jax_megamoe.plan import forward_steps, token_range
from tests.plan_cases import Case, case_of_passes

NUM_CASES = 60


def dims_of(ranks: int, factor: float, *, tokens: int = 16384) -> Dims:
    return Dims(T=tokens, K=8, E=128, R=ranks, H=2048, I=768, pool_factor=factor)


@pytest.mark.parametrize(
    ("ranks", "factor", "num_passes"),
    [(1, 1.0, 1), (2, 1.0, 2), (2, 1.25, 2), (2, 2.0, 1), (4, 2.0, 2), (8, 2.0, 4), (8, 1.25, 7)],
)
def test_how_many_passes_any_routing_needs(ranks: int, factor: float, num_passes: int) -> None:
    dims = dims_of(ranks, factor)
    assert dims.max_passes == num_passes
    rows = math.floor(factor * dims.T * dims.K)
    assert rows <= dims.pool_rows <= rows + 127 * dims.experts_per_rank
    # All tokens of a part, of every rank, and no larger part.
    most_tokens = -(-dims.T // num_passes)
    assert ranks * most_tokens * dims.K <= rows
    assert num_passes == 1 or ranks * (-(-dims.T // (num_passes - 1))) * dims.K > rows


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_large_factor_is_room_for_any_routing(ranks: int) -> None:
    for factor in (float(ranks), ranks + 0.5, 1e300):
        dims = dims_of(ranks, factor)
        assert (dims.pool_rows, dims.max_passes) == (dims.most_rows, 1)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 15])
def test_a_pass_takes_a_token_of_each_rank_at_least(tokens: int) -> None:
    dims = dims_of(8, 1.0, tokens=tokens)
    assert dims.max_passes == max(1, tokens)
    assert dims.pool_routes == min(1, tokens) * max(tokens, 8) * dims.K


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_every_pass_is_proved_and_together_they_take_every_route_once(seed: int) -> None:
    case, num_passes = case_of_passes(np.random.default_rng(seed))
    dims = case.dims
    rows = np.zeros((dims.R, dims.T, dims.K), int)
    for p in range(num_passes):
        plan = case.plan(p)
        case.check(plan, p)
        rows += plan.slot_row >= 0
        np.testing.assert_array_equal(plan.counts, case.plan().counts)
    local = case.expert_idx - case.rank * dims.experts_per_rank
    np.testing.assert_array_equal(rows, (local >= 0) & (local < dims.experts_per_rank))
    # Behind the last one nothing changes.
    for a, b in zip(case.plan(num_passes), case.plan(num_passes - 1), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_cases_have_one_pass_and_several() -> None:
    cases = [case_of_passes(np.random.default_rng(seed)) for seed in range(NUM_CASES)]
    assert sum(n == 1 and case.dims.max_passes > 1 for case, n in cases) > 5
    assert sum(n > 1 for case, n in cases) > 15


@pytest.mark.parametrize("more", [0, 1])
def test_one_pass_takes_all_rows_that_fit(more: int) -> None:
    """The pool is full, or one row is too many."""
    dims = Dims(T=8 * TILE_ROWS, K=1, E=4, R=2, H=64, I=64, pool_factor=1.0)
    assert dims.pool_rows == (2 + (8 * TILE_ROWS - 2) // TILE_ROWS) * TILE_ROWS
    idx = np.full(2 * dims.T, 3, np.int32)
    # Two experts with a row more than so many tiles have, and one more tile for both.
    idx[: 4 * TILE_ROWS + 1] = 0
    idx[4 * TILE_ROWS + 1 : dims.pool_rows - TILE_ROWS + 1 + more] = 1
    case = Case(dims, 0, idx.reshape(2, dims.T, 1), forward_steps(dims))
    plan = case.plan()
    case.check(plan)
    assert plan.totals[2] == 1 + more
    if not more:
        assert plan.expert_start[-1] == dims.pool_rows


def test_parts_differ_by_a_token_at_most() -> None:
    for tokens, parts in ((7, 3), (8, 8), (1000, 7)):
        ranges = [token_range(tokens, p, parts) for p in range(parts)]
        assert [t for r in ranges for t in r] == list(range(tokens))
        assert {len(r) for r in ranges} <= {tokens // parts, -(-tokens // parts)}
