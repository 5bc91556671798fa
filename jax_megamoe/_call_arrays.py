"""The operands and results of the custom calls: the one source of their shapes.

Sizes are Python integers, so nothing wraps before it is compared with what 64 bits hold.
"""

from collections.abc import Sequence

import jax
import numpy as np

from jax_megamoe._arrays import (
    BF16,
    F32,
    I32,
    ArraySize,
    backward_codes,
    biases,
    code_rows,
    forward_codes,
    tokens,
    up_to,
    weights,
)
from jax_megamoe.config import TILE_ROWS, Dims
from jax_megamoe.plan import (
    DGRAD_DOWN_COLS,
    Plan,
    Step,
    backward_steps,
    ceil_div,
    forward_steps,
    plan_chunks,
    plan_shapes,
    plan_sizes,
)

# What ranks give each other begins at multiples of this, as in cuda/host/peer_arrays.cc.
PEER_ALIGNMENT = 256
# The rows of a trace that PeerTraffic of cuda/shared/trace.h takes.
TRAFFIC_RECORDS = 3
# No Hopper has as many.
MAX_MULTIPROCESSORS = 256


def forward_operands(
    dims: Dims, expert_bias: bool = False, precision: str = "bf16"
) -> list[ArraySize]:
    """The operands of the forward custom call, in their order."""
    return [
        *tokens(dims),
        *(forward_codes(dims) if precision == "fp8_block" else weights(dims)),
        *(biases(dims) if expert_bias else []),
    ]


def forward_results(
    dims: Dims, keep_gate_up: bool = False, precision: str = "bf16"
) -> list[ArraySize]:
    """The results of the forward custom call, in their order.

    All but y, counts and, with keep_gate_up, the last one are workspace.

    Raises ValueError as `plan.plan_sizes`.
    """
    steps = forward_steps(dims)
    rows = dims.pool_rows
    return [
        ArraySize("y", (dims.T, dims.H), BF16),
        *plan_results(dims, steps),
        *forward_pools(dims, precision),
        ArraySize("counters", (_num_counters(rows),), I32),
        *([gate_up_array(dims)] if keep_gate_up else []),
    ]


def forward_pools(dims: Dims, precision: str) -> list[ArraySize]:
    rows = dims.pool_rows
    if precision != "fp8_block":
        return [
            ArraySize("pool", (rows, dims.H), BF16),
            ArraySize("h", (rows, dims.I), BF16),
        ]
    return [
        *_own_codes(dims, "x"),
        code_rows("x_pool", rows, dims.H),
        code_rows("h", rows, dims.I),
        ArraySize("o", (rows, dims.H), BF16),
    ]


def _own_codes(dims: Dims, name: str) -> list[ArraySize]:
    """Those of the tokens of a rank, which it makes where its peers find them."""
    return [code_rows(f"{name}_codes", dims.T, dims.H)] if dims.R == 1 else []


def gate_up_array(dims: Dims) -> ArraySize:
    """What save="gate_up" keeps: g and u of every pool row, in an order of the backend's own."""
    return ArraySize("gate_up", (dims.pool_rows, 2 * dims.I), BF16)


def peer_array_bytes(dims: Dims, combine_dtype: str, precision: str = "bf16") -> int:
    """The bytes that a rank asks for to share with its peers, as cuda/host/peer_arrays.cc."""
    R, T, K, H = dims.R, dims.T, dims.K, dims.H
    is_fp8 = precision == "fp8_block"
    arrays = [
        ArraySize("blocks_done", (1,), I32),
        ArraySize("inputs_done", (R,), I32),
        ArraySize("sums_done", (R, T), I32),
        # Calls take turns with two.
        *[ArraySize("expert_idx", (R, T, K), I32)] * 2,
        *[ArraySize("expert_weight", (R, T, K), F32)] * 2,
        ArraySize("dw", (T, K), F32),
        ArraySize("x", (T, H), BF16),
        ArraySize("dy", (T, H), BF16),
        *([code_rows(f"{name}_codes", T, H) for name in ("x", "dy")] if is_fp8 else []),
        ArraySize("sums", (R, T, H), np.dtype(combine_dtype)),
    ]
    return sum(up_to(PEER_ALIGNMENT, array.num_bytes) for array in arrays)


def backward_operands(
    dims: Dims, keep_gate_up: bool = False, expert_bias: bool = False, precision: str = "bf16"
) -> list[ArraySize]:
    """The operands of the backward custom call, in their order."""
    return [
        ArraySize("dy", (dims.T, dims.H), BF16),
        *tokens(dims),
        *(backward_codes(dims) if precision == "fp8_block" else weights(dims)),
        *(biases(dims) if expert_bias else []),
        *([gate_up_array(dims)] if keep_gate_up else []),
    ]


