"""The plan of one rank: where the row of every route lies, and the order of the work.

This NumPy construction is the specification of cuda/plan/plan.cu, which equals it bitwise. Nothing
in it depends on timing: forward, backward and every repetition get the same plan.

A route is one (source rank, token, choice); its slot is (src*T + t)*K + k. A route is local when
its expert lives on this rank; then it owns one row of the pool. Rows of an expert are contiguous,
ordered by slot, begin at a multiple of TILE_ROWS and are padded to the next one. An id outside
[0, E) is no route. The same expert twice in one token gives two rows.

Where the rows do not fit the pool the call is cut into passes, by tokens: each takes an equal part
of the tokens of every source rank, those of the first part first, and has a plan of its own. A
token has all its rows in one pass. How many passes a rank needs depends on its routes alone: one,
or as many as hold any routing (`Dims.max_passes`).

Work is cut into items, each two neighbouring tiles of one step for a pair of blocks that share an
operand: a tall item (m, n) is the tiles (m, n) and (m + 1, n), which share the weights; a wide one
is (m, n) and (m, n + 1), which share the rows. Wide items cover the last M-tile of an expert with
an odd number of them; in the last column of an odd tiles_n the second block then has nothing to do.

Items lie step by step and in a step expert by expert. The M-tiles of an expert in a step over pool
rows are cut into groups of GROUP_TILES, which follow each other: all columns of a group, two at a
time, before the next group. So an expert with many rows is worked through as many experts with
usual numbers of rows would be. In a step with fixed tiles_m each expert is one group.

Items are claimed in waves of WAVE_ITEMS, so that all blocks work on neighbouring tiles of one step
and read its operands from L2. Every step waits only on the first one. Waves of the steps alternate:
a wave of a later step comes lag waves behind the wave that holds the last item it waits on, and
never before that wave. It waits on the groups of the first step up to that of its own last item, or
on the experts up to its last one in a step with fixed tiles_m. Hence a claim waits only for earlier
claims: a kernel finishes with any number of resident blocks.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_megamoe.config import (
    INT32_MAX,
    MAX_CHOICES,
    MAX_EXPERTS,
    RANK_COUNTS,
    TILE_ROWS,
    Dims,
)

# Steps of one kernel; cuda/shared/plan.h holds the same value.
MAX_STEPS = 4

# Edges of one output tile, in columns of the step's output. A gate_up tile holds 128 gate columns
# and the 128 up columns beside them.
GATE_UP_COLS = 128
DGRAD_DOWN_COLS = 256
DOWN_COLS = 256

# Items of one wave: one for each pair of the 132 multiprocessors of an H200. cuda/shared/plan.h
# holds the same value.
WAVE_ITEMS = 66
# M-tiles of one expert that are worked on side by side in a step over pool rows: twice the usual
# number, even, so that only the last group of an expert can have wide items. In an expert with more
# tiles the first rows would otherwise be complete only with the last ones, and all sums of tokens
# be left for the end. cuda/shared/plan.h holds the same value.
GROUP_TILES = 16
# A dependent step stays this many waves behind what it waits on, which is then finished when it is
# claimed. Measured at (H, I) = (4096, 1536) on H200: the forward takes 8.47 ms with alternating
# waves, 8.70 ms with the steps of one expert after another.
LAG = 1
# Weight gradients follow dX by this many experts, which evens out the ingress of x and dy.
WGRAD_LAG_EXPERTS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One GEMM of a kernel, as the queue sees it.

    Attributes:
      name: of the step, unique in its kernel.
      tiles_m: M-tiles of one expert; None means one per TILE_ROWS pool rows of that expert.
      tiles_n: N-tiles of one expert.
      lag: waves of the first step that the step stays behind what it waits on.
      waits_on: name of the step whose output it reads: that of the first step, which has "". A step
        with tiles_m None waits for all N-tiles of its own (expert, m); one with fixed tiles_m for
        the whole expert.
    """

    name: str
    tiles_m: int | None
    tiles_n: int
    lag: int
    waits_on: str = ""


class Sizes(NamedTuple):
    """Static sizes of a plan's arrays: the most that any routing can need."""

    pool_rows: int
    items: int
    waves: int


