"""Programs around the CUDA backward, each for a process of its own:

    python -m tests.backward_programs NAME ARGUMENTS

As tests.forward_programs.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_megamoe import _ffi
from tests import cases, compare, delays
from tests.backward import NAMES, bits, kept_gradients, launched, operands
from tests.cases import BF16, F32, ROUTINGS, Size
from tests.forward import SIZES, dims_of, random_batch
from tests.forward_programs import done, load

# Sizes, routings, dtypes of the weights and what the forward keeps: all roles and steps are busy.
BATCHES = (
    (SIZES[3], "invalid", F32, "none"),
    (SIZES[5], "distinct", BF16, "none"),
    (SIZES[6], "skewed", BF16, "gate_up"),
    (SIZES[5], "skewed", F32, "none"),
    (SIZES[5], "distinct", F32, "gate_up"),
)
COMBINE = 8  # the part of cuda/shared/part.h


def delayed_calls() -> delays.Calls:
    """Of BATCHES."""

    def prepared(size: Size, routing: str, dtype: Any, save: str) -> Any:
        batch = random_batch(size, routing)
        dims, arrays = dims_of(batch), operands(batch, dtype)
        run = kept_gradients if save == "gate_up" else launched
        return lambda launches: bits(run(*arrays, dims=dims, launches=launches))

    of = {b: prepared(*b) for b in BATCHES}
    return delays.Calls(of, _ffi.BACKWARD_FUSED, _ffi.BACKWARD_UNFUSED)


def delayed(path: str, num_runs: str) -> None:
    """Runs with delays; the file has the right results."""
    done(**delays.run(delayed_calls(), load(path), int(num_runs)))


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
    program.__name__: program for program in (delayed, tiny, tiny_without_sums)
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    PROGRAMS[name](*arguments)
