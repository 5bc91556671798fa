"""The oracle of `tests.cases`, built and judged on the device: for sizes where the host takes long.

It differs in what the host's leaves out. The numbers stand at the far corner of every matrix, so
that an offset that wraps reads something else; the columns of y differ, by powers of two; and tags
stay below 256, so that every expert up to the 512th is exact in bf16.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WEIGHT = 0.125
# Not a power of two: experts 256 apart have different tags.
NUM_TAGS = 251
COLUMN_SCALES = (0.5, 1.0, 2.0, 4.0)


def tags(num_experts: int) -> np.ndarray:
    """float32 [E]: what expert e answers, times the scale of the column."""
    return (np.arange(num_experts) % NUM_TAGS + 1).astype(np.float32)


def operands(ids: np.ndarray, *, experts: int, hidden: int, intermediate: int) -> list[jax.Array]:
    """x, expert_idx, expert_weight, w_gate, w_up, w_down of the oracle; bf16 but for the ids."""
    shapes = _build(ids.shape[0], jnp.asarray(tags(experts)), hidden, intermediate)
    x, *weights = shapes
    return [x, jnp.asarray(ids), jnp.full(ids.shape, WEIGHT, jnp.bfloat16), *weights]


def rows_wrong(y: jax.Array, ids: np.ndarray, *, experts: int) -> list[int]:
    """The first tokens, at most 8, whose row of y is not exactly right."""
    valid = (ids >= 0) & (ids < experts)
    found = np.where(valid, tags(experts)[np.where(valid, ids, 0)], 0)
    sums = np.sum(found * np.float32(WEIGHT), axis=1, dtype=np.float32)
    wrong = np.asarray(_rows_wrong(y, jnp.asarray(sums)))
    return np.flatnonzero(wrong)[:8].tolist()


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _build(tokens: int, tags: jax.Array, hidden: int, intermediate: int) -> list[jax.Array]:
    shape_up = (tags.size, hidden, intermediate)
    shape_down = (tags.size, intermediate, hidden)
    iota = jax.lax.broadcasted_iota
    last_up = (iota(jnp.int32, shape_up, 1) == hidden - 1) & (
        iota(jnp.int32, shape_up, 2) == intermediate - 1
    )
    last_down = iota(jnp.int32, shape_down, 1) == intermediate - 1
    answers = tags[:, None, None] * scales(hidden)[None, None, :] / 32
    last_x = iota(jnp.int32, (tokens, hidden), 1) == hidden - 1
    arrays = [
        jnp.where(last_x, 1.0, 0.0),
        jnp.where(last_up, 32.0, 0.0),
        jnp.where(last_up, 1.0, 0.0),
        jnp.where(last_down, answers, 0.0),
    ]
    return [a.astype(jnp.bfloat16) for a in arrays]


@jax.jit
def _rows_wrong(y: jax.Array, sums: jax.Array) -> Any:
    right = (sums[:, None] * scales(y.shape[1])[None, :]).astype(y.dtype)
    return jnp.any(y != right, axis=1)


def scales(hidden: int) -> jax.Array:
    """float32 [H]: the factor of each column of y."""
    return jnp.asarray(np.resize(np.asarray(COLUMN_SCALES, np.float32), hidden))
