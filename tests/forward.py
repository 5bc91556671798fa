"""The CUDA forward as the GPU tests call it: compiled functions, sizes, random batches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import _ffi, mega_moe
from jax_megamoe.config import TILE_ROWS, ClampedSwiGLU, Dims, MegaMoEConfig
from jax_megamoe.plan import forward_steps, make_plan
from tests.cases import Batch, Size, normal_of

# T, K, E, H, I: one tile and many, one column tile and many, half tiles, more routes than a batch.
SIZES = (
    (1, 1, 1, 64, 64),
    (5, 8, 16, 64, 64),
    (200, 2, 8, 128, 128),
    (777, 3, 8, 256, 192),
    (1000, 4, 4, 320, 64),
    (2048, 8, 128, 512, 256),
    (600, 32, 64, 448, 320),
    (300, 2, 6, 2112, 128),
)


@functools.partial(jax.jit, static_argnames=("options",))
def forward(*arrays: Any, options: tuple[tuple[str, Any], ...] = ()) -> Any:
    return mega_moe(*arrays, backend="cuda", return_counts=True, **dict(options))


@functools.partial(jax.jit, static_argnames=("dims", "activation", "launches"))
def launched(
    *arrays: Any,
    dims: Dims,
    activation: str | ClampedSwiGLU = "swiglu",
    launches: tuple[int, ...],
) -> Any:
    config = MegaMoEConfig(backend="cuda", activation=activation)
    return _ffi.forward_call(*arrays, dims=dims, config=config, axis_name=None, launches=launches)


def one_rank(*, T: int, K: int, E: int, H: int, I: int) -> Dims:
    return Dims(T=T, K=K, E=E, R=1, H=H, I=I)


def dims_of(batch: Batch) -> Dims:
    (tokens, hidden), choices = batch.x.shape, batch.expert_idx.shape[1]
    experts, _, intermediate = batch.w_gate.shape
    return one_rank(T=tokens, K=choices, E=experts, H=hidden, I=intermediate)


def kinds_of_whole_trace(records: Any, batch: Batch) -> np.ndarray:
    """What each record of a forward's trace is of, which has one for every item."""
    dims = dims_of(batch)
    steps = forward_steps(dims)
    num_tiles = make_plan(batch.expert_idx[None], dims, 0, steps).expert_start[-1] // TILE_ROWS
    count, *_ = np.asarray(records)[0]
    start, end, _, kind = np.asarray(records).view(np.uint32)[1 : 1 + count].T
    assert count < records.shape[0] and (end - start < 10**9).all()
    for s, part in ((0, 2), (1, 4)):  # gate_up and down, see cuda/shared/part.h
        assert (kind == part).sum() == num_tiles * steps[s].tiles_n
    return kind


def operands(batch: Batch) -> list[Any]:
    return [jnp.asarray(a) for a in batch[:6]]


@functools.lru_cache(maxsize=4)
def random_batch(size: Size, routing: str, seed: int = 0) -> Batch:
    """Drawn once for the tests that use it in a row, so its arrays are read-only."""
    batch = normal_of(size, routing, seed=seed)
    for a in batch:
        a.flags.writeable = False
    return batch


def poison_free_memory() -> None:
    """Leaves most of the free device memory full of NaN, for the next call's pools."""
    stats = jax.devices()[0].memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    chunks = [jnp.full(2**28, jnp.nan, jnp.float32) for _ in range(int(0.8 * free) // 2**30)]
    for chunk in jax.block_until_ready(chunks):
        chunk.delete()


@jax.jit
def bits(y: jax.Array) -> jax.Array:
    """A bf16 array as uint16, so that equal means equal bits."""
    return jax.lax.bitcast_convert_type(y, jnp.uint16)


@jax.jit
def num_rows_that_differ(y: jax.Array, want: jax.Array) -> jax.Array:
    """Rows of y [T, H] in which a bit differs; judged where the arrays are."""
    return jnp.sum(jnp.any(bits(y) != bits(want), axis=1), dtype=jnp.int32)
