"""The plan of one rank: where the row of every route lies, and the order of the work.

This NumPy construction is the specification of cuda/plan/plan.cu, which equals it bitwise. Nothing
in it depends on timing: forward, backward and every repetition get the same plan.

A route is one (source rank, token, choice); its slot is (src*T + t)*K + k. A route is local when
its expert lives on this rank; then it owns one row of the pool. Rows of an expert are contiguous,
ordered by slot, begin at a multiple of TILE_ROWS and are padded to the next one. An id outside
[0, E) is no route. The same expert twice in one token gives two rows.

Work is cut into items (step, expert, m, n), claimed by the blocks of a kernel in list order. The
list walks the experts in bands: band b holds, for every step s in turn, the items of expert
b - lag_s, the M-tiles of one N-tile next to each other so that its weights are read from L2. A
step waits only on an earlier step with no greater lag, hence only for items earlier in the list:
a kernel finishes with any number of resident blocks.
"""

import dataclasses
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
DOWN_COLS = 256

# A dependent step stays this many items of the step it waits on behind it: 1.5 waves of 132
# blocks. On H200 that gives lag 4 at (H, I) = (2048, 768) and 2 at (4096, 1536), the best measured.
ITEMS_IN_FLIGHT = 192
# Weight gradients follow dX by this many experts, which evens out the ingress of x and dy.
WGRAD_LAG = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One GEMM of a kernel, as the queue sees it.

    Attributes:
      name: of the step, unique in its kernel.
      tiles_m: M-tiles of one expert; None means one per TILE_ROWS pool rows of that expert.
      tiles_n: N-tiles of one expert.
      lag: experts that the step stays behind a step of lag 0.
      waits_on: name of the step whose output it reads, "" for none. A step with tiles_m None waits
        for all N-tiles of its own (expert, m); one with fixed tiles_m for the whole expert.
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


class Plan(NamedTuple):
    """The plan of one rank; every array is int32 and of static shape.

    The arrays are NumPy's from the twin and JAX's from the kernel.

    counts: [R, E/R], rows of each (source rank, local expert).
    expert_start: [E/R + 1], first pool row of each local expert; the last entry ends the pool.
    slot_row: [R, T, K], pool row of a local route, else -1.
    row_slot: [P], slot of the route that owns the row, -1 for pads and unused rows.
    items: [N, 4], (step, expert, m, n) in claim order, -1 from num_items on. m is the tile of the
      pool, row / TILE_ROWS, in a step over pool rows, and the step's own M-tile in one with fixed
      tiles_m.
    token_order: [R*T], tokens src*T + t that have a local route, by the pool row of their last one:
      the order in which their sums can be finished; -1 from num_tokens on.
    totals: [2], (num_items, num_tokens).
    """

    counts: Any
    expert_start: Any
    slot_row: Any
    row_slot: Any
    items: Any
    token_order: Any
    totals: Any


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def forward_steps(dims: Dims) -> tuple[Step, ...]:
    """The steps of the forward kernel: h = silu(x Wg) * (x Wu), then o = h Wd."""
    tiles_n = ceil_div(dims.I, GATE_UP_COLS)
    return (
        Step(name="gate_up", tiles_m=None, tiles_n=tiles_n, lag=0),
        Step(
            name="down",
            tiles_m=None,
            tiles_n=ceil_div(dims.H, DOWN_COLS),
            lag=_lag(dims, tiles_n),
            waits_on="gate_up",
        ),
    )


def backward_steps(dims: Dims, *, trainable_experts: bool = True) -> tuple[Step, ...]:
    """The steps of the backward kernel: d(g, u) with w h, then dx, then dWd and dWg, dWu."""
    first = "recompute_gate_up_dgrad_down"
    tiles_n = ceil_div(dims.I, GATE_UP_COLS)
    lag = _lag(dims, tiles_n)
    data = (
        Step(name=first, tiles_m=None, tiles_n=tiles_n, lag=0),
        Step(
            name="dgrad_gate_up",
            tiles_m=None,
            tiles_n=ceil_div(dims.H, DOWN_COLS),
            lag=lag,
            waits_on=first,
        ),
    )
    if not trainable_experts:
        return data
    return data + (
        Step(
            name="wgrad_down",
            tiles_m=ceil_div(dims.I, TILE_ROWS),
            tiles_n=ceil_div(dims.H, DOWN_COLS),
            lag=lag + WGRAD_LAG,
            waits_on=first,
        ),
        Step(
            name="wgrad_gate_up",
            tiles_m=ceil_div(dims.H, TILE_ROWS),
            tiles_n=tiles_n,
            lag=lag + WGRAD_LAG,
            waits_on=first,
        ),
    )


def _lag(dims: Dims, tiles_n: int) -> int:
    """Experts that cover ITEMS_IN_FLIGHT items of a token step when the routing is even."""
    expected_tiles_m = max(1, ceil_div(dims.R * dims.T * dims.K, dims.E * TILE_ROWS))
    return min(ceil_div(ITEMS_IN_FLIGHT, expected_tiles_m * tiles_n), dims.experts_per_rank)


