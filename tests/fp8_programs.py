"""The CUDA forward with precision="fp8_block" as the GPU tests call it, and programs around it,
each for a process of its own, as tests.forward_programs:

    python -m tests.fp8_programs NAME ARGUMENTS
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from jax_megamoe import _ffi, quantize_expert_weights
from jax_megamoe.config import MegaMoEConfig
from tests import cases, compare, delays, fp8
from tests.cases import BF16, ROUTINGS, Batch
from tests.forward import bits, dims_of, operands, random_batch
from tests.forward_programs import done, load

# T, K, E, H, I: one tile and many, one column tile and many, columns that end inside of one, half
# tiles, and more K-blocks than a warp loads scales of at once.
SIZES = (
    (1, 1, 1, 128, 128),
    (5, 8, 16, 128, 128),
    (200, 2, 8, 128, 128),
    (777, 3, 8, 256, 384),
    (1000, 4, 4, 384, 128),
    (2048, 8, 128, 512, 256),
    (600, 32, 64, 640, 384),
    (300, 2, 6, 2176, 128),
    (300, 2, 6, 128, 2176),
    (64, 2, 8, 4224, 256),
)
TINY = ((5, 8, 16, 128, 128), (150, 3, 6, 384, 256))
# What keeps all roles busy.
BATCHES = ((SIZES[3], "invalid"), (SIZES[5], "distinct"), (SIZES[6], "skewed"))


@functools.partial(jax.jit, static_argnames=("options",))
def launched(quantized: Any, *tokens: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    config = MegaMoEConfig(backend="cuda", precision="fp8_block")
    how = {"config": config, "axis_name": None, "quantized": quantized, **dict(options)}
    return _ffi.forward_call(*tokens, **how)


def forward(batch: Batch, **options: Any) -> Any:
    """y, counts and what the options ask for, of weights that the device quantises."""
    how = {"dims": dims_of(batch), **options}
    return launched(*quantized_operands(batch), options=tuple(how.items()))


def quantized_operands(batch: Batch) -> list[Any]:
    """The quantised weights, x, expert_idx and expert_weight."""
    *tokens, w_gate, w_up, w_down = operands(batch)
    return [jax.jit(quantize_expert_weights)(w_gate, w_up, w_down), *tokens]


def delayed_calls() -> delays.Calls:
    """Of BATCHES: y and what is kept."""

    def prepared(batch: Batch) -> Any:
        dims, arrays = dims_of(batch), quantized_operands(batch)

        def run(launches: tuple[int, ...]) -> list[jax.Array]:
            how = {"dims": dims, "keep_gate_up": True, "launches": launches}
            y, _, gate_up = launched(*arrays, options=tuple(how.items()))
            return [bits(y), bits(gate_up)]

        return run

    of = {b: prepared(fp8.with_scales(random_batch(*b))) for b in BATCHES}
    return delays.Calls(of, _ffi.FUSED, _ffi.UNFUSED)


def delayed(path: str, num_runs: str) -> None:
    """Runs with delays; the file has the right results."""
    done(**delays.run(delayed_calls(), load(path), int(num_runs)))


def tiny() -> None:
    """Small calls of every kind, fused and in parts, each exact: for a checker that slows them."""
    num_calls = 0
    for tokens, choices, experts, hidden, inner in TINY:
        for routing in sorted(ROUTINGS):
            ids = ROUTINGS[routing](tokens=tokens, choices=choices, experts=experts)
            how: dict[str, Any] = {"hidden": hidden, "intermediate": inner, "dtype": BF16}
            batch = fp8.two_column_oracle(ids, num_experts=experts, **how)
            right = cases.oracle_results(batch).y
            for launches in (_ffi.FUSED, _ffi.UNFUSED):
                y, *_ = forward(batch, launches=launches, keep_gate_up=launches == _ffi.FUSED)
                compare.assert_exact(y, right, "y")
                num_calls += 1
    done(calls=num_calls)


PROGRAMS: dict[str, Callable[..., None]] = {"delayed": delayed, "tiny": tiny}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    PROGRAMS[name](*arguments)
