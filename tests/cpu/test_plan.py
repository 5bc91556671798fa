"""The NumPy twin of the plan kernel against a naive construction, its checker, and the queue."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_megamoe.config import RANK_COUNTS, TILE_ROWS, Dims
from jax_megamoe.plan import (
    Plan,
    Step,
    backward_steps,
    forward_steps,
    make_plan,
    plan_sizes,
)
from jax_megamoe.plan_check import PlanError, check_plan


@dataclasses.dataclass(frozen=True)
class Case:
    dims: Dims
    rank: int
    expert_idx: np.ndarray
    steps: tuple[Step, ...]

    def plan(self) -> Plan:
        return make_plan(self.expert_idx, self.dims, self.rank, self.steps)

    def check(self, plan: Plan) -> None:
        check_plan(plan, self.expert_idx, self.dims, self.rank, self.steps)


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
            bad = np.array([-1, -(2**31), 2**31 - 1, dims.E, dims.E + 1])
            expert_idx = rng.integers(0, dims.E, shape)
            expert_idx = np.where(rng.random(shape) < 0.5, rng.choice(bad, shape), expert_idx)
    steps = backward_steps(dims) if backward else forward_steps(dims)
    return Case(dims, rank, expert_idx.astype(np.int32), steps)


KINDS = ("uniform", "skewed", "one", "none", "invalid")


@st.composite
def case_arguments(draw: st.DrawFn) -> tuple[Dims, int, str, int, bool]:
    ranks = draw(st.sampled_from(RANK_COUNTS))
    dims = Dims(
        T=draw(st.integers(0, 200)),
        K=draw(st.integers(1, 8)),
        E=ranks * draw(st.integers(1, 6)),
        R=ranks,
        H=draw(st.sampled_from([1, 200, 256, 700])),
        I=draw(st.sampled_from([1, 128, 300])),
    )
    rank = draw(st.integers(0, ranks - 1))
    kind = draw(st.sampled_from(KINDS))
    return dims, rank, kind, draw(st.integers(0, 2**32)), draw(st.booleans())


def naive_plan(case: Case) -> Plan:
    """The plan by lists and sorting, with nothing of the twin's arithmetic."""
    dims, sizes = case.dims, plan_sizes(case.dims, case.steps)
    experts = range(case.rank * dims.experts_per_rank, (case.rank + 1) * dims.experts_per_rank)
    rows: list[int] = []
    counts = np.zeros((dims.R, len(experts)))
    starts, tiles = [], []
    for local, expert in enumerate(experts):
        starts.append(len(rows))
        for slot, idx in enumerate(case.expert_idx.reshape(-1).tolist()):
            if idx == expert:
                counts[slot // (dims.T * dims.K), local] += 1
                rows.append(slot)
        while len(rows) % TILE_ROWS:
            rows.append(-1)
        tiles.append(range(starts[-1] // TILE_ROWS, len(rows) // TILE_ROWS))
    slot_row = np.full(dims.R * dims.T * dims.K, -1)
    last_row: dict[int, int] = {}
    for row, slot in enumerate(rows):
        if slot >= 0:
            slot_row[slot] = row
            last_row[slot // dims.K] = row
    order = sorted(last_row, key=lambda token: last_row[token])
    items = [
        (s, e, m, n)
        for s, step in enumerate(case.steps)
        for e in range(len(experts))
        for m in (tiles[e] if step.tiles_m is None else range(step.tiles_m))
        for n in range(step.tiles_n)
    ]
    items.sort(key=lambda i: (i[1] + case.steps[i[0]].lag, i[0], i[3], i[2]))

    def padded(values: list, size: int, *inner: int) -> np.ndarray:
        array = np.full((size, *inner), -1)
        array[: len(values)] = np.array(values).reshape(-1, *inner)
        return array

    arrays = (
        counts,
        np.array([*starts, len(rows)]),
        slot_row.reshape(dims.R, dims.T, dims.K),
        padded(rows, sizes.pool_rows),
        padded(items, sizes.items, 4),
        padded(order, dims.R * dims.T),
        np.array([len(items), len(order)]),
    )
    return Plan(*(a.astype(np.int32) for a in arrays))


@settings(max_examples=60, deadline=None)
@given(case_arguments())
def test_twin_equals_naive_construction(arguments: tuple[Dims, int, str, int, bool]) -> None:
    case = make_case(*arguments)
    plan = case.plan()
    for name, got, want in zip(Plan._fields, plan, naive_plan(case), strict=True):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, want, err_msg=name)


@settings(max_examples=60, deadline=None)
@given(case_arguments())
def test_checker_accepts_every_routing(arguments: tuple[Dims, int, str, int, bool]) -> None:
    case = make_case(*arguments)
    case.check(case.plan())


def test_sizes_are_reached() -> None:
    """One expert holds a multiple of TILE_ROWS rows plus one, every other expert one row."""
    dims = Dims(T=TILE_ROWS + 4, K=1, E=4, R=1, H=256, I=128)
    idx = np.zeros((1, dims.T, 1), np.int32)
    idx[0, :3, 0] = (1, 2, 3)
    case = Case(dims, 0, idx, forward_steps(dims))
    plan, sizes = case.plan(), plan_sizes(dims, case.steps)
    assert plan.expert_start[-1] == sizes.pool_rows
    assert plan.totals[0] == sizes.items


REFERENCE = make_case(Dims(T=300, K=4, E=8, R=2, H=700, I=300), 1, "skewed", 7, backward=True)


def swapped(array: np.ndarray, i: int, j: int) -> np.ndarray:
    array = array.copy()
    array[[i, j]] = array[[j, i]]
    return array


def changed(array: np.ndarray, index: int | tuple[int, ...], value: int | np.ndarray) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


def first_of(plan: Plan, step: int) -> int:
    return int(np.flatnonzero(plan.items[:, 0] == step)[0])


def rows_swapped(plan: Plan) -> Plan:
    """Two rows of one expert exchanged consistently in both maps."""
    row_slot = swapped(plan.row_slot, 0, 1)
    slot_row = plan.slot_row.copy()
    slot_row.reshape(-1)[row_slot[:2]] = (0, 1)
    return plan._replace(row_slot=row_slot, slot_row=slot_row)


def row_dropped(plan: Plan) -> Plan:
    slot_row = plan.slot_row.copy()
    slot_row.reshape(-1)[plan.row_slot[0]] = -1
    return plan._replace(row_slot=changed(plan.row_slot, 0, -1), slot_row=slot_row)


CORRUPTIONS = {
    "an item before what it waits for": (
        lambda p: p._replace(items=swapped(p.items, first_of(p, 0), first_of(p, 1))),
        "come earlier",
    ),
    "a weight gradient before its expert is done": (
        lambda p: p._replace(items=swapped(p.items, first_of(p, 0) + 1, first_of(p, 2))),
        "come earlier",
    ),
    "an item twice": (
        lambda p: p._replace(items=changed(p.items, 3, p.items[2])),
        "listed once",
    ),
    "an item left out": (
        lambda p: p._replace(totals=p.totals - np.array([1, 0], np.int32)),
        "num_items",
    ),
    "garbage after the items": (
        lambda p: p._replace(items=changed(p.items, -1, 0)),
        "ends with -1",
    ),
    "a row dropped": (row_dropped, "have a row"),
    "two rows of an expert out of order": (rows_swapped, "ordered by slot"),
    "a pad that names a slot": (
        lambda p: p._replace(row_slot=changed(p.row_slot, p.expert_start[1] - 1, 5)),
        "without a route",
    ),
    "the maps disagree": (
        lambda p: p._replace(row_slot=swapped(p.row_slot, 0, 1)),
        "undoes",
    ),
    "a count off by one": (
        lambda p: p._replace(counts=changed(p.counts, (0, 1), p.counts[0, 1] + 1)),
        "counts",
    ),
    "an expert off its tile": (
        lambda p: p._replace(expert_start=changed(p.expert_start, 1, p.expert_start[1] + 1)),
        "whole tiles",
    ),
    "tokens out of order": (
        lambda p: p._replace(token_order=swapped(p.token_order, 0, 1)),
        "last row",
    ),
    "a token left out": (
        lambda p: p._replace(totals=p.totals - np.array([0, 1], np.int32)),
        "num_tokens",
    ),
    "tokens counted from the end": (
        lambda p: p._replace(totals=p.totals - np.array([0, p.token_order.size], np.int32)),
        "num_tokens",
    ),
    "a token twice": (
        lambda p: p._replace(token_order=changed(p.token_order, 1, p.token_order[0])),
        "comes once",
    ),
    "a pool that is too short": (
        lambda p: p._replace(row_slot=p.row_slot[:-1]),
        "row_slot is int32",
    ),
    "wide rows": (
        lambda p: p._replace(slot_row=p.slot_row.astype(np.int64)),
        "slot_row is int32",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_checker_refuses_corrupted_plan(name: str) -> None:
    corrupt, rule = CORRUPTIONS[name]
    plan = REFERENCE.plan()
    REFERENCE.check(plan)
    with pytest.raises(PlanError, match=rule):
        REFERENCE.check(corrupt(plan))


class Queue:
    """An executable model of the kernel's work queue: blocks claim the next item of the list, wait
    for what it reads, and finish it, at speeds chosen at random."""

    def __init__(self, plan: Plan, steps: tuple[Step, ...], seed: int) -> None:
        self.items = [tuple(i) for i in plan.items[: plan.totals[0]].tolist()]
        self.steps = steps
        self.names = [step.name for step in steps]
        self.random = random.Random(seed)
        self.unfinished = {key: 0 for item in self.items for key in self.keys(item)}
        for item in self.items:
            for key in self.keys(item):
                self.unfinished[key] += 1

    def keys(self, item: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The readiness counters an item belongs to: its M-tile and its expert."""
        step, expert, m, _ = item
        return (step, expert), (step, expert, m)

    def ready(self, item: tuple[int, ...]) -> bool:
        step, expert, m, _ = item
        if not self.steps[step].waits_on:
            return True
        dep = self.names.index(self.steps[step].waits_on)
        key = (dep, expert, m) if self.steps[step].tiles_m is None else (dep, expert)
        return self.unfinished.get(key, 0) == 0

    def run(self, num_blocks: int) -> None:
        """Asserts that some block can always go on, until every item is finished."""
        next_item, held = 0, {}
        while next_item < len(self.items) or held:
            while len(held) < num_blocks and next_item < len(self.items):
                block = self.random.choice([b for b in range(num_blocks) if b not in held])
                held[block], next_item = self.items[next_item], next_item + 1
            able = [block for block, item in held.items() if self.ready(item)]
            assert able, f"all {len(held)} resident blocks wait; {next_item} items are claimed"
            for block in self.random.sample(able, self.random.randint(1, len(able))):
                for key in self.keys(held.pop(block)):
                    self.unfinished[key] -= 1
        assert not any(self.unfinished.values())


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 132])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_queue_finishes_with_any_number_of_blocks(
    kind: str, backward: bool, num_blocks: int
) -> None:
    dims = Dims(T=150, K=2, E=16, R=2, H=300, I=200)
    case = make_case(dims, 1, kind, 3, backward)
    Queue(case.plan(), case.steps, seed=num_blocks).run(num_blocks)


def test_queue_model_sees_a_deadlock() -> None:
    plan = REFERENCE.plan()
    late = plan._replace(items=swapped(plan.items, first_of(plan, 0), first_of(plan, 1)))
    with pytest.raises(AssertionError, match="resident blocks wait"):
        Queue(late, REFERENCE.steps, seed=0).run(1)


def test_lags_at_the_measured_shapes() -> None:
    """The best lags of dX and Down measured on H200: 4 experts at 30B, 2 at 235B."""
    for hidden, intermediate, lag in ((2048, 768, 4), (4096, 1536, 2)):
        dims = Dims(T=16384, K=8, E=128, R=1, H=hidden, I=intermediate)
        assert forward_steps(dims)[1].lag == lag
        assert backward_steps(dims)[1].lag == lag


def test_frozen_experts_have_no_weight_gradient_items() -> None:
    names = [s.name for s in backward_steps(REFERENCE.dims, trainable_experts=False)]
    assert names == ["recompute_gate_up_dgrad_down", "dgrad_gate_up"]


LIMITS = {
    "K": ({"K": 33}, "K = 33"),
    "E": ({"E": 1024}, "E = 1024"),
    "R": ({"R": 3, "E": 9}, "R = 3"),
    "E over R": ({"R": 8, "E": 12}, "E = 12 is not a multiple of R = 8"),
    "routes": ({"T": 140_000_000, "K": 32}, "routes"),
    "items": ({"T": 140_000, "K": 32, "R": 8, "E": 512, "H": 2**21, "I": 128}, "work items"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_sizes_refuse_by_name(name: str) -> None:
    change, text = LIMITS[name]
    dims = dataclasses.replace(REFERENCE.dims, **change)
    with pytest.raises(ValueError, match=text):
        plan_sizes(dims, forward_steps(dims))


def test_largest_supported_sizes_fit() -> None:
    dims = Dims(T=140_000, K=32, E=512, R=8, H=8192, I=3072)
    assert plan_sizes(dims, backward_steps(dims)).pool_rows < 2**31


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"name": "gate_up"}, "a name of its own"),
        ({"name": "", "waits_on": ""}, "a name of its own"),
        ({"tiles_n": 0}, "at least 1 tile"),
        ({"tiles_n": -1}, "at least 1 tile"),
        ({"tiles_m": 0}, "at least 1 tile"),
    ],
)
def test_steps_must_have_names_and_tiles(change: dict[str, Any], rule: str) -> None:
    up, down = forward_steps(REFERENCE.dims)
    with pytest.raises(ValueError, match=rule):
        plan_sizes(REFERENCE.dims, (up, dataclasses.replace(down, **change)))


def test_steps_must_wait_on_an_earlier_step() -> None:
    up, down = forward_steps(REFERENCE.dims)
    for steps in ((down, up), (dataclasses.replace(up, lag=9), down)):
        with pytest.raises(ValueError, match="earlier step of no greater lag"):
            plan_sizes(REFERENCE.dims, steps)
