"""Calls of both passes over the two GPUs of a process, in which rank 0 stalls."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_megamoe import _ffi
from jax_megamoe.config import Dims, MegaMoEConfig
from tests import layer
from tests.cases import Batch, normal_of

AXIS = "expert"
CONFIG = MegaMoEConfig(backend="cuda")
DISPATCH = (1,)  # the part of cuda/shared/part.h: a rank that does it alone sends no sums


def batch_of(tokens: int) -> Batch:
    """Each token has a route to each rank."""
    batch = normal_of((tokens, 8, 8, 128, 128), "distinct")
    assert tokens % 2 == 0 and all(len(set(ids)) == 8 for ids in batch.expert_idx.tolist())
    return batch


def program(
    batch: Batch, is_backward: bool, of_rank_0: tuple[int, ...] | None, deadline_s: float
) -> tuple[jax.stages.Wrapped, list[Any]]:
    """A call of a pass, of which rank 0 does these launches, or None: it does not come; and its
    arguments."""
    (tokens, hidden), choices = batch.x.shape, batch.expert_idx.shape[1]
    experts, _, inner = batch.w_gate.shape
    dims = Dims(T=tokens // 2, K=choices, E=experts, R=2, H=hidden, I=inner)
    x, ids, w, *weights, dy = map(jnp.asarray, batch)
    arrays = [*([dy] if is_backward else []), x, ids, w, *weights]
    make = _ffi.backward_call if is_backward else _ffi.forward_call
    fused = _ffi.BACKWARD_FUSED if is_backward else _ffi.FUSED

    def call(launches: tuple[int, ...]) -> Callable[..., Any]:
        how = {"config": CONFIG, "axis_name": AXIS, "launches": launches, "deadline_s": deadline_s}
        return lambda *arrays: make(*arrays, dims=dims, **how)

    def nothing(*arrays: Any) -> Any:
        like = jax.eval_shape(call(fused), *arrays)
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)

    def run(*arrays: Any) -> Any:
        stalls = jax.lax.axis_index(AXIS) == 0
        stalled = nothing if of_rank_0 is None else call(of_rank_0)
        return jax.lax.cond(stalls, stalled, call(fused), *arrays)

    spec = PartitionSpec(AXIS)
    how: dict[str, Any] = {"mesh": layer.expert_mesh(2), "in_specs": spec, "out_specs": spec}
    return jax.jit(jax.shard_map(run, check_vma=False, **how)), arrays
