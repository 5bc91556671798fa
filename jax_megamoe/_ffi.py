"""The custom calls of the op."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_megamoe.config import Dims, MegaMoEConfig

Array = jax.Array


def forward_call(
    x: Array, *rest: Array, dims: Dims, config: MegaMoEConfig, axis_name: str | None
) -> tuple[Array, Array]:
    results = [_like(x, x.shape, jnp.bfloat16), _like(x, (dims.experts_per_rank,), jnp.int32)]
    y, counts = jax.ffi.ffi_call("jax_megamoe_forward", results)(x, *rest)
    return y, counts


def backward_call(
    dy: Array, *arrays: Array, dims: Dims, config: MegaMoEConfig, axis_name: str | None
) -> tuple[Array, ...]:
    x, _, expert_weight, *weights = arrays
    outs = (x, expert_weight, *(weights if config.trainable_experts else ()))
    results = [_like(x, a.shape, jnp.float32) for a in outs]
    return tuple(jax.ffi.ffi_call("jax_megamoe_backward", results)(dy, *arrays))


def _like(a: Array, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.typeof(a).update(shape=shape, dtype=dtype)
