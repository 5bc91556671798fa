"""The CUDA forward with precision="fp8_block" as the GPU tests call it, and a program of its own:
python -m tests.fp8_programs delays FILE RUNS, which says what it counted in its last line.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import _ffi, quantize_expert_weights
from jax_megamoe.config import Dims, MegaMoEConfig
from tests import fp8
from tests.cases import Batch
from tests.forward import bits, dims_of, operands, random_batch
from tests.forward_programs import ROLES, done, load

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


@functools.cache
def prepared(which: int) -> tuple[Dims, list[Any]]:
    batch = fp8.with_scales(random_batch(*BATCHES[which]))
    return dims_of(batch), quantized_operands(batch)


def results_of(which: int, **options: Any) -> list[jax.Array]:
    """The bits of y and of what is kept."""
    dims, arrays = prepared(which)
    how = {"dims": dims, "keep_gate_up": True, **options}
    y, _, gate_up = launched(*arrays, options=tuple(how.items()))
    return [bits(y), bits(gate_up)]


def results() -> list[np.ndarray]:
    """Of all BATCHES."""
    return [np.asarray(a) for which in range(len(BATCHES)) for a in results_of(which)]


def delays(path: str, num_runs: str) -> None:
    """Runs with seeded delays in every role, each bitwise equal to the results in the file."""
    module, reason = _ffi.extension()
    assert module is not None, reason
    saved = [jnp.asarray(a) for a in load(path)]
    num_delays = np.zeros(len(ROLES), np.int64)
    # Seed 0 has no delays.
    for seed in range(int(num_runs) + 1):
        which = seed % len(BATCHES)
        launches = _ffi.UNFUSED if seed % 8 == 7 else _ffi.FUSED
        module.set_delay_seed(seed)
        found, want = results_of(which, launches=launches), saved[2 * which : 2 * which + 2]
        wrong = [int(jnp.sum(a != b)) for a, b in zip(found, want, strict=True)]
        assert wrong == [0, 0], f"{wrong} values differ: seed {seed}, {BATCHES[which]}"
        num_delays += np.asarray(module.count_delays())
    done(runs=int(num_runs), delays=dict(zip(ROLES, num_delays.tolist(), strict=True)))


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    {"delays": delays}[name](*arguments)
