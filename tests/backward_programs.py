"""Programs around the CUDA backward, each for a process of its own:

    python -m tests.backward_programs NAME ARGUMENTS

As tests.forward_programs.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import _ffi
from jax_megamoe.config import Dims
from tests import cases, compare
from tests.backward import NAMES, bits, kept_gradients, launched, num_that_differ, operands
from tests.cases import BF16, F32, ROUTINGS
from tests.forward import SIZES, dims_of, random_batch
from tests.forward_programs import ROLES, done, load

# Sizes, routings, dtypes of the weights and what the forward keeps: all roles and steps are busy.
BATCHES = (
    (SIZES[3], "invalid", F32, "none"),
    (SIZES[5], "distinct", BF16, "none"),
    (SIZES[6], "skewed", BF16, "gate_up"),
    (SIZES[5], "skewed", F32, "none"),
    (SIZES[5], "distinct", F32, "gate_up"),
)


COMBINE = 8  # the part of cuda/shared/part.h


class Call(NamedTuple):
    """One of BATCHES."""

    dims: Dims
    arrays: list[Any]
    save: str

    def gradients(self, launches: tuple[int, ...] = _ffi.BACKWARD_FUSED) -> Any:
        run = kept_gradients if self.save == "gate_up" else launched
        return run(*self.arrays, dims=self.dims, launches=launches)


def calls() -> list[Call]:
    found = []
    for size, routing, dtype, save in BATCHES:
        batch = random_batch(size, routing)
        found.append(Call(dims_of(batch), operands(batch, dtype), save))
    return found


def results() -> list[np.ndarray]:
    """The bits of every gradient of every one of BATCHES, one batch after another."""
    found = [bits(call.gradients()) for call in calls()]
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
        launches = _ffi.BACKWARD_UNFUSED if seed % 8 == 7 else _ffi.BACKWARD_FUSED
        module.set_delay_seed(seed)
        found = all_calls[b].gradients(launches)
        wrong = [int(n) for n in num_that_differ(bits(found), wants[b])]
        assert wrong == [0] * num_gradients, (
            f"{wrong} values differ: seed {seed}, {BATCHES[b]}, {launches}"
        )
        num_delays += np.asarray(module.count_delays())
    done(runs=int(num_runs), delays=dict(zip(ROLES, num_delays.tolist(), strict=True)))


def tiny() -> None:
    """Small calls of every kind, fused and in parts, each exact: for a checker that slows them."""
    _small_calls((_ffi.BACKWARD_FUSED, _ffi.BACKWARD_UNFUSED), NAMES)


def tiny_without_sums() -> None:
    """The same without the sums, and nobody looks at the results: for a checker that does not see
    what TMA stores of tensors write."""
    unfused = tuple(part for part in _ffi.BACKWARD_UNFUSED if part != COMBINE)
    _small_calls(((sum(unfused),), unfused), ())


def _small_calls(all_launches: Sequence[tuple[int, ...]], names: Sequence[str]) -> None:
    num_calls = 0
    for size, dtype in (((5, 8, 16, 64, 64), F32), ((150, 3, 6, 320, 192), BF16)):
        for routing in sorted(ROUTINGS):
            batch = cases.oracle_of(size, routing)
            right = cases.oracle_results(batch)
            for launches in all_launches:
                results = launched(*operands(batch, dtype), dims=dims_of(batch), launches=launches)
                found = dict(zip(NAMES, jax.block_until_ready(results), strict=True))
                for name in names:
                    compare.assert_exact(found[name], getattr(right, name), name)
                num_calls += 1
    done(calls=num_calls)


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program for program in (delays, tiny, tiny_without_sums)
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    PROGRAMS[name](*arguments)
