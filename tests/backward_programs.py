"""The CUDA backward under delays, in a process of its own: python -m tests.backward_programs delays

FILE RUNS. As tests.forward_programs.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import _ffi
from tests.backward import launched, operands
from tests.cases import BF16, F32
from tests.forward import SIZES, dims_of, random_batch
from tests.forward_programs import ROLES, done, load

# Sizes, routings and dtypes of the weights that keep all roles and steps busy.
BATCHES = (
    (SIZES[3], "invalid", F32),
    (SIZES[5], "distinct", BF16),
    (SIZES[6], "skewed", BF16),
    (SIZES[5], "skewed", F32),
)


@jax.jit
def bits(gradients: Any) -> list[jax.Array]:
    """The gradients as unsigned integers, so that equal means equal bits."""
    unsigned = {2: jnp.uint16, 4: jnp.uint32}
    return [jax.lax.bitcast_convert_type(a, unsigned[a.dtype.itemsize]) for a in gradients]


@jax.jit
def num_that_differ(found: list[jax.Array], want: list[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(a != b, dtype=jnp.int32) for a, b in zip(found, want, strict=True)]


def calls() -> list[tuple[Any, list[Any]]]:
    """The sizes and operands of each of BATCHES."""
    batches = [(random_batch(size, routing), dtype) for size, routing, dtype in BATCHES]
    return [(dims_of(batch), operands(batch, dtype)) for batch, dtype in batches]


def results() -> list[np.ndarray]:
    """The bits of every gradient of every one of BATCHES, one batch after another."""
    found = [bits(launched(*arrays, dims=dims)) for dims, arrays in calls()]
    return [np.asarray(a) for gradients in found for a in gradients]


def delays(path: str, num_runs: str) -> None:
    """Runs with seeded delays in every role, each bitwise equal to the results in the file."""
    module, reason = _ffi.extension()
    assert module is not None, reason
    saved = [jnp.asarray(a) for a in load(path)]
    num_gradients = len(saved) // len(BATCHES)
    wants = [saved[b * num_gradients : (b + 1) * num_gradients] for b in range(len(BATCHES))]
    all_calls = calls()
    num_delays = np.zeros(len(ROLES), np.int64)
    # Seed 0 has no delays.
    for seed in range(int(num_runs) + 1):
        b = seed % len(BATCHES)
        dims, arrays = all_calls[b]
        launches = _ffi.BACKWARD_UNFUSED if seed % 8 == 7 else _ffi.BACKWARD_FUSED
        module.set_delay_seed(seed)
        found = launched(*arrays, dims=dims, launches=launches)
        wrong = [int(n) for n in num_that_differ(bits(found), wants[b])]
        assert wrong == [0] * num_gradients, (
            f"{wrong} values differ: seed {seed}, {dims}, {launches}"
        )
        num_delays += np.asarray(module.count_delays())
    done(runs=int(num_runs), delays=dict(zip(ROLES, num_delays.tolist(), strict=True)))


if __name__ == "__main__":
    assert sys.argv[1] == "delays"
    delays(*sys.argv[2:])