def backward_results(
    dims: Dims,
    weight_gradients: jax.typing.DTypeLike | None,
    keep_gate_up: bool = False,
    expert_bias: bool = False,
    precision: str = "bf16",
) -> list[ArraySize]:
    """The results of the backward custom call, in their order; all but gradients are workspace.

    Args:
      weight_gradients: the dtype of the weights' gradients; None for a call without them. Those
        that several passes may add up come in float32, whatever it is, and those of biases always.
      keep_gate_up: the call takes g and u of the forward.
      expert_bias: the experts have biases.
      precision: as in `MegaMoEConfig`.

    Raises ValueError as `plan.plan_sizes`.
    """
    trainable = weight_gradients is not None
    steps = backward_steps(dims, trainable_experts=trainable)
    rows = dims.pool_rows
    return [
        *gradients(dims, weight_gradients, expert_bias),
        *plan_results(dims, steps),
        ArraySize("x_pool", (rows, dims.H), BF16),
        ArraySize("dy_pool", (rows, dims.H), BF16),
        ArraySize("dg", (rows, dims.I), BF16),
        ArraySize("du", (rows, dims.I), BF16),
        ArraySize("wh", (rows, dims.I), BF16),
        ArraySize("dx_pool", (rows, dims.H), BF16),
        ArraySize("dw_partial", (rows, ceil_div(dims.I, DGRAD_DOWN_COLS)), F32),
        ArraySize("counters", (_num_counters(rows) + dims.experts_per_rank,), I32),
        # Of each row <dy, b_down> and the router weight.
        *([ArraySize("bias_rows", (rows, 2), F32)] if expert_bias else []),
        *(_backward_code_rows(dims, keep_gate_up) if precision == "fp8_block" else []),
    ]


def _backward_code_rows(dims: Dims, keep_gate_up: bool) -> list[ArraySize]:
    """Those of dy, of dg beside du and, where a pass computes g and u again, of x."""
    rows = dims.pool_rows
    arrays = [
        *_own_codes(dims, "dy"),
        code_rows("dy_code_pool", rows, dims.H),
        code_rows("dz_codes", rows, 2 * dims.I),
    ]
    if keep_gate_up and dims.max_passes == 1:
        return arrays
    return [*arrays, *_own_codes(dims, "x"), code_rows("x_code_pool", rows, dims.H)]


def gradients(
    dims: Dims, weight_gradients: jax.typing.DTypeLike | None, expert_bias: bool
) -> list[ArraySize]:
    gradients = [
        ArraySize("dx", (dims.T, dims.H), BF16),
        ArraySize("dw", (dims.T, dims.K), F32),
    ]
    if weight_gradients is None:
        return gradients
    dtype = F32 if dims.max_passes > 1 else np.dtype(weight_gradients)
    gradients += [ArraySize(f"d{w.name}", w.shape, dtype) for w in weights(dims)]
    of_biases = biases(dims) if expert_bias else []
    return gradients + [ArraySize(f"d{b.name}", b.shape, b.dtype) for b in of_biases]


def trace_result(dims: Dims, steps: Sequence[Step]) -> ArraySize:
    """The records of a traced call: a header, four an item, one a pool row, one a piece of a sum.

    More than the roles write: they move and sum several rows at a time. Of several ranks, two a
    token that is finished and two a block that shares the inputs, and behind all of them what
    crossed NVLink.
    """
    sizes = plan_sizes(dims, steps)
    sums = dims.R * dims.T * dims.K * ceil_div(dims.H, 256)
    records = 4 * sizes.items + sizes.pool_rows + sums
    if dims.R > 1:
        records += 2 * dims.T + 2 * MAX_MULTIPROCESSORS + TRAFFIC_RECORDS
    return ArraySize("trace", (1 + records, 4), I32)


def plan_results(dims: Dims, steps: Sequence[Step]) -> list[ArraySize]:
    """The arrays of a plan and the scratch behind them."""
    shapes = plan_shapes(dims, steps)
    arrays = [ArraySize(*named, I32) for named in zip(Plan._fields, shapes, strict=True)]
    scratch = (plan_chunks(dims), dims.experts_per_rank)
    return [*arrays, ArraySize("chunk_counts", scratch, I32)]


def _num_counters(pool_rows: int) -> int:
    """As NumCounters of cuda/host/layer.cc: 4 claims in 32 words each, 3 flags a tile.

    The backward has one more an expert.
    """
    return 4 * 32 + 3 * (pool_rows // TILE_ROWS)
