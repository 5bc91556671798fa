"""The checker of a plan: it accepts the twin's for every routing, and refuses each broken rule."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from jax_megamoe.config import Dims
from jax_megamoe.plan import Plan
from jax_megamoe.plan_check import PlanError
from tests.plan_cases import REFERENCE, case_arguments, make_case, swapped, waves_of, waves_swapped


@settings(max_examples=60, deadline=None)
@given(case_arguments())
def test_checker_accepts_every_routing(arguments: tuple[Dims, int, str, int, bool]) -> None:
    case = make_case(*arguments)
    case.check(case.plan())


def changed(array: np.ndarray, index: int | tuple[int, ...], value: int | np.ndarray) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


def first_item(plan: Plan, kind: int) -> int:
    return int(np.flatnonzero(plan.items[:, 0] == kind)[0])


def tall_items_turned_wide(plan: Plan) -> Plan:
    """The tall items of columns 0 and 1 of two M-tiles, as wide items of these two."""
    items = plan.items.copy()
    first = first_item(plan, 4)
    kind, expert, m, n = items[first]
    second = int(np.flatnonzero(np.all(items == (kind, expert, m, n + 1), axis=1))[0])
    items[first] = (kind + 1, expert, m, n)
    items[second] = (kind + 1, expert, m + 1, n)
    return plan._replace(items=items)


def item_taken_from_another_step(plan: Plan) -> Plan:
    """The last wave of the first step takes the first item of the second step too."""
    taker, giver = waves_of(plan, 0)[-1], waves_of(plan, 1)[0]
    waves = changed(plan.waves, (taker, 1), plan.waves[taker, 1] + 1)
    return plan._replace(waves=changed(waves, (giver, 0), plan.waves[giver, 0] + 1))


def wave_joined(plan: Plan) -> Plan:
    """The first two waves of the first step as one."""
    first, second = waves_of(plan, 0)[:2]
    waves = changed(plan.waves, (first, 1), plan.waves[second, 1])
    waves = np.append(np.delete(waves, second, axis=0), [[-1, -1]], axis=0).astype(np.int32)
    return plan._replace(waves=waves, totals=plan.totals - np.array([1, 0, 0], np.int32))


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
    "a wave before what it waits for": (
        lambda p: waves_swapped(p, waves_of(p, 0)[0], waves_of(p, 1)[0]),
        "dgrad_gate_up waits only .* claimed earlier",
    ),
    "a weight gradient before its expert is done": (
        lambda p: waves_swapped(p, waves_of(p, 0)[-1], waves_of(p, 2)[0]),
        "claimed earlier",
    ),
    "an item twice": (
        lambda p: p._replace(items=changed(p.items, 3, p.items[2])),
        "belongs to one item",
    ),
    "an item left out": (
        lambda p: p._replace(waves=changed(p.waves, (0, 1), p.waves[0, 1] - 1)),
        "take every item once",
    ),
    "an item claimed twice": (
        lambda p: p._replace(waves=changed(p.waves, (1, 0), p.waves[1, 0] - 1)),
        "take every item once",
    ),
    "a wave left out": (
        lambda p: p._replace(totals=p.totals - np.array([1, 0, 0], np.int32)),
        "num_waves",
    ),
    "a wave too long": (wave_joined, "WAVE_ITEMS"),
    "a wave of two steps": (item_taken_from_another_step, "one step"),
    "experts out of order": (
        lambda p: p._replace(items=swapped(p.items, 0, p.waves[waves_of(p, 0)[-1], 1] - 1)),
        "expert by expert",
    ),
    "a tall item that is called wide": (
        lambda p: p._replace(items=changed(p.items, (first_item(p, 0), 0), 1)),
        "belongs to one item",
    ),
    "a wide item that is called tall": (
        lambda p: p._replace(items=changed(p.items, (first_item(p, 1), 0), 0)),
        "belongs to one item",
    ),
    "wide items where tall ones belong": (tall_items_turned_wide, "a wide item is of the last"),
    "a kind of no step": (
        lambda p: p._replace(items=changed(p.items, (p.waves.max() - 1, 0), 8)),
        "a step of the kernel",
    ),
    "garbage after the items": (
        lambda p: p._replace(items=changed(p.items, (-1, 1), 0)),
        "item list ends with -1",
    ),
    "garbage after the waves": (
        lambda p: p._replace(waves=changed(p.waves, (-1, 1), 0)),
        "wave list ends with -1",
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
    "rows of an expert that no pass has": (
        lambda p: p._replace(expert_rows=changed(p.expert_rows, 1, p.expert_rows[1] - 1)),
        "expert_rows",
    ),
    "more passes than one where all rows fit": (
        lambda p: p._replace(totals=p.totals + np.array([0, 0, 1], np.int32)),
        "one pass takes all rows that fit",
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
        lambda p: p._replace(totals=p.totals - np.array([0, 1, 0], np.int32)),
        "num_tokens",
    ),
    "tokens counted from the end": (
        lambda p: p._replace(totals=p.totals - np.array([0, p.token_order.size, 0], np.int32)),
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


def test_checker_knows_which_tokens_a_pass_takes() -> None:
    dims = Dims(T=600, K=2, E=8, R=4, H=64, I=64, pool_factor=1.25)
    case = make_case(dims, 1, "skewed", 0, backward=True)
    case = dataclasses.replace(case, expert_idx=case.expert_idx % 2 + 2)
    plans = [case.plan(p) for p in range(4)]
    for p in range(4):
        case.check(plans[p], p)
        with pytest.raises(PlanError, match="expert_rows|local routes have a row"):
            case.check(plans[p], (p + 1) % 4)
    one_pass = plans[0]._replace(totals=changed(plans[0].totals, 2, 1))
    with pytest.raises(PlanError, match="as many as any routing needs take others"):
        case.check(one_pass)
    with pytest.raises(PlanError, match="takes a part of the tokens"):
        case.check(plans[0], 4)