def plan_sizes(dims: Dims, steps: Sequence[Step]) -> Sizes:
    """Sizes of the arrays for the worst routing: all routes local, as many pads as there can be.

    Raises:
      ValueError: naming the dimension or the size that the plan cannot hold.
    """
    _check_limits(dims, steps)
    routes = dims.R * dims.T * dims.K
    experts = dims.experts_per_rank
    tiles = routes if routes < experts else experts + (routes - experts) // TILE_ROWS
    token_tiles_n = sum(s.tiles_n for s in steps if s.tiles_m is None)
    fixed = sum(s.tiles_m * s.tiles_n for s in steps if s.tiles_m is not None)
    sizes = Sizes(pool_rows=tiles * TILE_ROWS, items=tiles * token_tiles_n + experts * fixed)
    for name, value in (
        ("routes R*T*K", routes),
        ("pool rows P", sizes.pool_rows),
        ("work items", sizes.items),
    ):
        if value > INT32_MAX:
            raise ValueError(f"plan: {value} {name} for {dims}; at most {INT32_MAX} fit int32")
    return sizes


def plan_chunks(dims: Dims) -> int:
    """Chunks that the plan kernel cuts the slots into, as ChunksOf of cuda/shared/plan.h does."""
    per_source = dims.T * dims.K
    slots = ceil_div(dims.R * per_source // 128, 1024) * 1024
    return dims.R * ceil_div(per_source, min(max(slots, 1024), 32 * 1024))


def plan_shapes(dims: Dims, steps: Sequence[Step]) -> Plan:
    """The shapes of a plan's arrays, which are all int32; raises as `plan_sizes`."""
    sizes = plan_sizes(dims, steps)
    return Plan(
        counts=(dims.R, dims.experts_per_rank),
        expert_start=(dims.experts_per_rank + 1,),
        slot_row=(dims.R, dims.T, dims.K),
        row_slot=(sizes.pool_rows,),
        items=(sizes.items, 4),
        token_order=(dims.R * dims.T,),
        totals=(2,),
    )


def _check_limits(dims: Dims, steps: Sequence[Step]) -> None:
    for name, value, low, high in (
        ("T", dims.T, 0, INT32_MAX),
        ("K", dims.K, 1, MAX_CHOICES),
        ("E", dims.E, 1, MAX_EXPERTS),
        ("len(steps)", len(steps), 1, MAX_STEPS),
    ):
        if not low <= value <= high:
            raise ValueError(f"plan: {name} = {value}; it may be {low} to {high}")
    if dims.R not in RANK_COUNTS:
        raise ValueError(f"plan: R = {dims.R}; it may be one of {RANK_COUNTS}")
    if dims.E % dims.R:
        raise ValueError(f"plan: E = {dims.E} is not a multiple of R = {dims.R}")
    lag_of = {"": 0}
    for step in steps:
        if step.name in lag_of:
            raise ValueError(f"plan: {step} must have a name of its own, not ''")
        if step.tiles_n < 1 or (step.tiles_m is not None and step.tiles_m < 1):
            raise ValueError(f"plan: {step} must have at least 1 tile each way")
        if step.waits_on not in lag_of or step.lag < lag_of[step.waits_on]:
            raise ValueError(f"plan: {step} must wait on an earlier step of no greater lag")
        lag_of[step.name] = step.lag


def make_plan(expert_idx: np.ndarray, dims: Dims, rank: int, steps: Sequence[Step]) -> Plan:
    """The plan of `rank` for the routing of all ranks.

    Args:
      expert_idx: int32 [R, T, K], the global expert of each route.
    """
    sizes = plan_sizes(dims, steps)
    experts = dims.experts_per_rank
    local = expert_idx.astype(np.int64).reshape(-1) - rank * experts
    slots = np.flatnonzero((local >= 0) & (local < experts))
    slots = slots[np.argsort(local[slots], kind="stable")]
    expert = local[slots]

    source = slots // max(dims.T * dims.K, 1)
    counts = np.bincount(source * experts + expert, minlength=dims.R * experts)
    count = counts.reshape(dims.R, experts).sum(axis=0)
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
    items, num_items = _list_items(tile_start, steps, sizes.items)

    arrays = (
        counts.reshape(dims.R, experts),
        expert_start,
        slot_row.reshape(dims.R, dims.T, dims.K),
        row_slot,
        items,
        token_order,
        np.array([num_items, tokens.size]),
    )
    return Plan(*(a.astype(np.int32) for a in arrays))


def _list_items(
    tile_start: np.ndarray, steps: Sequence[Step], capacity: int
) -> tuple[np.ndarray, int]:
    """The items in band order; tile_start [E/R + 1] counts the M-tiles of the experts before."""
    experts = tile_start.size - 1
    # before[s][e]: items of step s of the experts before e.
    before = [
        tile_start * step.tiles_n
        if step.tiles_m is None
        else np.arange(experts + 1) * (step.tiles_m * step.tiles_n)
        for step in steps
    ]
    items = np.full((capacity, 4), -1)
    for s, step in enumerate(steps):
        for e in range(experts):
            # Before (s, e) come the (s', e') of an earlier band, e' + lag' < e + lag, and those of
            # the same band with s' < s.
            base = sum(
                before[other][np.clip(e + step.lag - steps[other].lag + (other < s), 0, experts)]
                for other in range(len(steps))
            )
            first_m, tiles_m = 0, step.tiles_m
            if tiles_m is None:
                first_m, tiles_m = tile_start[e], tile_start[e + 1] - tile_start[e]
            n, m = np.divmod(np.arange(tiles_m * step.tiles_n), max(tiles_m, 1))
            block = items[base : base + m.size]
            block[:, 0], block[:, 1], block[:, 2], block[:, 3] = s, e, first_m + m, n
    return items, sum(int(b[-1]) for b in before)
