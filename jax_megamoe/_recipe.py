"""What each precision rounds, and where: the one table that the reference follows."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_megamoe.quantization import rounded_rows

Rounding = Callable[[jax.Array], jax.Array]

# To bf16, by what XLA may not remove, as it may a pair of conversions.
to_bf16: Rounding = functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=7)


class Recipe(NamedTuple):
    """The roundings of a precision, each of float32 to float32.

    Attributes:
      stored: of what one part of the layer leaves to another: x, dy and the weights on entry, o, g,
        u, dg, du, w h, rows of dx, y and dx. Products of weight gradients take it as it is.
      operand: of rows [M, D] where a product with the weights takes them: x, h, dy, dg, du. All but
        h are stored, h comes as it was computed.
      gate_up_dtype: holds g and u as they are stored.
    """

    stored: Rounding
    operand: Rounding
    gate_up_dtype: DTypeLike


def _unrounded(a: jax.Array) -> jax.Array:
    return a


_RECIPES = {
    "bf16": Recipe(to_bf16, to_bf16, jnp.bfloat16),
    "float32": Recipe(_unrounded, _unrounded, jnp.float32),
    "fp8_block": Recipe(to_bf16, rounded_rows, jnp.bfloat16),
}


def recipe_of(precision: str) -> Recipe:
    """The recipe of a precision of `MegaMoEConfig`."""
    return _RECIPES[precision]
