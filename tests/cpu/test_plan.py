"""The NumPy twin of the plan kernel against a naive construction, and the sizes of a plan."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from jax_megamoe.config import TILE_ROWS, Dims
from jax_megamoe.plan import (
    GROUP_TILES,
    WAVE_ITEMS,
    Plan,
    Step,
    backward_steps,
    forward_steps,
    plan_sizes,
)
from tests.plan_cases import (
    REFERENCE,
    Case,
    case_arguments,
    case_of_passes,
    case_of_tiles,
    make_case,
    steps_of_tiles,
)


def naive_plan(case: Case, pass_idx: int = 0, num_passes: int = 1) -> Plan:
    """The plan by lists and sorting, with nothing of the twin's arithmetic."""
    dims, sizes = case.dims, plan_sizes(case.dims, case.steps)
    experts = range(case.rank * dims.experts_per_rank, (case.rank + 1) * dims.experts_per_rank)
    part_of: list[int] = []  # of each token of a rank
    for p in range(num_passes):
        part_of += [p] * (dims.T * (p + 1) // num_passes - len(part_of))
    rows: list[int] = []
    expert_rows: list[int] = []
    counts = np.zeros((dims.R, len(experts)))
    starts, tiles = [], []
    for local, expert in enumerate(experts):
        starts.append(len(rows))
        for slot, idx in enumerate(case.expert_idx.reshape(-1).tolist()):
            if idx == expert:
                counts[slot // (dims.T * dims.K), local] += 1
                if part_of[slot // dims.K % dims.T] == pass_idx:
                    rows.append(slot)
        expert_rows.append(len(rows) - starts[-1])
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
    items, waves = naive_work(tiles, case.steps)

    def padded(values: list, size: int, *inner: int) -> np.ndarray:
        array = np.full((size, *inner), -1)
        array[: len(values)] = np.array(values).reshape(-1, *inner)
        return array

    arrays = (
        counts,
        np.array([*starts, len(rows)]),
        np.array(expert_rows),
        slot_row.reshape(dims.R, dims.T, dims.K),
        padded(rows, sizes.pool_rows),
        padded(items, sizes.items, 4),
        padded(waves, sizes.waves, 2),
        padded(order, dims.R * dims.T),
        np.array([len(waves), len(order), num_passes]),
    )
    return Plan(*(a.astype(np.int32) for a in arrays))


def naive_work(
    tiles: list[range], steps: tuple[Step, ...], group_tiles: int = GROUP_TILES
) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Items and waves by sorting; tiles holds the M-tiles of each expert in the pool."""
    items: list[tuple[int, ...]] = []
    waves: list[tuple[int, ...]] = []
    for s, step in enumerate(steps):
        start = len(items)
        for e, own in enumerate(tiles):
            all_m = own if step.tiles_m is None else range(step.tiles_m)
            # Of each M-tile; those of a step with fixed tiles_m are in one.
            group = {m: (m - own.start) // group_tiles * (step.tiles_m is None) for m in all_m}
            of_expert = []
            for m, n in itertools.product(all_m[::2], range(step.tiles_n)):
                if m + 1 in all_m:
                    of_expert.append((2 * s, e, m, n))
                elif n % 2 == 0:
                    of_expert.append((2 * s + 1, e, m, n))
            items += sorted(of_expert, key=lambda i: (group[i[2]], i[3] // 2, i[0], i[3], i[2]))
        of_step = items[start:]
        for b in range(0, len(of_step), WAVE_ITEMS):
            wave = of_step[b : b + WAVE_ITEMS]
            key = b // WAVE_ITEMS
            if s > 0:
                _, expert, m, _ = wave[-1]
                end = (m - tiles[expert].start) // group_tiles + 1
                own = tiles[expert] if step.tiles_m else tiles[expert][: end * group_tiles]
                needed = [
                    i
                    for i, item in enumerate(items)
                    if item[0] < 2 and (item[1] < expert or item[2] in own)
                ]
                key = max(needed, default=0) // WAVE_ITEMS + step.lag
            waves.append((key, s, start + b, start + b + len(wave)))
    return items, [(first, end) for _, _, first, end in sorted(waves)]


@settings(max_examples=60, deadline=None)
@given(case_arguments())
def test_twin_equals_naive_construction(arguments: tuple[Dims, int, str, int, bool]) -> None:
    case = make_case(*arguments)
    plan = case.plan()
    naive = naive_plan(case, num_passes=int(plan.totals[2]))
    for name, got, want in zip(Plan._fields, plan, naive, strict=True):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, want, err_msg=name)


@pytest.mark.parametrize("seed", range(30))
def test_passes_equal_the_naive_construction(seed: int) -> None:
    case, num_passes = case_of_passes(np.random.default_rng(seed))
    for p in range(num_passes):
        want = naive_plan(case, p, num_passes)
        for name, got, right in zip(Plan._fields, case.plan(p), want, strict=True):
            np.testing.assert_array_equal(got, right, err_msg=name)


def assert_lists_are(plan: Plan, items: list, waves: list) -> None:
    np.testing.assert_array_equal(plan.items[: len(items)], items)
    np.testing.assert_array_equal(plan.waves[: len(waves)], waves)
    assert plan.totals[0] == len(waves)


def pool_tiles(plan: Plan) -> list[range]:
    return [range(*ends) for ends in itertools.pairwise((plan.expert_start // TILE_ROWS).tolist())]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("tiles_n", [(1, 8), (2, 1), (3, 2), (6, 8), (8, 3)])
@pytest.mark.parametrize("tiles", [(0, 33, 1, 16, 0, 17, 32), (15, 31, 0), (0, 0, 50), (48, 0)])
def test_experts_of_several_groups(
    tiles: tuple[int, ...], tiles_n: tuple[int, int], backward: bool
) -> None:
    case = case_of_tiles(tiles, steps_of_tiles(tiles_n, backward=backward))
    plan = case.plan()
    case.check(plan)
    assert_lists_are(plan, *naive_work(pool_tiles(plan), case.steps))


@pytest.mark.parametrize("backward", [False, True])
def test_experts_of_one_group_are_not_cut(backward: bool) -> None:
    """Their items lie column pair by column pair, and a wave waits for whole experts."""
    dims = Dims(T=0, K=1, E=1, R=1, H=2048, I=768)
    steps = backward_steps(dims) if backward else forward_steps(dims)
    case = case_of_tiles((8, 16, 0, 9, 15, 1, 10, 16, 2), steps)
    plan = case.plan()
    assert_lists_are(plan, *naive_work(pool_tiles(plan), case.steps, group_tiles=10**9))


def test_a_large_expert_is_worked_through_in_groups() -> None:
    """128 M-tiles, in groups of 48 items of gate_up (u) and 64 of down (d)."""
    steps = steps_of_tiles((6, 8))
    case = case_of_tiles((0, 128, 0), steps)
    plan = case.plan()
    case.check(plan)
    of_first = plan.items[plan.waves[: plan.totals[0], 0]]
    assert "".join("ud"[kind // 2] for kind in of_first[:, 0]) == "uuududdududddd"
    for step, tall in enumerate((48, 64)):
        m = plan.items[plan.items[:, 0] == 2 * step, 2]
        assert m[:tall].max() == GROUP_TILES - 2 and m[tall:].min() == GROUP_TILES


def test_sizes_are_reached() -> None:
    """One expert holds a multiple of TILE_ROWS rows plus one, every other expert one row."""
    dims = Dims(T=TILE_ROWS + 4, K=1, E=4, R=1, H=256, I=128)
    idx = np.zeros((1, dims.T, 1), np.int32)
    idx[0, :3, 0] = (1, 2, 3)
    case = Case(dims, 0, idx, forward_steps(dims))
    plan, sizes = case.plan(), plan_sizes(dims, case.steps)
    assert plan.expert_start[-1] == sizes.pool_rows
    assert plan.totals[0] == sizes.waves
    assert np.all(plan.items >= 0)


@pytest.mark.parametrize(("lag", "order"), [(0, "udududud"), (1, "uudududd"), (9, "uuuudddd")])
def test_waves_come_lag_waves_behind_what_they_wait_on(lag: int, order: str) -> None:
    """Four experts, each with one whole wave of gate_up (u) and one of down (d)."""
    dims = Dims(T=4 * 12 * TILE_ROWS, K=1, E=4, R=1, H=11 * 256, I=11 * 128)
    up, down = forward_steps(dims)
    expert_idx = np.repeat(np.arange(4), 12 * TILE_ROWS).astype(np.int32).reshape(1, -1, 1)
    case = Case(dims, 0, expert_idx, (up, dataclasses.replace(down, lag=lag)))
    plan = case.plan()
    case.check(plan)
    kinds = plan.items[plan.waves[: plan.totals[0], 0], 0]
    assert "".join("ud"[kind // 2] for kind in kinds) == order


def test_lags_in_waves_of_the_first_step() -> None:
    """dX comes 1 wave behind, dW 16 experts more: 16 * 12 and 16 * 24 items at 8 M-tiles each."""
    for hidden, intermediate, wgrad_lag in ((2048, 768, 1 + 3), (4096, 1536, 1 + 6)):
        dims = Dims(T=16384, K=8, E=128, R=1, H=hidden, I=intermediate)
        assert [step.lag for step in forward_steps(dims)] == [0, 1]
        assert [step.lag for step in backward_steps(dims)] == [0, 1, wgrad_lag, wgrad_lag]


def test_frozen_experts_have_no_weight_gradient_items() -> None:
    names = [s.name for s in backward_steps(REFERENCE.dims, trainable_experts=False)]
    assert names == ["recompute_gate_up_dgrad_down", "dgrad_gate_up"]


LIMITS = {
    "K": ({"K": 33}, "K: was 33"),
    "E": ({"E": 1024}, "E: was 1024"),
    "R": ({"R": 3, "E": 9}, "R: was 3"),
    "E over R": ({"R": 8, "E": 12}, "E: was 12; it may be a multiple of R = 8"),
    "routes": ({"T": 140_000_000, "K": 32}, "routes"),
    "items": (
        {"T": 140_000, "K": 32, "R": 8, "E": 512, "H": 2**22, "I": 128, "pool_factor": 8.0},
        "work items",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_sizes_refuse_by_name(name: str) -> None:
    change, text = LIMITS[name]
    dims = dataclasses.replace(REFERENCE.dims, **change)
    with pytest.raises(ValueError, match=text):
        plan_sizes(dims, forward_steps(dims))


def test_largest_supported_sizes_fit() -> None:
    dims = Dims(T=140_000, K=32, E=512, R=8, H=8192, I=3072, pool_factor=8.0)
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


@pytest.mark.parametrize(
    ("first", "second", "rule"),
    [
        ({}, {"waits_on": ""}, "must wait on the first step"),
        ({}, {"waits_on": "down"}, "must wait on the first step"),
        ({"waits_on": "down"}, {}, "must wait on the first step"),
        ({}, {"lag": -1}, "a lag >= 0"),
        ({"lag": 1}, {}, "a lag of 0"),
        ({"tiles_m": 3}, {}, "must be over pool rows"),
    ],
)
def test_steps_must_wait_on_the_first(
    first: dict[str, Any], second: dict[str, Any], rule: str
) -> None:
    up, down = forward_steps(REFERENCE.dims)
    steps = (dataclasses.replace(up, **first), dataclasses.replace(down, **second))
    with pytest.raises(ValueError, match=rule):
        plan_sizes(REFERENCE.dims, steps)


def test_a_step_must_not_wait_on_a_later_one_than_the_first() -> None:
    up, dgrad, wgrad, _ = backward_steps(REFERENCE.dims)
    chained = dataclasses.replace(wgrad, waits_on=dgrad.name)
    with pytest.raises(ValueError, match="must wait on the first step"):
        plan_sizes(REFERENCE.dims, (up, dgrad, chained))
