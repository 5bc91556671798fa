"""Expert ids: their canonical form, and the debug check that refuses those out of range."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def canonical_ids(expert_idx: Array | np.ndarray, *, num_experts: int) -> Array:
    """int32 ids, -1 for every id outside [0, E).

    The comparison happens in the given dtype, and in NumPy for a NumPy array, so that a wide id
    such as 2**32 + 3 cannot wrap into range.
    """
    xp = np if isinstance(expert_idx, np.ndarray) else jnp
    last = np.asarray(min(num_experts - 1, np.iinfo(expert_idx.dtype).max), expert_idx.dtype)
    in_range = (expert_idx >= 0) & (expert_idx <= last)
    return jnp.asarray(xp.where(in_range, expert_idx.astype(np.int32), np.int32(-1)))


def checked(expert_idx: Array | np.ndarray, *, num_experts: int) -> Array | np.ndarray:
    """expert_idx, once the host has found every id to be -1 or in [0, E).

    Inside shard_map every device has the ids of all devices checked, so all raise together: one
    that raised alone would leave the others waiting for it in a collective. For the same reason
    whatever else the op exchanges must come `after_check`.

    Raises (at run time; for a NumPy array while tracing):
      ValueError: naming the first such token, slot and id. (JAX wraps it in a JaxRuntimeError.)
    """
    if isinstance(expert_idx, np.ndarray):
        _check(expert_idx[None], num_experts=num_experts, mesh_shape={})
        return expert_idx
    mesh = jax.sharding.get_abstract_mesh()
    shape = {name: mesh.shape[name] for name in mesh.manual_axes}
    of_all = _gather(expert_idx, tuple(shape)) if shape else expert_idx[None]
    check = functools.partial(_check, num_experts=num_experts, mesh_shape=shape)
    result = jax.typeof(of_all).update(shape=(), dtype=np.dtype(bool))
    return jnp.where(jax.pure_callback(check, result, of_all), expert_idx, -1)


def after_check(a: Array, ids: Array) -> Array:
    """a, which the compiler can use only when the canonical ids of `checked` ones are there.

    A dependence through values: a barrier would not outlive the compiler.
    """
    return jnp.where(ids.reshape(-1)[0] >= -1, a, 0)


def _gather(expert_idx: Array, axes: Sequence[str]) -> Array:
    """[num_devices, ..., K], devices in the order of the axes."""
    varying = jax.typeof(expert_idx).mat.varying
    missing = tuple(name for name in axes if name not in varying)
    if missing:
        expert_idx = jax.lax.pcast(expert_idx, missing, to="varying")
    return jax.lax.all_gather(expert_idx, axes)


def _check(
    of_all: Array | np.ndarray, *, num_experts: int, mesh_shape: dict[str, int]
) -> np.ndarray:
    """Raises ValueError for the first wrong id of [num_devices, ..., K]; returns True."""
    ids = np.asarray(of_all)
    ids = ids.reshape(len(ids), -1, ids.shape[-1])
    bad = np.argwhere((ids < -1) | (ids >= num_experts))
    if len(bad):
        device, token, slot = bad[0].tolist()
        indices = np.unravel_index(device, tuple(mesh_shape.values()))
        place = "".join(f", {n} {int(i)}" for n, i in zip(mesh_shape, indices, strict=True))
        raise ValueError(
            f"expert_idx: was {ids[device, token, slot]} at token {token}, slot {slot}{place} "
            f"({len(bad)} such ids); it may be -1 (no route) or in [0, {num_experts})"
        )
    return np.array(True)
