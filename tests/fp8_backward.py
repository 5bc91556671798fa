"""The CUDA backward with precision="fp8_block" as the GPU tests call it, and programs around it,
each for a process of its own, as tests.forward_programs:

    python -m tests.fp8_backward NAME ARGUMENTS
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_megamoe import _ffi, quantize_expert_weights
from jax_megamoe.config import MegaMoEConfig
from tests import backward, cases, compare, delays, fp8, fp8_programs
from tests.backward import bits
from tests.cases import BF16, F32, ROUTINGS, Batch, Results
from tests.forward import dims_of, random_batch
from tests.forward_programs import done, load

# T, K, E, H, I: as fp8_programs.SIZES, with fewer weights, whose gradients are looked at.
SIZES = (
    (1, 1, 1, 128, 128),
    (5, 8, 16, 128, 128),
    (200, 2, 8, 128, 128),
    (777, 3, 8, 256, 384),
    (1000, 4, 4, 384, 128),
    (2048, 8, 32, 256, 256),
    (600, 32, 64, 128, 384),
    (300, 2, 6, 2176, 128),
    (300, 2, 6, 128, 2176),
    (64, 2, 2, 4224, 256),
)
# Of the weights, and whether g and u are kept: half of what there is, both of each.
KINDS = ((BF16, False), (F32, True))
# Sizes, routings and kinds that keep all roles and steps busy.
BATCHES = (
    (SIZES[3], "invalid", (F32, False)),
    (SIZES[5], "distinct", (BF16, True)),
    (SIZES[6], "skewed", (BF16, False)),
    (SIZES[5], "skewed", (F32, True)),
)
# Up to this number a code holds the tag of an expert.
MAX_TAGS = 16


@functools.partial(jax.jit, static_argnames=("trainable", "options"))
def launched(
    quantized: Any,
    gate_up: Any,
    *arrays: Any,
    trainable: bool = True,
    options: tuple[tuple[str, Any], ...],
) -> Any:
    config = MegaMoEConfig(backend="cuda", precision="fp8_block", trainable_experts=trainable)
    how = {"config": config, "axis_name": None, "gate_up": gate_up, "quantized": quantized}
    return _ffi.backward_call(*arrays, **how, **dict(options))


class Call:
    """The operands of a batch's backward on the device, of weights that it quantises; with `keep`
    it takes g and u of a forward."""

    def __init__(self, batch: Batch, weight_dtype: np.dtype = BF16, keep: bool = False) -> None:
        self.dims = dims_of(batch)
        self.arrays = backward.operands(batch, weight_dtype)
        self.quantized = jax.jit(quantize_expert_weights)(*backward.operands(batch)[4:])
        self.keep = keep

    def gradients(self, **options: Any) -> Any:
        """As `_ffi.backward_call` gives them; options as it has them, and trainable."""
        trainable = {"trainable": options.pop("trainable")} if "trainable" in options else {}
        gate_up = None
        if self.keep:
            how = (("dims", self.dims), ("keep_gate_up", True))
            _, _, gate_up = fp8_programs.launched(self.quantized, *self.arrays[1:4], options=how)
        how = (("dims", self.dims), *options.items())
        return launched(self.quantized, gate_up, *self.arrays, **trainable, options=how)


def gradients(batch: Batch, kind: tuple[np.dtype, bool] = KINDS[0], **options: Any) -> Any:
    """As NumPy arrays."""
    return [np.asarray(a) for a in Call(batch, *kind).gradients(**options)]


def oracle_and_results(size: tuple[int, ...], routing: str | np.ndarray) -> tuple[Batch, Results]:
    """An oracle whose tags the codes hold, and its right values."""
    tokens, choices, experts, hidden, intermediate = size
    ids = routing
    if isinstance(routing, str):
        ids = ROUTINGS[routing](tokens=tokens, choices=min(choices, experts), experts=experts)
    if experts <= MAX_TAGS:
        batch = cases.oracle_of(size, np.asarray(ids))
        return batch, cases.oracle_results(batch)
    how = {"hidden": hidden, "intermediate": intermediate, "dtype": BF16}
    batch = fp8.two_column_oracle(np.asarray(ids), num_experts=experts, **how)
    return batch, fp8.two_column_results(batch)


def delayed_calls() -> delays.Calls:
    """Of BATCHES."""

    def prepared(size: tuple[int, ...], routing: str, kind: tuple[np.dtype, bool]) -> Any:
        call = Call(fp8.with_scales(random_batch(size, routing)), *kind)
        return lambda launches: bits(call.gradients(launches=launches))

    of = {b: prepared(*b) for b in BATCHES}
    return delays.Calls(of, _ffi.BACKWARD_FUSED, _ffi.BACKWARD_UNFUSED)


def delayed(path: str, num_runs: str) -> None:
    """Runs with delays; the file has the right results."""
    done(**delays.run(delayed_calls(), load(path), int(num_runs)))


def tiny() -> None:
    """Small calls of every kind, fused and in parts, each exact: for a checker that slows them."""
    num_calls = 0
    for size, kind in zip(fp8_programs.TINY, KINDS, strict=True):
        for routing in sorted(ROUTINGS):
            batch, right = oracle_and_results(size, routing)
            for launches in (_ffi.BACKWARD_FUSED, _ffi.BACKWARD_UNFUSED):
                found = gradients(batch, kind, launches=launches)
                for name, a in zip(backward.NAMES, found, strict=True):
                    compare.assert_exact(a, getattr(right, name), name)
                num_calls += 1
    done(calls=num_calls)


PROGRAMS: dict[str, Callable[..., None]] = {"delayed": delayed, "tiny": tiny}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    PROGRAMS[name](*arguments)
