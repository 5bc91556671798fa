"""The FP8 recipe in NumPy and ml_dtypes, from its definition, and calls with quantised weights."""

import functools
from collections.abc import Collection
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec

from jax_megamoe import QuantizedExperts, mega_moe, quantize_expert_weights
from tests import layer
from tests.cases import ROUNDINGS, Batch, Operand, Results

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
GROUP = 128
# Every scale there is, in order, and the largest magnitude that each takes.
SCALES = 2.0 ** np.arange(-117, 121)
LEAST_NORMAL = 2.0**-126
# What precision="fp8_block" rounds to bf16: all that "bf16" does, but for h; of weights that bf16
# holds.
FP8_ROUNDINGS = tuple(name for name in ROUNDINGS if name != "h")
OPERANDS = ("x", "h", "dy", "dg", "du", "w_gate", "w_up", "w_down")


def quantized(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, D] and scales [N, 1] of groups [N, D] of float32 values."""
    values = np.asarray(groups, np.float32)
    values = np.where(np.abs(values) < LEAST_NORMAL, np.copysign(np.float32(0), values), values)
    largest = np.max(np.abs(values.astype(np.float64)), axis=1, keepdims=True)
    is_finite = np.isfinite(largest)
    scales = SCALES[np.searchsorted(448 * SCALES, np.where(is_finite, largest, 0))]
    scales = np.where(is_finite & (largest > 0), scales, 1)
    codes = np.where(is_finite, values / scales, np.nan).astype(np.float32).astype(E4M3)
    return codes, scales.astype(np.float32)


def quantized_rows(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [M, D] and scales [M, D/128] of rows [M, D]."""
    codes, scales = quantized(a.reshape(-1, GROUP))
    return codes.reshape(a.shape), scales.reshape(len(a), -1)


def quantized_blocks(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [M, N] and scales [M/128, N/128] of a matrix, block after block."""
    codes, scales = np.zeros(a.shape, E4M3), np.zeros([n // GROUP for n in a.shape], np.float32)
    for i, j in np.ndindex(scales.shape):
        block = np.s_[i * GROUP : (i + 1) * GROUP, j * GROUP : (j + 1) * GROUP]
        of_block, scale = quantized(a[block].reshape(1, -1))
        codes[block], scales[i, j] = of_block.reshape(GROUP, GROUP), scale[0, 0]
    return codes, scales


def rounded_rows(a: np.ndarray) -> np.ndarray:
    """float64: what the codes of rows stand for."""
    codes, scales = quantized_rows(a)
    return codes.astype(np.float64) * np.repeat(scales.astype(np.float64), GROUP, axis=1)


def rounded_blocks(a: np.ndarray) -> np.ndarray:
    """float64: what the codes of a matrix stand for."""
    codes, scales = quantized_blocks(a)
    of_codes = scales.astype(np.float64).repeat(GROUP, axis=0).repeat(GROUP, axis=1)
    return codes.astype(np.float64) * of_codes


def operand(names: Collection[str] = OPERANDS) -> Operand:
    """What quantises the operands of these names, for `cases.dense_of`."""

    def of(name: str, a: np.ndarray) -> np.ndarray:
        if name not in names or not a.size:
            return a
        return (rounded_blocks if name.startswith("w_") else rounded_rows)(a)

    return of


def weights_of(batch: Batch) -> tuple[Any, Any, Any]:
    return batch.w_gate, batch.w_up, batch.w_down


@functools.cache
def compiled(num_ranks: int | None, **options: Any) -> Any:
    """As `layer.compiled`, of quantised weights and the arrays of a batch."""
    axis_name = None if num_ranks is None else "expert"

    def run(given: QuantizedExperts, *arrays: Any) -> Results:
        op = functools.partial(mega_moe, precision="fp8_block", quantized_experts=given)
        return layer.results_and_pullback(functools.partial(op, axis_name=axis_name, **options))(
            *arrays
        )

    if num_ranks is not None:
        spec = PartitionSpec("expert")
        mesh = layer.expert_mesh(num_ranks)
        run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(run)


def run_with(
    given: QuantizedExperts, batch: Batch, num_ranks: int | None = None, **how: Any
) -> Results:
    """The results on a batch with quantised weights of the caller, as NumPy arrays."""
    return Results(*map(np.asarray, compiled(num_ranks, **how)(given, *batch)))


def quantize(batch: Batch) -> QuantizedExperts:
    return jax.jit(quantize_expert_weights)(*weights_of(batch))
