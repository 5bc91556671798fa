"""Calls of any activation and with biases as the GPU tests make them, and a program of them for a
process of its own: python -m tests.activation_programs delayed FILE RUNS.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import ClampedSwiGLU, _ffi
from tests import compare, delays
from tests.backward import bits, keeping, operands
from tests.backward import launched as backward
from tests.cases import BF16, F32, Batch, Size
from tests.forward import SIZES, dims_of, random_batch
from tests.forward import launched as forward
from tests.forward_programs import done, load
from tests.gated import Biases, normal_biases

NAMES = ("y", "dx", "dw", "dw_gate", "dw_up", "dw_down", "db_gate", "db_up", "db_down")
FUSED = (_ffi.FUSED, _ffi.BACKWARD_FUSED)
UNFUSED = (_ffi.UNFUSED, _ffi.BACKWARD_UNFUSED)
# A good part of what is random normal lies behind this limit.
CLAMPED = ClampedSwiGLU(alpha=1.5, limit=0.75)
# Sizes, routings, dtypes of the weights, what the forward keeps and activations.
BATCHES: tuple[tuple[Any, ...], ...] = (
    (SIZES[3], "invalid", F32, "none", CLAMPED),
    (SIZES[5], "distinct", BF16, "none", CLAMPED),
    (SIZES[6], "skewed", F32, "gate_up", "geglu"),
)


def results(
    batch: Batch,
    biases: Biases | None,
    activation: str | ClampedSwiGLU,
    *,
    weight_dtype: Any = BF16,
    save: str = "none",
    launches: tuple[tuple[int, ...], tuple[int, ...]] = FUSED,
    trainable: bool = True,
) -> list[jax.Array]:
    """y and the gradients, in the order of NAMES."""
    dy, *arrays = operands(batch, weight_dtype)
    arrays += [jnp.asarray(b) for b in biases or ()]
    how: dict[str, Any] = {"dims": dims_of(batch), "activation": activation}
    forwards, backwards = launches
    if save == "gate_up":
        y, _, gate_up = keeping(*arrays, launches=forwards, **how)
    else:
        y, _ = forward(*arrays, launches=forwards, **how)
        gate_up = None
    how |= {"gate_up": gate_up, "launches": backwards, "trainable": trainable}
    return [y, *backward(dy, *arrays, **how)]


def assert_same(found: Any, want: Any) -> None:
    """The same bits of all that both have."""
    assert len(found) == len(want)
    for name, a, b in zip(NAMES, found, want, strict=False):
        compare.assert_bitwise(np.asarray(a), np.asarray(b), name)


def delayed_calls() -> delays.Calls:
    """Of BATCHES, with biases."""

    def prepared(size: Size, routing: str, dtype: Any, save: str, activation: Any) -> Any:
        batch = random_batch(size, routing)
        how: dict[str, Any] = {"weight_dtype": dtype, "save": save}
        biases = normal_biases(batch.w_gate)
        return lambda launches: bits(results(batch, biases, activation, launches=launches, **how))

    return delays.Calls({b: prepared(*b) for b in BATCHES}, FUSED, UNFUSED)


def delayed(path: str, num_runs: str) -> None:
    """Runs with delays; the file has the right results."""
    done(**delays.run(delayed_calls(), load(path), int(num_runs)))


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    {"delayed": delayed}[name](*arguments)
