"""The FP8 numbers of precision="fp8_block": codes in e4m3fn, and a scale for each group of them.

A group is 128 neighbours of a row, of activations and gradients, or a block of 128 x 128 of an
expert's matrix, as in the DeepSeek-V3 technical report (arXiv:2412.19437, section 3.3.2):

    scale = the smallest power of two >= 2^-117 with max |v| <= 448 scale
    code  = v / scale, rounded to the nearest e4m3fn, ties to even

The report divides by max |v| / 448; a power of two costs up to a factor of two of the 448, which a
floating-point code hardly notices, and makes all else exact: v / scale, products with scales, and
code times scale, whose 4 significant bits fit bf16 too. So a matrix and its transpose are the same
numbers, and a product of them is one of bf16 values.

Scales and codes come from the bits, without a logarithm. Whatever float32 holds has its code:
  * a group without a normal number has the scale 1, and codes 0: subnormals count as 0;
  * the least scale keeps every code times scale a normal number, or 0;
  * with NaN or infinity in a group, all its codes are NaN and its scale is 1; no other group's are;
  * what rounds up to 2^128, from 1.9375 2^127 on, has a finite code; times scale it is infinite.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_megamoe.config import FP8_GROUP
from jax_megamoe.validation import check_array, check_floats, check_groups, check_weights

Array = jax.Array
ArrayLike = jax.Array | np.ndarray

# 3 bits of mantissa, normal from 2^-6 to 448 = 1.75 2^8, subnormal multiples of 2^-9.
E4M3 = jnp.float8_e4m3fn
_MANTISSA_BITS, _LEAST_NORMAL, _PER_SUBNORMAL = 3, 2.0**-6, 2.0**9
_MOST_EXPONENT = 8
# Added to the bits of a float32, it carries into the exponent where the mantissa is above 1.75.
_ABOVE_1_75 = 0x7FFFFF - 0x600000
# Of float32.
_EXPONENT_SHIFT, _EXPONENT_BIAS = 23, 127
_MAGNITUDE, _INFINITE, _NORMAL = 0x7FFFFFFF, 0x7F800000, 0x00800000
# The least code times 2^-117 is 2^-126, float32's least normal number and bf16's.
_LEAST_EXPONENT = _EXPONENT_BIAS - 117


class QuantizedMatrix(NamedTuple):
    """One matrix of each expert of a rank, M x N: its codes in both orders, and their scales.

    FP8 products of Hopper read both operands along the dimension that they sum over (K-major), and
    the layer sums over either dimension of a matrix: over rows in the forward, x Wg and h Wd, and
    over columns in the backward, dg Wg^T and dy Wd^T. So each order is there once.

    Attributes:
      natural: float8_e4m3fn [E/R, M, N], in the order of the weights; the backward's.
      transposed: float8_e4m3fn [E/R, N, M], the same codes; the forward's.
      scales: float32 [E/R, M/128, N/128], powers of two, of the blocks of `natural`.
    """

    natural: Array
    transposed: Array
    scales: Array


class QuantizedExperts(NamedTuple):
    """The weights of a rank's experts for precision="fp8_block", of `quantize_expert_weights`.

    A pytree of nine arrays, each of which begins with the dimension of the experts, and of nothing
    else: jit, scan, shard_map and donation take it as they take the weights.

    Attributes:
      w_gate, w_up: M = H, N = I.
      w_down: M = I, N = H.
    """

    w_gate: QuantizedMatrix
    w_up: QuantizedMatrix
    w_down: QuantizedMatrix


# How many arrays a QuantizedExperts has.
NUM_ARRAYS = len(QuantizedExperts._fields) * len(QuantizedMatrix._fields)


def quantize_expert_weights(
    w_gate: ArrayLike, w_up: ArrayLike, w_down: ArrayLike
) -> QuantizedExperts:
    """The experts' weights as precision="fp8_block" multiplies them, for `mega_moe`.

    Made once in each optimizer step, of the parameters of that step and inside of its program, it
    serves forward, backward, their recomputation and every microbatch; without it each of them
    quantises for itself, to the same bits. It has no gradient: that of a product with a quantised
    weight goes to the weight itself, the argument beside it, as if nothing had been rounded.

    Blocks of 128 x 128 of each expert, with the smallest power of two as the scale that brings the
    largest magnitude to at most 448; codes are rounded to the nearest, once, from the dtype of the
    weights (recipe: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3.2). A block with
    NaN or infinity is NaN as a whole; float32 subnormals count as 0. Codes and scales lie as the
    weights do, but are whole along a dimension whose blocks explicit mesh axes would cut.

    Args:
      w_gate, w_up: [E/R, H, I] bf16 or float32, with H and I multiples of 128.
      w_down: [E/R, I, H], of w_gate's dtype.

    Returns:
      for each matrix its float8_e4m3fn codes in both orders and its float32 scales.

    Raises:
      TypeError, ValueError: naming the argument, what it was and what it may be.
    """
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    for name, value in weights.items():
        check_array(name, value)
    check_floats(weights)
    check_weights(w_gate, w_up, w_down)
    check_groups("w_gate", H=w_gate.shape[1], I=w_gate.shape[2])
    return QuantizedExperts(*map(_quantize_matrix, weights.values()))


def from_arrays(arrays: Sequence[Array]) -> QuantizedExperts:
    """The pytree again, of its NUM_ARRAYS leaves in order."""
    size = len(QuantizedMatrix._fields)
    parts = (arrays[i : i + size] for i in range(0, NUM_ARRAYS, size))
    return QuantizedExperts(*(QuantizedMatrix(*part) for part in parts))


def dequantize(matrix: QuantizedMatrix) -> Array:
    """What the codes stand for, float32 [E/R, M, N]."""
    blocks = _blocks(matrix.natural.astype(jnp.float32))
    return _of_blocks(blocks * matrix.scales[:, :, None, :, None])


def quantize_rows(values: Array) -> tuple[Array, Array]:
    """Codes float8_e4m3fn [..., D] and scales float32 [..., D/128] of [..., D] bf16 or float32."""
    codes, scales = _quantize(_row_groups(values), (-1,))
    return codes.reshape(values.shape).astype(E4M3), scales[..., 0]


def rounded_rows(values: Array) -> Array:
    """What the codes of `quantize_rows` stand for, float32 [..., D]."""
    codes, scales = _quantize(_row_groups(values), (-1,))
    return (codes * scales).reshape(values.shape)


def _quantize_matrix(weights: ArrayLike) -> QuantizedMatrix:
    # No derivative is taken of what has none: differentiated code may quantise its own parameters.
    values = lax.stop_gradient(_with_whole_blocks(jnp.asarray(weights)).astype(jnp.float32))
    codes, scales = _quantize(_blocks(values), (2, 4))
    natural = _of_blocks(codes).astype(E4M3)
    return QuantizedMatrix(natural, natural.swapaxes(1, 2), scales[:, :, 0, :, 0])


def _with_whole_blocks(matrices: Array) -> Array:
    """[E/R, M, N], gathered along M or N where the explicit axes that split it would cut blocks."""
    sharding = jax.typeof(matrices).sharding
    num_experts, *parts = sharding.spec
    sizes = sharding.mesh.shape
    for i, (size, axes) in enumerate(zip(matrices.shape[1:], parts, strict=True)):
        names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
        if size % (FP8_GROUP * math.prod(sizes[name] for name in names)):
            parts[i] = None
    spec = jax.sharding.PartitionSpec(num_experts, *parts)
    if spec == sharding.spec:
        return matrices
    return jax.sharding.reshard(matrices, jax.NamedSharding(sharding.mesh, spec))


def _row_groups(values: Array) -> Array:
    """[..., D] as float32 [..., D/128, 128]."""
    *leading, size = values.shape
    return values.astype(jnp.float32).reshape(*leading, size // FP8_GROUP, FP8_GROUP)


def _blocks(matrices: Array) -> Array:
    """[E/R, M, N] as [E/R, M/128, 128, N/128, 128]."""
    num_experts, rows, cols = matrices.shape
    # One dimension after the other: JAX splits and joins no two at once of what is sharded.
    groups = matrices.reshape(num_experts, rows, cols // FP8_GROUP, FP8_GROUP)
    return groups.reshape(num_experts, rows // FP8_GROUP, FP8_GROUP, *groups.shape[2:])


def _of_blocks(blocks: Array) -> Array:
    """[E/R, M, N] again."""
    num_experts, row_blocks, rows, *groups = blocks.shape
    matrices = blocks.reshape(num_experts, row_blocks * rows, *groups)
    return matrices.reshape(*matrices.shape[:2], math.prod(groups))


def _quantize(groups: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Of float32 values, the groups of which lie along `axes`: their codes, still as float32, and
    the scales, with 1 in place of the axes."""
    magnitude = lax.bitcast_convert_type(groups, jnp.int32) & _MAGNITUDE
    largest = jnp.max(magnitude, axis=axes, keepdims=True)
    exponent = ((largest + _ABOVE_1_75) >> _EXPONENT_SHIFT) - _MOST_EXPONENT
    exponent = jnp.maximum(exponent, _LEAST_EXPONENT)
    is_finite = largest < _INFINITE
    exponent = jnp.where(is_finite & (largest >= _NORMAL), exponent, _EXPONENT_BIAS)
    # Not left to the platform, of which some flush subnormals and some do not.
    groups = jnp.where(magnitude < _NORMAL, jnp.copysign(jnp.float32(0), groups), groups)
    codes = _to_e4m3(groups * _power_of_two(2 * _EXPONENT_BIAS - exponent))
    return jnp.where(is_finite, codes, jnp.nan), _power_of_two(exponent)


def _power_of_two(exponent: Array) -> Array:
    """float32, of its biased exponent in 1..254."""
    return lax.bitcast_convert_type(exponent << _EXPONENT_SHIFT, jnp.float32)


def _to_e4m3(values: Array) -> Array:
    """float32 of magnitude at most 448, rounded to what e4m3fn holds; still float32.

    Not by a conversion and back, a pair that XLA may remove.
    """
    normal = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=_MANTISSA_BITS)
    subnormal = jnp.round(values * _PER_SUBNORMAL) / _PER_SUBNORMAL
    return jnp.where(jnp.abs(values) < _LEAST_NORMAL, subnormal, normal)
