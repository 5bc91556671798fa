"""Calls of any activation and with biases as the GPU tests make them, and a program of them for a
process of its own: python -m tests.activation_programs delays FILE NUM_RUNS.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import ClampedSwiGLU, _ffi
from tests import compare
from tests.backward import bits, keeping, num_that_differ, operands
from tests.backward import launched as backward
from tests.cases import BF16, F32, Batch
from tests.forward import SIZES, dims_of, random_batch
from tests.forward import launched as forward
from tests.forward_programs import ROLES, done, load
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


def call(which: int, launches: tuple[tuple[int, ...], tuple[int, ...]] = FUSED) -> list[jax.Array]:
    """The results of one of BATCHES, with biases."""
    size, routing, dtype, save, activation = BATCHES[which]
    batch = random_batch(size, routing)
    how: dict[str, Any] = {"weight_dtype": dtype, "save": save, "launches": launches}
    return results(batch, normal_biases(batch.w_gate), activation, **how)


def all_bits() -> list[np.ndarray]:
    """The bits of every result of every one of BATCHES, one batch after another."""
    return [np.asarray(a) for which in range(len(BATCHES)) for a in bits(call(which))]


def delays(path: str, num_runs: str) -> None:
    """Runs with seeded delays in every role, each bitwise equal to the results in the file."""
    module, reason = _ffi.extension()
    assert module is not None, reason
    saved = [jnp.asarray(a) for a in load(path)]
    wants = [saved[b * len(NAMES) : (b + 1) * len(NAMES)] for b in range(len(BATCHES))]
    num_delays = np.zeros(len(ROLES), np.int64)
    # Seed 0 has no delays.
    for seed in range(int(num_runs) + 1):
        which = seed % len(BATCHES)
        launches = UNFUSED if seed % 8 == 7 else FUSED
        module.set_delay_seed(seed)
        wrong = [int(n) for n in num_that_differ(bits(call(which, launches)), wants[which])]
        assert wrong == [0] * len(NAMES), f"{wrong} values differ: seed {seed}, {BATCHES[which]}"
        num_delays += np.asarray(module.count_delays())
    done(runs=int(num_runs), delays=dict(zip(ROLES, num_delays.tolist(), strict=True)))


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    {"delays": delays}[name](*arguments)
