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
# Tags below 16, which codes of FP8 hold.
NUM_FP8_TAGS = 13
COLUMN_SCALES = (0.5, 1.0, 2.0, 4.0)


def tags(num_experts: int, num_tags: int = NUM_TAGS) -> np.ndarray:
    """float32 [E]: what expert e answers, times the scale of the column."""
    return (np.arange(num_experts) % num_tags + 1).astype(np.float32)


def operands(
    ids: np.ndarray, *, experts: int, hidden: int, intermediate: int, num_tags: int = NUM_TAGS
) -> list[jax.Array]:
    """x, expert_idx, expert_weight, w_gate, w_up, w_down of the oracle; bf16 but for the ids."""
    shapes = _build(ids.shape[0], jnp.asarray(tags(experts, num_tags)), hidden, intermediate)
    x, *weights = shapes
    return [x, jnp.asarray(ids), jnp.full(ids.shape, WEIGHT, jnp.bfloat16), *weights]


def rows_wrong(
    y: jax.Array, ids: np.ndarray, *, experts: int, num_tags: int = NUM_TAGS
) -> list[int]:
    """The first tokens, at most 8, whose row of y is not exactly right."""
    valid = (ids >= 0) & (ids < experts)
    found = np.where(valid, tags(experts, num_tags)[np.where(valid, ids, 0)], 0)
    sums = np.sum(found * np.float32(WEIGHT), axis=1, dtype=np.float32)
    wrong = np.asarray(_rows_wrong(y, jnp.asarray(sums)))
    return np.flatnonzero(wrong)[:8].tolist()


@functools.partial(jax.jit, static_argnums=(0, 1))
def cotangent(tokens: int, hidden: int) -> jax.Array:
    """dy, bf16 [T, H]: 1 in the last column."""
    last = jax.lax.broadcasted_iota(jnp.int32, (tokens, hidden), 1) == hidden - 1
    return jnp.where(last, 1.0, 0.0).astype(jnp.bfloat16)


def gradients_wrong(
    gradients: Any, ids: np.ndarray, *, experts: int, num_tags: int = NUM_TAGS
) -> dict[str, list[int]]:
    """Which of dx, dw, dw_gate, dw_up and dw_down of `operands` and `cotangent` are not exact.

    All of them but dw are 0 except in the last column, or in the last row and column. As long as
    rows of an expert times its tag stay below 2^24, float32 sums are exact in any order.

    Returns:
      For each that is wrong the first tokens, or experts, at most 8.
    """
    dx, dw, *weights = gradients
    valid = (ids >= 0) & (ids < experts)
    scale = np.resize(np.asarray(COLUMN_SCALES, np.float32), dx.shape[1])[-1]
    tag = tags(experts, num_tags) * scale
    answer = np.where(valid, tag[np.where(valid, ids, 0)], np.float32(0))
    sum_w = np.bincount(ids[valid], minlength=experts).astype(np.float32) * np.float32(WEIGHT)
    wrong = {"dw": (np.asarray(dw) != answer).any(axis=1)}
    sums = {"dx": np.float32(2 * WEIGHT) * answer.sum(axis=1, dtype=np.float32)}
    sums |= {"dw_gate": sum_w * tag / 32, "dw_up": sum_w * tag, "dw_down": sum_w * 32}
    for (name, right), a in zip(sums.items(), (dx, *weights), strict=True):
        wrong[name] = np.asarray(_wrong_but_last(a, jnp.asarray(right)))
    return {name: np.flatnonzero(w)[:8].tolist() for name, w in wrong.items() if w.any()}


@jax.jit
def _wrong_but_last(a: jax.Array, right: jax.Array) -> Any:
    """Whether a[i] is anything but `right[i]` in its last place and 0 elsewhere; bool [N]."""
    iotas = (jax.lax.broadcasted_iota(jnp.int32, a.shape, d) for d in range(1, a.ndim))
    last = functools.reduce(
        jnp.logical_and, (i == n - 1 for i, n in zip(iotas, a.shape[1:], strict=True))
    )
    places = right.reshape(-1, *[1] * (a.ndim - 1)).astype(a.dtype)
    return jnp.any(a != jnp.where(last, places, jnp.zeros((), a.dtype)), axis=range(1, a.ndim))


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


@jax.jit
def irregular(x: Any, ids: Any, weight: Any, *experts: Any) -> list[Any]:
    """Arrays of the same shapes, full of numbers that stay about 1 after each product."""
    up, _, down = (a.shape[1] ** -0.5 for a in experts)
    scales = (1.0, 0.5, up, up, down)
    filled = [_wave(a, scale) for a, scale in zip((x, weight, *experts), scales, strict=True)]
    return [filled[0], ids, *filled[1:]]


def _wave(like: Any, scale: float) -> Any:
    """Quicker to compile than random numbers, and as good for comparing bits."""
    steps = (1.7, 2.3, 3.1)
    iotas = (jax.lax.broadcasted_iota(jnp.float32, like.shape, d) for d in range(like.ndim))
    angle = sum(step * iota for step, iota in zip(steps, iotas, strict=False))
    return (scale * 2**0.5 * jnp.sin(angle + 0.5)).astype(like.dtype)


def scales(hidden: int) -> jax.Array:
    """float32 [H]: the factor of each column of y."""
    return jnp.asarray(np.resize(np.asarray(COLUMN_SCALES, np.float32), hidden))
