"""The FP8 recipe in NumPy and ml_dtypes, from its definition, and calls with quantised weights."""

import functools
from collections.abc import Collection
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec

from jax_megamoe import QuantizedExperts, mega_moe, quantize_expert_weights
from jax_megamoe.quantization import QuantizedMatrix
from tests import cases, layer
from tests.cases import BF16, ROUNDINGS, Batch, Operand, Results
from tests.gated import Unit, no_biases, swiglu

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
GROUP = 128
# Every scale there is, in order, and the largest magnitude that each takes.
SCALES = 2.0 ** np.arange(-117, 121)
LEAST_NORMAL = 2.0**-126
# What precision="fp8_block" rounds to bf16: all that "bf16" does, but for h; of weights that bf16
# holds.
FP8_ROUNDINGS = tuple(name for name in ROUNDINGS if name != "h")
OPERANDS = ("x", "h", "dy", "dg", "du", "w_gate", "w_up", "w_down")
# Those that a call is given, as a batch has them.
INPUTS = ("x", "w_gate", "w_up", "w_down")


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


def quantized_experts(*weights: np.ndarray) -> QuantizedExperts:
    """As `quantize_expert_weights`, of w_gate, w_up and w_down."""
    matrices = []
    for w in weights:
        of_experts: Any = zip(*map(quantized_blocks, w), strict=True)
        arrays: Any = [*map(np.stack, of_experts)]
        matrices.append(QuantizedMatrix(arrays[0], arrays[0].swapaxes(1, 2), arrays[1]))
    return QuantizedExperts(*matrices)


def rounded_rows(a: np.ndarray) -> np.ndarray:
    """float64: what the codes of rows stand for."""
    codes, scales = quantized_rows(a)
    return codes.astype(np.float64) * np.repeat(scales.astype(np.float64), GROUP, axis=1)


def rounded_blocks(a: np.ndarray) -> np.ndarray:
    """float64: what the codes of a matrix stand for."""
    codes, scales = quantized_blocks(a)
    of_codes = scales.astype(np.float64).repeat(GROUP, axis=0).repeat(GROUP, axis=1)
    return codes.astype(np.float64) * of_codes


def swiglu_of_kernels(g: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`gated.swiglu` with h as the forward kernels compute it, cuda/ptx/activation.cuh."""
    t = np.exp(-np.abs(g))
    reciprocal = np.polyval([0.1604386, -0.5514736, 0.8800154, -0.9888031, 1.0], t)
    _, slope_g, slope_u = swiglu(g, u)
    return np.where(g < 0, g * t, g) * reciprocal * u, slope_g, slope_u


def operand(names: Collection[str] = OPERANDS) -> Operand:
    """What quantises the operands of these names, for `cases.dense_of`."""

    def of(name: str, a: np.ndarray) -> np.ndarray:
        if name not in names or not a.size:
            return a
        return (rounded_blocks if name.startswith("w_") else rounded_rows)(a)

    return of


def recipe(batch: Batch, unit: Unit = swiglu, operands: Collection[str] = OPERANDS) -> Results:
    """The layer as the recipe rounds it, in float64, with these operands quantised."""
    how: dict[str, Any] = {"rounded": FP8_ROUNDINGS, "operand": operand(operands)}
    return cases.dense_of(batch, unit, no_biases(batch.w_gate), **how)[0]


def two_column_oracle(
    ids: np.ndarray, expert_weight: Any = 0.5, *, num_experts: int, **how: Any
) -> Batch:
    """The oracle with tags of 8 bits: their parts of 16 and of 1 come over two columns of h, each
    of which codes hold; expert_weight, how: as for `cases.oracle`."""
    batch = cases.oracle(ids, expert_weight, num_experts=num_experts, **how)
    tag = np.arange(1, num_experts + 1)
    for w, value in ((batch.w_gate, 32), (batch.w_up, 1)):
        w[:, 0, :2] = value
    batch.w_down[:, 0] = (tag % 16)[:, None] / 32
    batch.w_down[:, 1] = (tag // 16 * 16)[:, None] / 32
    return batch


def two_column_results(batch: Batch) -> Results:
    """The right values of a `two_column_oracle` batch: all but the gradients of weights are those
    of an oracle."""
    right = cases.oracle_results(batch)
    tag, sum_w = np.arange(1, batch.num_experts + 1), right.dw_down[:, 0, 0] / 32
    parts = np.stack([tag % 16, tag // 16 * 16], axis=1)
    right.dw_gate[:, 0, :2] = sum_w[:, None] * parts / 32
    right.dw_up[:, 0, :2] = sum_w[:, None] * parts
    right.dw_down[:, 1] = right.dw_down[:, 0]
    return right


def with_scales(batch: Batch) -> Batch:
    """The batch with powers of two as factors, so that neighbours of every kind have other scales:
    tokens, groups of a row, blocks in both directions and experts. Those of a group of x and of the
    rows of w_gate and w_up that it meets cancel, and g and u stay as large; so do those of dy and
    of the columns of w_down."""

    def powers(size: int, period: int, group: int = GROUP) -> np.ndarray:
        """2^0 to 2^(period - 1) in turn."""
        return 2.0 ** (np.arange(size) // group % period)

    (tokens, hidden), (experts, _, inner) = batch.x.shape, batch.w_gate.shape
    of_hidden, of_inner = powers(hidden, 5), powers(inner, 3)
    of_expert = powers(experts, 2, 1)[:, None, None]
    factors = {
        "x": powers(tokens, 2, 1)[:, None] * of_hidden,
        "w_gate": of_expert * of_inner / of_hidden[:, None] / 4,
        "w_up": of_inner[::-1] / of_hidden[:, None] / of_expert,
        "w_down": powers(hidden, 2) / of_inner[:, None] / of_expert,
        "dy": powers(tokens, 3, 1)[:, None] / powers(hidden, 2),
    }
    scaled = {name: getattr(batch, name).astype(np.float64) * f for name, f in factors.items()}
    return batch._replace(**{name: a.astype(BF16) for name, a in scaled.items()})


def integers(batch: Batch) -> Batch:
    """Small integers in the place of what is random: codes hold them, and any order of float32 sums
    of their products is exact."""
    rng = np.random.default_rng(0)
    names = (*INPUTS, "dy")
    drawn = {name: rng.integers(-2, 3, getattr(batch, name).shape) for name in names}
    return batch._replace(**{name: a.astype(BF16) for name, a in drawn.items()})


def weights_of(batch: Batch) -> tuple[Any, Any, Any]:
    return batch.w_gate, batch.w_up, batch.w_down


def quantized_weights(batch: Batch) -> QuantizedExperts:
    """Those of a batch, by NumPy."""
    return quantized_experts(*weights_of(batch))


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
