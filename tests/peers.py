"""Rows that the ranks of an axis exchange, by the peer probe and by JAX's own collective."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jax_megamoe import _ffi

# A rank that waits in vain says so before a test's time is over.
DEADLINE_S = 20.0
RANK_STRIDE = 1 << 24


def rows(num_ranks: int, N: int, first: int = 0) -> np.ndarray:
    """int32 [R, N]; no two numbers are the same for N < RANK_STRIDE."""
    ranks = np.arange(num_ranks, dtype=np.int32)[:, None]
    return ranks * RANK_STRIDE + np.arange(first, first + N, dtype=np.int32)[None, :]


def on_each_rank(mesh: Mesh, f: Callable[[jax.Array], jax.Array]) -> jax.stages.Wrapped:
    """f of each device's row of an array [devices, ...], its results stacked likewise."""
    spec = PartitionSpec(mesh.axis_names)
    sharded = jax.shard_map(lambda row: f(row[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(sharded)


@functools.cache
def probe(mesh: Mesh, axis: str, configuration: int = 0) -> jax.stages.Wrapped:
    """[devices, N] -> [devices, R, N]: what each device receives."""

    def exchange(row: jax.Array) -> jax.Array:
        return _ffi.peer_probe(
            row, axis_name=axis, configuration=configuration, deadline_s=DEADLINE_S
        )

    return on_each_rank(mesh, exchange)


@functools.cache
def all_gather(mesh: Mesh, axis: str) -> jax.stages.Wrapped:
    """The same by `jax.lax.all_gather`."""
    return on_each_rank(mesh, lambda row: jax.lax.all_gather(row, axis))


def count_wrong(mesh: Mesh, axis: str, num_steps: int) -> jax.stages.Wrapped:
    """[devices, N], rows(R, N) along the axis -> [devices]: how many numbers were not those that a
    step sent, over all steps of a loop.

    One rank is late in each step, in turns, so that the others come early to the next one.
    """

    def run(row: jax.Array) -> jax.Array:
        num_ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
        first = jnp.asarray(rows(num_ranks, row.size))

        def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            wrong, busy = carry
            busy = jax.lax.cond(i % num_ranks == rank, _work, lambda b: b, busy)
            mine = row + i + jnp.isnan(busy[0, 0]).astype(jnp.int32)
            received = _ffi.peer_probe(mine, axis_name=axis, deadline_s=DEADLINE_S)
            return wrong + jnp.sum(received != first + i, dtype=jnp.int32), busy

        busy = jnp.ones((512, 512), jnp.float32) + 0.0 * row[0].astype(jnp.float32)
        return jax.lax.fori_loop(0, num_steps, step, (0 * row[0], busy))[0]

    return on_each_rank(mesh, run)


def _work(busy: jax.Array) -> jax.Array:
    """Some 50 us of an H200."""
    for _ in range(4):
        busy = jnp.tanh(busy @ busy)
    return busy
