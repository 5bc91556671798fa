"""Activations and expert biases in NumPy: formulas in float64, each as its own model writes it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jax_megamoe import ClampedSwiGLU

# (g, u) -> h and its derivatives in g and u.
Unit = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


class Biases(NamedTuple):
    """The biases of all experts, or their gradients."""

    b_gate: Any  # [E, I]
    b_up: Any  # [E, I]
    b_down: Any  # [E, H]


def normal_biases(w_gate: Any, *, seed: int = 0, dtype: Any = np.float32) -> Biases:
    """Random normal biases for experts of such a w_gate, which bf16 does not hold in float32."""
    rng = np.random.default_rng(seed)
    return Biases(*(rng.standard_normal(b.shape).astype(dtype) for b in no_biases(w_gate)))


def biases_behind_limits(w_gate: Any, limit: float) -> Biases:
    """Of random normal biases a third of the columns of g, and two thirds of those of u, far behind
    a limit: where g and u are a few at most without them none comes so close to a limit that its
    rounding decides over a gradient."""
    biases = normal_biases(w_gate)
    rng = np.random.default_rng(1)
    for b, sides in ((biases.b_gate, (0, 0, 1)), (biases.b_up, (-1, 0, 1))):
        b += (2.5 * limit * rng.choice(sides, b.shape)).astype(b.dtype)
    return biases


def no_biases(w_gate: Any) -> Biases:
    """Zeros, in float64."""
    experts, hidden, inner = w_gate.shape
    return Biases(*(np.zeros((experts, outputs)) for outputs in (inner, inner, hidden)))


def swiglu(g: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sigmoid = 1 / (1 + np.exp(-g))
    return g * sigmoid * u, u * sigmoid * (1 + g * (1 - sigmoid)), g * sigmoid


def geglu(g: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """gelu in its tanh form: g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) / 2."""
    root = np.sqrt(2 / np.pi)
    tanh = np.tanh(root * (g + 0.044715 * g**3))
    gelu = g * (1 + tanh) / 2
    slope = (1 + tanh) / 2 + g * (1 - tanh**2) * root * (1 + 3 * 0.044715 * g**2) / 2
    return gelu * u, slope * u, gelu


def clamped(alpha: float = 1.702, limit: float = 7.0) -> Unit:
    """gpt-oss: gate.clamp(max=limit), up.clamp(-limit, limit), glu = gate sigmoid(alpha gate),
    (up + 1) glu."""

    def unit(g: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        gate, up = np.minimum(g, limit), np.clip(u, -limit, limit)
        sigmoid = 1 / (1 + np.exp(-alpha * gate))
        glu = gate * sigmoid
        slope = sigmoid + alpha * gate * sigmoid * (1 - sigmoid)
        return (up + 1) * glu, (g <= limit) * slope * (up + 1), (np.abs(u) <= limit) * glu

    return unit


# By what makes them in `MegaMoEConfig`; the last one clamps a good part of random normal values.
UNITS: dict[Any, Unit] = {
    "swiglu": swiglu,
    "geglu": geglu,
    ClampedSwiGLU(): clamped(),
    ClampedSwiGLU(alpha=1.5, limit=0.75): clamped(1.5, 0.75),
}
