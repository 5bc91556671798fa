"""The gated units of the experts: one formula, of which an activation gives the constants.

h = a(min(g, limit)) (clip(u, -limit, limit) + offset),   a(g) = g sigmoid(alpha g + beta g^3)
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_megamoe.config import ClampedSwiGLU

Array = jax.Array

# sigmoid of it is 0 or 1 in float32. Where alpha g + beta g^3 may overflow before g does, g is
# bounded in it by what makes alpha g that large: 0 times infinity is NaN.
SATURATED = 1024.0


class GatedUnit(NamedTuple):
    """The constants of the formula; those of SwiGLU unless said. A beta comes with an alpha > 1."""

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    offset: float = 0.0


# gelu(g) = g (1 + tanh(z)) / 2 = g sigmoid(2 z) with z = sqrt(2 / pi) (g + 0.044715 g^3).
_GELU = 2 * math.sqrt(2 / math.pi)
_BY_NAME = {"swiglu": GatedUnit(), "geglu": GatedUnit(alpha=_GELU, beta=0.044715 * _GELU)}


def gated_unit(activation: str | ClampedSwiGLU) -> GatedUnit:
    """The constants of an activation of `MegaMoEConfig`."""
    if isinstance(activation, ClampedSwiGLU):
        # Equal activations have the same constants, bit for bit: no -0.
        alpha, limit = float(activation.alpha) + 0.0, float(activation.limit)
        return GatedUnit(alpha=alpha, limit=limit, offset=1.0)
    return _BY_NAME[activation]


def gated(unit: GatedUnit, g: Array, u: Array) -> Array:
    """h of g and u, in their dtype."""
    g, factor = _clamped(unit, g, u)
    z, _ = _exponent(unit, g)
    return g * jax.nn.sigmoid(z) * factor


def gated_with_gradients(
    unit: GatedUnit, g: Array, u: Array, dh: Array
) -> tuple[Array, Array, Array]:
    """h, and the gradients of g and u from dh, that of h; 0 behind a clamp, whatever dh is."""
    held_g, factor = _clamped(unit, g, u)
    z, slope = _exponent(unit, held_g)
    sigmoid = jax.nn.sigmoid(z)
    h = held_g * sigmoid * factor
    dg = dh * factor * sigmoid * (1 + slope * (1 - sigmoid))
    du = dh * held_g * sigmoid
    if math.isfinite(unit.limit):
        dg = jnp.where(g > unit.limit, 0, dg)
        du = jnp.where(jnp.abs(u) > unit.limit, 0, du)
    return h, dg, du


def _clamped(unit: GatedUnit, g: Array, u: Array) -> tuple[Array, Array]:
    """min(g, limit), and what multiplies a of it. NaN stays NaN.

    By selection: where g or u is at the limit, automatic differentiation lets all of a gradient
    pass, as `gated_with_gradients` does; of a minimum it would be half.
    """
    if math.isfinite(unit.limit):
        g = jnp.where(g > unit.limit, unit.limit, g)
        u = jnp.where(jnp.abs(u) > unit.limit, jnp.sign(u) * unit.limit, u)
    return g, u + unit.offset if unit.offset else u


def _exponent(unit: GatedUnit, g: Array) -> tuple[Array, Array]:
    """z = alpha g + beta g^3, and g dz/dg; g itself twice for SwiGLU, without a product by 1."""
    if abs(unit.alpha) > 1:
        bound = SATURATED / abs(unit.alpha)
        g = jnp.clip(g, -bound, bound)
    if unit.beta:
        return g * (unit.alpha + unit.beta * g * g), g * (unit.alpha + 3 * unit.beta * g * g)
    z = g if unit.alpha == 1 else unit.alpha * g
    return z, z
