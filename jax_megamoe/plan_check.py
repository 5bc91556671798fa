"""Proves that a plan is right, whatever made it: the NumPy twin or the plan kernel."""

import itertools
from collections.abc import Sequence

import numpy as np

from jax_megamoe.config import TILE_ROWS, Dims
from jax_megamoe.plan import WAVE_ITEMS, Plan, Step, plan_shapes, token_range


class PlanError(AssertionError):
    """A plan that breaks one of its rules; the text names the rule."""


def check_plan(
    plan: Plan,
    expert_idx: np.ndarray,
    dims: Dims,
    rank: int,
    steps: Sequence[Step],
    pass_idx: int = 0,
) -> None:
    """Checks every rule of `Plan` against the routing, none by building a second plan.

    Args:
      expert_idx: int32 [R, T, K], the routing the plan was made for.
      pass_idx: whose plan it is; one that the routing needs.

    Raises:
      PlanError: naming the broken rule.
    """
    local = expert_idx.astype(np.int64).reshape(-1) - rank * dims.experts_per_rank
    local = np.where((local >= 0) & (local < dims.experts_per_rank), local, -1)
    _check_arrays(plan, dims, steps)
    local = _check_passes(plan, local, dims, pass_idx)
    _check_rows(plan, local, dims)
    _check_tokens(plan, local, dims)
    items = _claimed_items(plan, steps)
    _check_tiles(items, plan, dims, steps)
    _check_waits(items, dims, steps)


def _require(condition: object, rule: str) -> None:
    if not condition:
        raise PlanError(rule)


def _check_arrays(plan: Plan, dims: Dims, steps: Sequence[Step]) -> None:
    for name, array, shape in zip(Plan._fields, plan, plan_shapes(dims, steps), strict=True):
        _require(
            array.shape == shape and array.dtype == np.int32,
            f"{name} is int32 {shape}, not {array.dtype} {array.shape}",
        )


