"""A kernel that walks a plan's list finishes, with any number of resident blocks."""

import collections
import random
from collections.abc import Iterator

import pytest

from jax_megamoe.config import Dims
from jax_megamoe.plan import WAVE_ITEMS, Plan, Step
from tests.plan_cases import (
    KINDS,
    REFERENCE,
    case_of_tiles,
    make_case,
    steps_of_tiles,
    waves_of,
    waves_swapped,
)


class Queue:
    """An executable model of the kernel's work queue: pairs of blocks claim the next item in turn,
    wait for what it reads, and finish it, at speeds chosen at random."""

    def __init__(self, plan: Plan, steps: tuple[Step, ...], seed: int) -> None:
        self.steps = steps
        self.names = [step.name for step in steps]
        self.random = random.Random(seed)
        self.claims = list(self.claimed(plan))
        self.unfinished = collections.Counter(
            key for item in self.claims for tile in self.tiles(item) for key in self.keys(tile)
        )

    @staticmethod
    def claimed(plan: Plan) -> Iterator[tuple[int, ...] | None]:
        """What each claim gets: an item, or None behind the end of a wave."""
        for claim in range(plan.totals[0] * WAVE_ITEMS):
            first, end = plan.waves[claim // WAVE_ITEMS].tolist()
            item = first + claim % WAVE_ITEMS
            yield tuple(plan.items[item].tolist()) if item < end else None

    def tiles(self, item: tuple[int, ...] | None) -> list[tuple[int, ...]]:
        """The tiles (step, expert, m, n) of a claim."""
        if item is None:
            return []
        kind, expert, m, n = item
        second = (m, n + 1) if kind % 2 else (m + 1, n)
        both = [(m, n), second] if second[1] < self.steps[kind // 2].tiles_n else [(m, n)]
        return [(kind // 2, expert, *place) for place in both]

    def keys(self, tile: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The readiness counters a tile belongs to: its M-tile and its expert."""
        step, expert, m, _ = tile
        return (step, expert), (step, expert, m)

    def ready(self, tile: tuple[int, ...]) -> bool:
        step, expert, m, _ = tile
        if not self.steps[step].waits_on:
            return True
        dep = self.names.index(self.steps[step].waits_on)
        key = (dep, expert, m) if self.steps[step].tiles_m is None else (dep, expert)
        return self.unfinished[key] == 0

    def run(self, num_pairs: int) -> None:
        """Asserts that some pair can always go on, until every item is finished."""
        next_claim, held = 0, {}
        while next_claim < len(self.claims) or held:
            while len(held) < num_pairs and next_claim < len(self.claims):
                pair = self.random.choice([b for b in range(num_pairs) if b not in held])
                held[pair], next_claim = self.tiles(self.claims[next_claim]), next_claim + 1
            able = [pair for pair, tiles in held.items() if all(map(self.ready, tiles))]
            assert able, f"all {len(held)} resident pairs wait; {next_claim} claims are made"
            for pair in self.random.sample(able, self.random.randint(1, len(able))):
                for tile in held.pop(pair):
                    self.unfinished.subtract(self.keys(tile))
        assert not any(self.unfinished.values())


@pytest.mark.parametrize("num_pairs", [1, 2, 7, 66])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_queue_finishes_with_any_number_of_blocks(
    kind: str, backward: bool, num_pairs: int
) -> None:
    dims = Dims(T=300, K=2, E=16, R=2, H=1300, I=1100)
    case = make_case(dims, 1, kind, 3, backward)
    Queue(case.plan(), case.steps, seed=num_pairs).run(num_pairs)


@pytest.mark.parametrize("num_pairs", [1, 2, 7, 66])
@pytest.mark.parametrize("tiles_n", [(1, 8), (8, 1), (3, 3)])
def test_queue_finishes_with_experts_of_several_groups(
    tiles_n: tuple[int, int], num_pairs: int
) -> None:
    case = case_of_tiles((0, 97, 3, 16, 33), steps_of_tiles(tiles_n, backward=True))
    plan = case.plan()
    case.check(plan)
    Queue(plan, case.steps, seed=num_pairs).run(num_pairs)


def test_queue_model_sees_a_deadlock() -> None:
    plan = REFERENCE.plan()
    late = waves_swapped(plan, waves_of(plan, 0)[0], waves_of(plan, 1)[0])
    with pytest.raises(AssertionError, match="resident pairs wait"):
        Queue(late, REFERENCE.steps, seed=0).run(1)
