"""Routings to plan for, and what tests of a plan share."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from jax_megamoe.config import MAX_CHOICES, MAX_EXPERTS, RANK_COUNTS, TILE_ROWS, Dims
from jax_megamoe.plan import Plan, Step, backward_steps, forward_steps, make_plan
from jax_megamoe.plan_check import check_plan


@dataclasses.dataclass(frozen=True)
class Case:
    dims: Dims
    rank: int
    expert_idx: np.ndarray
    steps: tuple[Step, ...]

    def plan(self, pass_idx: int = 0) -> Plan:
        return make_plan(self.expert_idx, self.dims, self.rank, self.steps, pass_idx)

    def check(self, plan: Plan, pass_idx: int = 0) -> None:
        check_plan(plan, self.expert_idx, self.dims, self.rank, self.steps, pass_idx)


def make_case(dims: Dims, rank: int, kind: str, seed: int, backward: bool) -> Case:
    rng = np.random.default_rng(seed)
    shape = (dims.R, dims.T, dims.K)
    match kind:
        case "uniform":
            expert_idx = rng.integers(0, dims.E, shape)
        case "skewed":
            expert_idx = np.minimum(rng.geometric(0.3, shape) - 1, dims.E - 1)
        case "one":
            expert_idx = np.full(shape, rng.integers(dims.E))
        case "none":
            expert_idx = np.full(shape, -1)
        case _:
            bad = np.array([*INVALID_IDS, dims.E, dims.E + 1])
            expert_idx = rng.integers(0, dims.E, shape)
            expert_idx = np.where(rng.random(shape) < 0.5, rng.choice(bad, shape), expert_idx)
    steps = backward_steps(dims) if backward else forward_steps(dims)
    return Case(dims, rank, expert_idx.astype(np.int32), steps)


def case_of_tiles(tiles: Sequence[int], steps: tuple[Step, ...]) -> Case:
    """One rank of experts with these numbers of M-tiles, the last one with one row in it."""
    rows = [max(0, (count - 1) * TILE_ROWS + 1) for count in tiles]
    expert_idx = np.repeat(np.arange(len(tiles)), rows).astype(np.int32).reshape(1, -1, 1)
    dims = Dims(T=sum(rows), K=1, E=len(tiles), R=1, H=256, I=128)
    return Case(dims, 0, expert_idx, steps)


def steps_of_tiles(tiles_n: tuple[int, int], *, backward: bool = False) -> tuple[Step, ...]:
    """Two steps over pool rows and, in a backward, one with 17 M-tiles for each expert."""
    first = Step(name="first", tiles_m=None, tiles_n=tiles_n[0], lag=0)
    second = Step(name="second", tiles_m=None, tiles_n=tiles_n[1], lag=1, waits_on="first")
    third = Step(name="third", tiles_m=17, tiles_n=3, lag=4, waits_on="first")
    return (first, second, third) if backward else (first, second)


INVALID_IDS = (-1, -(2**31), 2**31 - 1)


def random_dims(rng: np.random.Generator, max_tokens: int) -> Dims:
    ranks = int(rng.choice(RANK_COUNTS))
    tokens = int(rng.choice([0, 1, int(rng.integers(2, 130)), int(rng.integers(130, max_tokens))]))
    choices = int(rng.choice([1, 2, 8, int(rng.integers(1, MAX_CHOICES + 1))]))
    per_rank = int(rng.choice([1, int(rng.integers(1, 17)), MAX_EXPERTS // ranks]))
    hidden = int(rng.choice([256, 700, 2048]))
    return Dims(T=tokens, K=choices, E=ranks * per_rank, R=ranks, H=hidden, I=3 * hidden // 8)


def random_routing(rng: np.random.Generator, dims: Dims) -> np.ndarray:
    """int32 [R, T, K]: even, skewed, one expert for all, a few experts; some ids invalid."""
    shape = (dims.R, dims.T, dims.K)
    few = rng.integers(0, dims.E, 3)
    idx = (
        rng.integers(0, dims.E, shape),
        np.minimum(rng.geometric(0.2, shape) - 1, dims.E - 1),
        np.full(shape, rng.integers(dims.E)),
        rng.choice(few, shape),
    )[rng.integers(4)]
    invalid = rng.choice([0.0, 0.0, 0.3, 1.0])
    bad = rng.choice((*INVALID_IDS, dims.E), shape)
    return np.where(rng.random(shape) < invalid, bad, idx).astype(np.int32)


def random_case(rng: np.random.Generator, max_tokens: int) -> Case:
    """Any sizes, routing and pass; fewer tokens a rank than max_tokens."""
    dims = random_dims(rng, max_tokens)
    rank = int(rng.integers(dims.R))
    steps = backward_steps(dims) if rng.random() < 0.5 else forward_steps(dims)
    return Case(dims, rank, random_routing(rng, dims), steps)


KINDS = ("uniform", "skewed", "one", "none", "invalid")


@st.composite
def case_arguments(draw: st.DrawFn) -> tuple[Dims, int, str, int, bool]:
    ranks = draw(st.sampled_from(RANK_COUNTS))
    dims = Dims(
        T=draw(st.integers(0, 200)),
        K=draw(st.integers(1, 8)),
        E=ranks * draw(st.integers(1, 6)),
        R=ranks,
        H=draw(st.sampled_from([1, 256, 700, 4000])),
        I=draw(st.sampled_from([1, 128, 300, 2000])),
    )
    rank = draw(st.integers(0, ranks - 1))
    kind = draw(st.sampled_from(KINDS))
    return dims, rank, kind, draw(st.integers(0, 2**32)), draw(st.booleans())


# Several waves of each step; experts of even and of odd numbers of tiles.
REFERENCE = make_case(Dims(T=600, K=4, E=8, R=2, H=4000, I=3800), 1, "skewed", 7, backward=True)


def swapped(array: np.ndarray, i: int, j: int) -> np.ndarray:
    array = array.copy()
    array[[i, j]] = array[[j, i]]
    return array


def waves_of(plan: Plan, step: int) -> np.ndarray:
    """The places of a step's waves in claim order."""
    return np.flatnonzero(plan.items[plan.waves[: plan.totals[0], 0], 0] // 2 == step)


def waves_swapped(plan: Plan, i: int, j: int) -> Plan:
    return plan._replace(waves=swapped(plan.waves, i, j))


def case_of_passes(rng: np.random.Generator) -> tuple[Case, int]:
    """A case of several ranks with a small pool, and how many passes its routing needs.

    Of most tokens the routes are the rank's, spread or of few experts, some ids are invalid.
    """
    ranks = int(rng.choice(RANK_COUNTS[1:]))
    experts = int(rng.choice([1, 1, 2, 6]))
    tokens = int(rng.choice([1, 2, 3, int(rng.integers(4, 40)), int(rng.integers(40, 400))]))
    choices = int(rng.integers(1, 9))
    factor = float(rng.choice([1, 1, 1.25, 2]))
    dims = Dims(T=tokens, K=choices, E=ranks * experts, R=ranks, H=512, I=256, pool_factor=factor)
    rank = int(rng.integers(ranks))
    local = rng.integers(0, int(rng.integers(1, experts + 1)), (ranks, tokens, choices))
    elsewhere = rng.integers(-1, dims.E, local.shape)
    is_local = rng.random(local.shape) < rng.choice([0.3, 0.9, 1.0, 1.0])
    ids = np.where(is_local, rank * experts + local, elsewhere).astype(np.int32)
    steps = backward_steps(dims) if rng.random() < 0.5 else forward_steps(dims)
    case = Case(dims, rank, ids, steps)
    return case, int(case.plan().totals[2])