def _check_passes(plan: Plan, local: np.ndarray, dims: Dims, pass_idx: int) -> np.ndarray:
    """How many passes there are, and the counts of them all.

    local is int64 [R*T*K], the local expert of each slot or -1; returns it with those alone of the
    tokens of the pass.
    """
    for e in range(dims.experts_per_rank):
        _require(
            np.array_equal(plan.counts[:, e], (local.reshape(dims.R, -1) == e).sum(axis=1)),
            f"counts of local expert {e} are its routes per source",
        )
    tiles = -(-plan.counts.astype(np.int64).sum(axis=0) // TILE_ROWS)
    fits = tiles.sum() * TILE_ROWS <= dims.pool_rows
    num_passes = int(plan.totals[2])
    _require(
        num_passes == (1 if fits else dims.max_passes),
        "one pass takes all rows that fit the pool, and as many as any routing needs take others",
    )
    _require(pass_idx < num_passes, "a pass takes a part of the tokens")
    taken = np.zeros((dims.R, dims.T, dims.K), bool)
    taken[:, token_range(dims.T, pass_idx, num_passes)] = True
    return np.where(taken.reshape(-1), local, -1)


def _check_rows(plan: Plan, local: np.ndarray, dims: Dims) -> None:
    """Rows and slots; local is int64 [R*T*K], the local expert of each slot or -1."""
    start = plan.expert_start.astype(np.int64)
    count = np.bincount(local[local >= 0], minlength=dims.experts_per_rank)
    _require(np.array_equal(plan.expert_rows, count), "expert_rows are the rows of each expert")
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


def _claimed_items(plan: Plan, steps: Sequence[Step]) -> np.ndarray:
    """The items, int64 [num_items, 4], in claim order, after the rules of the two lists."""
    num_items = np.count_nonzero(plan.items[:, 0] != -1)
    num_waves = np.count_nonzero(plan.waves[:, 0] != -1)
    _require(np.all(plan.items[num_items:] == -1), "the item list ends with -1")
    _require(np.all(plan.waves[num_waves:] == -1), "the wave list ends with -1")
    _require(plan.totals[0] == num_waves, "num_waves counts the waves")
    items = plan.items[:num_items].astype(np.int64)
    _require(
        np.all((items >= 0) & (items[:, :1] < 2 * len(steps))), "items are of a step of the kernel"
    )
    place = items[:, :2] // np.array([2, 1])
    _require(
        np.array_equal(np.lexsort(place.T[::-1]), np.arange(num_items)),
        "items lie step by step, expert by expert",
    )
    waves = plan.waves[:num_waves].astype(np.int64)
    by_first = waves[np.argsort(waves[:, 0])]
    ends = np.concatenate([[0], by_first[:, 1]])
    _require(
        np.array_equal(by_first[:, 0], ends[:-1]) and ends[-1] == num_items,
        "waves take every item once",
    )
    size = waves[:, 1] - waves[:, 0]
    _require(
        np.all((size > 0) & (size <= WAVE_ITEMS)),
        f"a wave has 1 to WAVE_ITEMS = {WAVE_ITEMS} items",
    )
    _require(
        np.array_equal(place[waves[:, 0], 0], place[waves[:, 1] - 1, 0]), "a wave is of one step"
    )
    claimed = [np.arange(first, end) for first, end in waves.tolist()]
    return items[np.concatenate(claimed)] if claimed else items


def _tiles(items: np.ndarray, steps: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
    """The tiles of both blocks, (step, expert, m, n), and the index of the item of each."""
    wide = items[:, 0] % 2
    first = items // np.array([2, 1, 1, 1])
    second = first + np.stack([0 * wide, 0 * wide, 1 - wide, wide], axis=1)
    tiles_n = np.array([step.tiles_n for step in steps])
    busy = np.flatnonzero((wide == 0) | (second[:, 3] < tiles_n[second[:, 0]]))
    return np.concatenate([first, second[busy]]), np.concatenate([np.arange(len(items)), busy])


def _check_tiles(items: np.ndarray, plan: Plan, dims: Dims, steps: Sequence[Step]) -> None:
    pool_tiles = [range(*ends) for ends in itertools.pairwise(plan.expert_start // TILE_ROWS)]
    tiles_m = [
        [own if step.tiles_m is None else range(step.tiles_m) for own in pool_tiles]
        for step in steps
    ]
    expected = [
        (s, e, m, n)
        for s, step in enumerate(steps)
        for e in range(dims.experts_per_rank)
        for m in tiles_m[s][e]
        for n in range(step.tiles_n)
    ]
    tiles, _ = _tiles(items, steps)
    _require(
        np.array_equal(tiles[np.lexsort(tiles.T[::-1])], np.array(expected).reshape(-1, 4)),
        "every tile belongs to one item",
    )
    _require(
        all(
            n % 2 == 0 and len(own := tiles_m[kind // 2][e]) % 2 == 1 and m == own[-1]
            for kind, e, m, n in items[items[:, 0] % 2 == 1].tolist()
        ),
        "a wide item is of the last of an odd number of M-tiles, and of an even column",
    )


def _check_waits(items: np.ndarray, dims: Dims, steps: Sequence[Step]) -> None:
    """Every item comes after all the items it waits for."""
    names = [step.name for step in steps]
    tiles, position = _tiles(items, steps)
    num_m = int(tiles[:, 2].max(initial=0)) + 1
    for s, step in enumerate(steps):
        if not step.waits_on:
            continue
        dep = tiles[:, 0] == names.index(step.waits_on)
        own = tiles[:, 0] == s
        by_tile = step.tiles_m is None
        key = tiles[:, 1] * num_m + (tiles[:, 2] if by_tile else 0)
        last = np.full(dims.experts_per_rank * num_m, -1)
        np.maximum.at(last, key[dep], position[dep])
        _require(
            np.all(last[key[own]] < position[own]),
            f"{step.name} waits only for items of {step.waits_on} that are claimed earlier",
        )