class Plan(NamedTuple):
    """The plan of a pass of one rank; every array is int32 and of static shape.

    The arrays are NumPy's from the twin and JAX's from the kernel.

    counts: [R, E/R], rows of each (source rank, local expert), those of all passes.
    expert_start: [E/R + 1], first pool row of each local expert; the last entry ends the pool.
    expert_rows: [E/R], rows of each local expert.
    slot_row: [R, T, K], pool row of a local route of the pass, else -1.
    row_slot: [P], slot of the route that owns the row, -1 for pads and unused rows.
    items: [N, 4], (kind, expert, m, n), all of the first step, then all of the next; -1 behind the
      last. kind is 2 * step, plus 1 if the item is wide. m is the tile of the pool,
      row / TILE_ROWS, in a step over pool rows, and the step's own M-tile in one with fixed
      tiles_m.
    waves: [V, 2], (first, end) of at most WAVE_ITEMS items in claim order, -1 from num_waves on.
      Claim c is item waves[c // WAVE_ITEMS].first + c % WAVE_ITEMS, and nothing from end on.
    token_order: [R*T], tokens src*T + t that have a local route, by the pool row of their last one:
      the order in which their sums can be finished; -1 from num_tokens on.
    totals: [3], (num_waves, num_tokens, num_passes): the last one of the call, 1 or
      `Dims.max_passes`. A pass behind those leaves all arrays as they are.
    """

    counts: Any
    expert_start: Any
    expert_rows: Any
    slot_row: Any
    row_slot: Any
    items: Any
    waves: Any
    token_order: Any
    totals: Any


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def forward_steps(dims: Dims) -> tuple[Step, ...]:
    """The steps of the forward kernel: h = silu(x Wg) * (x Wu), then o = h Wd."""
    return (
        Step(name="gate_up", tiles_m=None, tiles_n=ceil_div(dims.I, GATE_UP_COLS), lag=0),
        Step(
            name="down",
            tiles_m=None,
            tiles_n=ceil_div(dims.H, DOWN_COLS),
            lag=LAG,
            waits_on="gate_up",
        ),
    )


def backward_steps(dims: Dims, *, trainable_experts: bool = True) -> tuple[Step, ...]:
    """The steps of the backward kernel: d(g, u) with w h, then dx, then dWd and dWg, dWu."""
    first = "recompute_gate_up_dgrad_down"
    tiles_n = ceil_div(dims.I, DGRAD_DOWN_COLS)
    data = (
        Step(name=first, tiles_m=None, tiles_n=tiles_n, lag=0),
        Step(
            name="dgrad_gate_up",
            tiles_m=None,
            tiles_n=ceil_div(dims.H, DOWN_COLS),
            lag=LAG,
            waits_on=first,
        ),
    )
    if not trainable_experts:
        return data
    wgrad_lag = LAG + _waves_of_experts(dims, tiles_n, WGRAD_LAG_EXPERTS)
    return data + (
        Step(
            name="wgrad_down",
            tiles_m=ceil_div(dims.I, TILE_ROWS),
            tiles_n=ceil_div(dims.H, DOWN_COLS),
            lag=wgrad_lag,
            waits_on=first,
        ),
        Step(
            name="wgrad_gate_up",
            tiles_m=ceil_div(dims.H, TILE_ROWS),
            tiles_n=ceil_div(dims.I, GATE_UP_COLS),
            lag=wgrad_lag,
            waits_on=first,
        ),
    )


def _waves_of_experts(dims: Dims, tiles_n: int, experts: int) -> int:
    """Waves of a token step that cover so many experts when the routing is even."""
    tiles_m = max(1, ceil_div(dims.R * dims.T * dims.K, dims.E * TILE_ROWS))
    items = min(experts, dims.experts_per_rank) * _num_items(tiles_m, tiles_n)
    return ceil_div(items, WAVE_ITEMS)


