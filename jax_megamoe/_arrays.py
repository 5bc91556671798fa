"""What arrays of a call are made of, and those that both passes have alike."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_megamoe.config import FP8_GROUP, Dims

# Rows of FP8 codes take whole lines, as in cuda/shared/fp8.h.
LINE_BYTES = 128

BF16, F32, I32 = (np.dtype(d) for d in (jnp.bfloat16, jnp.float32, jnp.int32))
E4M3, U8 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.uint8)


class ArraySize(NamedTuple):
    """One array of a call."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tokens(dims: Dims) -> list[ArraySize]:
    return [
        ArraySize("x", (dims.T, dims.H), BF16),
        ArraySize("expert_idx", (dims.T, dims.K), I32),
        ArraySize("expert_weight", (dims.T, dims.K), F32),
    ]


def weights(dims: Dims) -> list[ArraySize]:
    experts = dims.experts_per_rank
    return [
        ArraySize("w_gate", (experts, dims.H, dims.I), BF16),
        ArraySize("w_up", (experts, dims.H, dims.I), BF16),
        ArraySize("w_down", (experts, dims.I, dims.H), BF16),
    ]


def forward_codes(dims: Dims) -> list[ArraySize]:
    """Codes of each expert's matrices in the order of the forward, and their scales."""
    return [a for a in _quantized_weights(dims) if not a.name.endswith("natural")]


def backward_codes(dims: Dims) -> list[ArraySize]:
    """Codes in the order of the backward, and for g and u in that of the forward, too."""
    return [a for a in _quantized_weights(dims) if a.name != "w_down transposed"]


def _quantized_weights(dims: Dims) -> list[ArraySize]:
    """As `QuantizedExperts` has them."""
    arrays = []
    for name, (experts, rows, columns), _ in weights(dims):
        scales = (experts, rows // FP8_GROUP, columns // FP8_GROUP)
        arrays += [
            ArraySize(f"{name} natural", (experts, rows, columns), E4M3),
            ArraySize(f"{name} transposed", (experts, columns, rows), E4M3),
            ArraySize(f"{name} scales", scales, F32),
        ]
    return arrays


def code_row_bytes(columns: int) -> int:
    """Of a row of FP8 codes with the scales behind them, as CodeRowBytes of cuda/shared/fp8.h."""
    return columns + up_to(LINE_BYTES, columns // FP8_GROUP * F32.itemsize)


def code_rows(name: str, rows: int, columns: int) -> ArraySize:
    return ArraySize(name, (rows, code_row_bytes(columns)), U8)


def biases(dims: Dims) -> list[ArraySize]:
    experts = dims.experts_per_rank
    return [
        ArraySize("b_gate", (experts, dims.I), F32),
        ArraySize("b_up", (experts, dims.I), F32),
        ArraySize("b_down", (experts, dims.H), F32),
    ]


def up_to(multiple: int, num_bytes: int) -> int:
    return -(-num_bytes // multiple) * multiple
