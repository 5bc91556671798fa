"""The kernels of the plan, on an emulated machine, equal the NumPy twin bitwise.

The sources are those of the GPU build but for cuda/ptx. Blocks run one after another, warps in
random order, on memory full of garbage.
"""

import dataclasses

import numpy as np
import pytest

from jax_megamoe.config import MAX_CHOICES, MAX_EXPERTS, Dims
from jax_megamoe.plan import Plan, Step, backward_steps, forward_steps, make_plan
from tests import emulated
from tests.plan_cases import (
    KINDS,
    Case,
    case_of_passes,
    case_of_tiles,
    make_case,
    random_case,
    steps_of_tiles,
)

TILES = ((0, 33, 1, 16, 0, 17, 32), (15, 31, 0, 8), (0, 0, 66), (48, 0))
TILES_N = ((1, 8), (2, 1), (3, 2), (6, 8), (8, 3), (2, 16))


def assert_kernels_equal_twin(case: Case, seed: int = 0) -> None:
    got = emulated.plan(case.expert_idx, case.dims, case.rank, case.steps, seed=seed)
    for name, g, w in zip(Plan._fields, got, case.plan(), strict=True):
        np.testing.assert_array_equal(g, w, err_msg=f"{name}, rank {case.rank} of {case.dims}")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("tiles_n", TILES_N)
@pytest.mark.parametrize("tiles", TILES)
def test_experts_of_every_size(
    tiles: tuple[int, ...], tiles_n: tuple[int, int], backward: bool
) -> None:
    assert_kernels_equal_twin(case_of_tiles(tiles, steps_of_tiles(tiles_n, backward=backward)))


@pytest.mark.parametrize("lag", [0, 2, 100])
@pytest.mark.parametrize("tiles_n", [(1, 8), (8, 1)])
def test_lags(tiles_n: tuple[int, int], lag: int) -> None:
    first, second, third = steps_of_tiles(tiles_n, backward=True)
    steps = first, dataclasses.replace(second, lag=lag), dataclasses.replace(third, lag=3 * lag)
    assert_kernels_equal_twin(case_of_tiles((0, 70, 3, 0, 130), steps))


def steps_of(dims: Dims) -> dict[str, tuple[Step, ...]]:
    return {
        "forward": forward_steps(dims),
        "backward": backward_steps(dims),
        "frozen experts": backward_steps(dims, trainable_experts=False),
    }


@pytest.mark.parametrize("of", ["forward", "backward", "frozen experts"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_routings_of_every_pass(kind: str, num_ranks: int, of: str) -> None:
    dims = Dims(T=5000 // num_ranks, K=2, E=2 * num_ranks, R=num_ranks, H=2048, I=768)
    case = make_case(dims, 0, kind, num_ranks, backward=False)
    # The rank that has the rows, where only one has.
    rank = int(case.expert_idx[0, 0, 0]) // dims.experts_per_rank if kind == "one" else 0
    assert_kernels_equal_twin(dataclasses.replace(case, rank=rank, steps=steps_of(dims)[of]))


@pytest.mark.parametrize("seed", range(40))
def test_random_cases(seed: int) -> None:
    assert_kernels_equal_twin(random_case(np.random.default_rng(seed), max_tokens=600), seed)


@pytest.mark.parametrize("seed", range(20))
def test_every_pass(seed: int) -> None:
    """Those that the routing does not need leave all arrays as they are."""
    case, _ = case_of_passes(np.random.default_rng(seed))
    how = {"num_plans": min(case.dims.max_passes, 5), "seed": seed}
    found = emulated.plans(case.expert_idx, case.dims, case.rank, case.steps, **how)
    for p, plan in enumerate(found):
        for name, g, w in zip(Plan._fields, plan, case.plan(p), strict=True):
            np.testing.assert_array_equal(g, w, err_msg=f"{name}, pass {p} of {case.dims}")


@pytest.mark.parametrize("seed", range(5))
def test_every_order_of_warps_and_blocks(seed: int) -> None:
    dims = Dims(T=1500, K=8, E=24, R=4, H=2048, I=768)
    assert_kernels_equal_twin(make_case(dims, 1, "skewed", 3, backward=True), seed)


def test_more_waves_than_a_block_has_threads() -> None:
    dims = Dims(T=40, K=8, E=128, R=1, H=8192, I=3072)
    case = make_case(dims, 0, "uniform", 0, backward=True)
    assert case.plan().totals[0] > 1024
    assert_kernels_equal_twin(case)


def test_the_most_experts_and_choices() -> None:
    dims = Dims(T=100, K=MAX_CHOICES, E=MAX_EXPERTS, R=1, H=512, I=256)
    assert_kernels_equal_twin(make_case(dims, 0, "skewed", 0, backward=False))


@pytest.mark.parametrize("of", ["forward", "backward"])
def test_a_call_that_lacks_its_routes_has_none(of: str) -> None:
    """They may come while the plan is made, and lists of some and rows of others do not fit."""
    dims = Dims(T=300, K=4, E=8, R=2, H=64, I=64)
    ids = np.random.default_rng(0).integers(0, 8, (2, 300, 4)).astype(np.int32)
    got = emulated.plan(ids, dims, 1, steps_of(dims)[of], failed_pass=0)
    want = make_plan(np.full_like(ids, -1), dims, 1, steps_of(dims)[of])
    for name, g, w in zip(Plan._fields, got, want, strict=True):
        np.testing.assert_array_equal(g, w, err_msg=name)


def test_a_call_that_fails_between_passes_has_no_other() -> None:
    dims = Dims(T=300, K=4, E=8, R=4, H=64, I=64, pool_factor=1.25)
    ids = np.random.default_rng(0).integers(2, 4, (4, 300, 4)).astype(np.int32)
    steps = forward_steps(dims)
    *_, before, third, last = emulated.plans(ids, dims, 1, steps, num_plans=4, failed_pass=2)
    assert before.totals[2] == dims.max_passes == 4
    assert third.totals[2] == last.totals[2] == 0
    for name, b, c, d in zip(Plan._fields[:-1], before, third, last, strict=False):
        np.testing.assert_array_equal(b, c, err_msg=name)
        np.testing.assert_array_equal(b, d, err_msg=name)
