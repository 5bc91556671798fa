"""Proves that a plan is right, whatever made it: the NumPy twin or the plan kernel."""

import itertools
from collections.abc import Sequence

import numpy as np

from jax_megamoe.config import TILE_ROWS, Dims
from jax_megamoe.plan import Plan, Step, plan_shapes


class PlanError(AssertionError):
    """A plan that breaks one of its rules; the text names the rule."""


def check_plan(
    plan: Plan, expert_idx: np.ndarray, dims: Dims, rank: int, steps: Sequence[Step]
) -> None:
    """Checks every rule of `Plan` against the routing, none by building a second plan.

    Args:
      expert_idx: int32 [R, T, K], the routing the plan was made for.

    Raises:
      PlanError: naming the broken rule.
    """
    local = expert_idx.astype(np.int64).reshape(-1) - rank * dims.experts_per_rank
    local = np.where((local >= 0) & (local < dims.experts_per_rank), local, -1)
    _check_arrays(plan, dims, steps)
    _check_rows(plan, local, dims)
    _check_tokens(plan, local, dims)
    _check_items(plan, dims, steps)
    _check_waits(plan, dims, steps)


def _require(condition: object, rule: str) -> None:
    if not condition:
        raise PlanError(rule)


def _check_arrays(plan: Plan, dims: Dims, steps: Sequence[Step]) -> None:
    for name, array, shape in zip(Plan._fields, plan, plan_shapes(dims, steps), strict=True):
        _require(
            array.shape == shape and array.dtype == np.int32,
            f"{name} is int32 {shape}, not {array.dtype} {array.shape}",
        )


def _check_rows(plan: Plan, local: np.ndarray, dims: Dims) -> None:
    """Rows and slots; local is int64 [R*T*K], the local expert of each slot or -1."""
    experts = dims.experts_per_rank
    start = plan.expert_start.astype(np.int64)
    per_source = local.reshape(dims.R, -1)
    for e in range(experts):
        _require(
            np.array_equal(plan.counts[:, e], (per_source == e).sum(axis=1)),
            f"counts of local expert {e} are its routes per source",
        )
    count = plan.counts.astype(np.int64).sum(axis=0)
    _require(start[0] == 0, "the first expert starts at row 0")
    _require(
        np.array_equal(np.diff(start), -(-count // TILE_ROWS) * TILE_ROWS),
        "an expert takes its rows, padded to whole tiles, and no more",
    )
    slot_row = plan.slot_row.reshape(-1)
    _require(
        np.array_equal(slot_row >= 0, local >= 0) and slot_row.min(initial=0) >= -1,
        "local routes have a row, all others -1",
    )
    routes = np.flatnonzero(local >= 0)
    rows = slot_row[routes]
    _require(rows.max(initial=-1) < plan.row_slot.size, "rows lie inside the pool")
    _require(np.array_equal(plan.row_slot[rows], routes), "row_slot undoes slot_row")
    used = np.flatnonzero(plan.row_slot != -1)
    _require(used.size == routes.size, "rows without a route hold -1")
    filled = np.concatenate([np.arange(s, s + c) for s, c in zip(start, count, strict=False)])
    _require(np.array_equal(used, filled), "pads follow the rows of an expert")
    owner = np.searchsorted(start, used, side="right") - 1
    slots = plan.row_slot[used]
    _require(np.array_equal(local[slots], owner), "a row lies in the range of its expert")
    same = owner[1:] == owner[:-1]
    _require(np.all(np.diff(slots)[same] > 0), "rows of an expert are ordered by slot")


def _check_tokens(plan: Plan, local: np.ndarray, dims: Dims) -> None:
    num_tokens = plan.totals[1]
    expected = np.flatnonzero((local.reshape(-1, dims.K) >= 0).any(axis=1))
    _require(num_tokens == expected.size, "num_tokens counts the tokens with a local route")
    order = plan.token_order[:num_tokens]
    _require(np.array_equal(np.sort(order), expected), "every token with a local route comes once")
    _require(np.all(plan.token_order[num_tokens:] == -1), "token_order ends with -1")
    last_row = plan.slot_row.reshape(-1, dims.K).max(axis=1)[order]
    _require(np.all(np.diff(last_row) > 0), "tokens are ordered by their last row")


def _check_items(plan: Plan, dims: Dims, steps: Sequence[Step]) -> None:
    tiles = [range(*ends) for ends in itertools.pairwise(plan.expert_start // TILE_ROWS)]
    expected = [
        (s, e, m, n)
        for s, step in enumerate(steps)
        for e in range(dims.experts_per_rank)
        for m in (tiles[e] if step.tiles_m is None else range(step.tiles_m))
        for n in range(step.tiles_n)
    ]
    num_items = plan.totals[0]
    items = plan.items[:num_items]
    _require(len(expected) == num_items, "num_items counts the items of all steps")
    _require(
        np.array_equal(items[np.lexsort(items.T[::-1])], np.array(expected).reshape(-1, 4)),
        "every item is listed once",
    )
    _require(np.all(plan.items[num_items:] == -1), "the item list ends with -1")


def _check_waits(plan: Plan, dims: Dims, steps: Sequence[Step]) -> None:
    """Every item comes after all the items it waits for."""
    names = [step.name for step in steps]
    items = plan.items[: plan.totals[0]].astype(np.int64)
    position = np.arange(len(items))
    tiles = int(items[:, 2].max(initial=0)) + 1
    for s, step in enumerate(steps):
        if not step.waits_on:
            continue
        dep = items[:, 0] == names.index(step.waits_on)
        own = items[:, 0] == s
        by_tile = step.tiles_m is None
        key = items[:, 1] * tiles + (items[:, 2] if by_tile else 0)
        last = np.full(dims.experts_per_rank * tiles, -1)
        np.maximum.at(last, key[dep], position[dep])
        _require(
            np.all(last[key[own]] < position[own]),
            f"{step.name} waits only for items of {step.waits_on} that come earlier",
        )