def _num_items(tiles_m: int, tiles_n: int) -> int:
    """Items of one (expert, step)."""
    return tiles_n * (tiles_m // 2) + tiles_m % 2 * ceil_div(tiles_n, 2)


def plan_sizes(dims: Dims, steps: Sequence[Step]) -> Sizes:
    """Sizes of the arrays for the worst routing: a full pool, as many pads as there can be.

    Raises:
      ValueError: naming the dimension or the size that the plan cannot hold.
    """
    _check_limits(dims, steps)
    routes = dims.R * dims.T * dims.K
    experts = dims.experts_per_rank
    tiles = dims.pool_rows // TILE_ROWS
    # With S tiles in all and o experts of an odd number of them, a token step has
    # tiles_n * (S - o) / 2 + o * ceil(tiles_n / 2) = (tiles_n * S + tiles_n % 2 * o) / 2 items,
    # S <= tiles and o <= min(experts, S): every expert with one tile and pairs of tiles beside it.
    capacities = [
        (s.tiles_n * tiles + s.tiles_n % 2 * min(experts, tiles)) // 2
        if s.tiles_m is None
        else experts * _num_items(s.tiles_m, s.tiles_n)
        for s in steps
    ]
    sizes = Sizes(
        pool_rows=dims.pool_rows,
        items=sum(capacities),
        waves=sum(ceil_div(c, WAVE_ITEMS) for c in capacities),
    )
    for name, value in (
        ("routes R*T*K", routes),
        ("pool rows P", sizes.pool_rows),
        ("claims of work items", sizes.waves * WAVE_ITEMS),
    ):
        if value > INT32_MAX:
            raise ValueError(f"plan: {value} {name} for {dims}; at most {INT32_MAX} fit int32")
    return sizes


def plan_chunks(dims: Dims) -> int:
    """Chunks that the plan kernel cuts the slots into, as ChunksOf of cuda/shared/plan.h does."""
    parts = dims.R * dims.max_passes
    part_slots = ceil_div(dims.T, dims.max_passes) * dims.K
    slots = ceil_div(part_slots // max(1, 128 // parts), 1024) * 1024
    return parts * ceil_div(part_slots, min(max(slots, 1024), 32 * 1024))


def plan_shapes(dims: Dims, steps: Sequence[Step]) -> Plan:
    """The shapes of a plan's arrays, which are all int32; raises as `plan_sizes`."""
    sizes = plan_sizes(dims, steps)
    return Plan(
        counts=(dims.R, dims.experts_per_rank),
        expert_start=(dims.experts_per_rank + 1,),
        expert_rows=(dims.experts_per_rank,),
        slot_row=(dims.R, dims.T, dims.K),
        row_slot=(sizes.pool_rows,),
        items=(sizes.items, 4),
        waves=(sizes.waves, 2),
        token_order=(dims.R * dims.T,),
        totals=(3,),
    )


def _check_limits(dims: Dims, steps: Sequence[Step]) -> None:
    for name, value, low, high in (
        ("T", dims.T, 0, INT32_MAX),
        ("K", dims.K, 1, MAX_CHOICES),
        ("E", dims.E, 1, MAX_EXPERTS),
        ("len(steps)", len(steps), 1, MAX_STEPS),
    ):
        if not low <= value <= high:
            raise ValueError(f"plan: {name}: was {value}; it may be {low} to {high}")
    if dims.R not in RANK_COUNTS:
        raise ValueError(f"plan: R: was {dims.R}; it may be one of {RANK_COUNTS}")
    if dims.E % dims.R:
        raise ValueError(f"plan: E: was {dims.E}; it may be a multiple of R = {dims.R}")
    names = {""}
    for s, step in enumerate(steps):
        if step.name in names:
            raise ValueError(f"plan: {step} must have a name of its own, not ''")
        if step.tiles_n < 1 or (step.tiles_m is not None and step.tiles_m < 1):
            raise ValueError(f"plan: {step} must have at least 1 tile each way")
        if s == 0 and step.tiles_m is not None:
            raise ValueError(f"plan: {step} must be over pool rows, as the first step")
        if step.waits_on != (steps[0].name if s else ""):
            raise ValueError(f"plan: {step} must wait on the first step, and that one on ''")
        if step.lag < 0 or (s == 0 and step.lag != 0):
            raise ValueError(f"plan: {step} must have a lag >= 0, and the first step a lag of 0")
        names.add(step.name)


def token_range(T: int, pass_idx: int, num_passes: int) -> range:
    """The tokens of every source rank that a pass takes."""
    return range(T * pass_idx // num_passes, T * (pass_idx + 1) // num_passes)


def make_plan(
    expert_idx: np.ndarray, dims: Dims, rank: int, steps: Sequence[Step], pass_idx: int = 0
) -> Plan:
    """The plan of `rank` for the routing of all ranks, as it is in a pass.

    Args:
      expert_idx: int32 [R, T, K], the global expert of each route.
      pass_idx: below `Dims.max_passes`.
    """
    sizes = plan_sizes(dims, steps)
    experts = dims.experts_per_rank
    local = expert_idx.astype(np.int64).reshape(-1) - rank * experts
    slots = np.flatnonzero((local >= 0) & (local < experts))
    slots = slots[np.argsort(local[slots], kind="stable")]
    expert = local[slots]

    source = slots // max(dims.T * dims.K, 1)
    counts = np.bincount(source * experts + expert, minlength=dims.R * experts)
    call_count = counts.reshape(dims.R, experts).sum(axis=0)
    fits = -(-call_count // TILE_ROWS).sum() * TILE_ROWS <= dims.pool_rows
    num_passes = 1 if fits else dims.max_passes
    tokens_of_pass = token_range(dims.T, min(pass_idx, num_passes - 1), num_passes)
    token = slots // dims.K % max(dims.T, 1)
    in_pass = (token >= tokens_of_pass.start) & (token < tokens_of_pass.stop)
    slots, expert = slots[in_pass], expert[in_pass]

    count = np.bincount(expert, minlength=experts)
    tile_start = np.concatenate([[0], np.cumsum(-(-count // TILE_ROWS))])
    expert_start = tile_start * TILE_ROWS
    first_of_expert = np.cumsum(count) - count
    row = expert_start[expert] + np.arange(slots.size) - first_of_expert[expert]

    slot_row = np.full(dims.R * dims.T * dims.K, -1)
    slot_row[slots] = row
    row_slot = np.full(sizes.pool_rows, -1)
    row_slot[row] = slots
    last_row = slot_row.reshape(-1, dims.K).max(axis=1)
    tokens = np.flatnonzero(last_row >= 0)
    token_order = np.full(dims.R * dims.T, -1)
    token_order[: tokens.size] = tokens[np.argsort(last_row[tokens])]
    items, waves = _list_work(tile_start, steps)

    arrays = (
        counts.reshape(dims.R, experts),
        expert_start,
        count,
        slot_row.reshape(dims.R, dims.T, dims.K),
        row_slot,
        _padded(items, sizes.items),
        _padded(waves, sizes.waves),
        token_order,
        np.array([len(waves), tokens.size, num_passes]),
    )
    return Plan(*(a.astype(np.int32) for a in arrays))


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    """`rows` followed by -1 up to `size` rows."""
    return np.pad(rows, ((0, size - len(rows)), (0, 0)), constant_values=-1)


def _list_work(tile_start: np.ndarray, steps: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
    """The items [num_items, 4] and the waves [num_waves, 2].

    Args:
      tile_start: [E/R + 1], M-tiles of the experts before.
    """
    pool_m = [range(first, end) for first, end in itertools.pairwise(tile_start.tolist())]
    groups = [
        (e, m[first : first + GROUP_TILES])
        for e, m in enumerate(pool_m)
        for first in range(0, len(m), GROUP_TILES)
    ]
    groups_up_to = np.cumsum([ceil_div(len(m), GROUP_TILES) for m in pool_m])
    all_items, all_waves, all_keys = [], [], []
    start = 0
    needed = np.zeros(1, np.int64)
    for s, step in enumerate(steps):
        whole = [(e, range(step.tiles_m or 0)) for e in range(len(pool_m))]
        own = groups if step.tiles_m is None else whole
        by_group = [_group_items(s, e, m, step.tiles_n) for e, m in own]
        group_end = np.cumsum([len(i) for i in by_group])
        items = np.concatenate([np.zeros((0, 4), np.int64), *by_group])
        first = np.arange(0, len(items), WAVE_ITEMS)
        end = np.minimum(first + WAVE_ITEMS, len(items))
        if s == 0:
            # By number of groups: how many items of the first step these have.
            needed = np.append(0, group_end)
            key = np.arange(first.size)
        else:
            last = np.searchsorted(group_end, end - 1, side="right")
            num_groups = last + 1 if step.tiles_m is None else groups_up_to[last]
            key = np.maximum(needed[num_groups] - 1, 0) // WAVE_ITEMS + step.lag
        all_items.append(items)
        all_waves.append(start + np.stack([first, end], axis=1))
        all_keys.append(key)
        start += len(items)
    # By key; waves of equal keys stay in the order of the steps.
    order = np.argsort(np.concatenate(all_keys), kind="stable")
    return np.concatenate(all_items), np.concatenate(all_waves)[order]


def _group_items(step_idx: int, expert: int, all_m: range, tiles_n: int) -> np.ndarray:
    """The items [n, 4] of one group: two columns at a time, the wide item behind both."""
    odd = len(all_m) % 2
    items = []
    for n in range(0, tiles_n, 2):
        items += [
            (2 * step_idx, expert, m, column)
            for column in range(n, min(n + 2, tiles_n))
            for m in all_m[: len(all_m) - odd : 2]
        ]
        if odd:
            items.append((2 * step_idx + 1, expert, all_m[-1], n))
    return np.array(items, np.int64).reshape(-1, 4)
