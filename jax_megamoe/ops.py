"""`mega_moe`: the op, as one device inside `jax.shard_map` sees it, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import _ffi, reference
from jax_megamoe._guard import guard
from jax_megamoe._ids import after_check, canonical_ids, checked
from jax_megamoe.config import Dims, MegaMoEConfig
from jax_megamoe.validation import check_call

Array = jax.Array
ArrayLike = jax.Array | np.ndarray


def mega_moe(
    x: ArrayLike,
    expert_idx: ArrayLike,
    expert_weight: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    *,
    axis_name: str | None = None,
    precision: str = "bf16",
    activation: str = "swiglu",
    backend: str = "auto",
    trainable_experts: bool = True,
    return_counts: bool = False,
    debug_checks: bool = False,
) -> Array | tuple[Array, Array]:
    """What a mixture-of-experts layer does after routing: y_t = sum_k w_tk MLP_{e_tk}(x_t).

    MLP_e(x) = (silu(x Wg_e) * (x Wu_e)) Wd_e. Differentiable once, in reverse mode, in x,
    expert_weight and the three weights; the residuals are the inputs. Dropless at any skew.

    Args:
      x: [..., H] bf16 or float32: the tokens of this device, with any leading dimensions.
      expert_idx: [..., K] of an integer dtype: expert ids over all ranks. An id outside [0, E) is
        no route: it adds 0 and its weight gets gradient 0. Repeated ids of a token add up.
      expert_weight: [..., K] bf16 or float32: the router's weights.
      w_gate, w_up: [E/R, H, I] bf16 or float32: the experts of this rank, input before output.
      w_down: [E/R, I, H], of w_gate's dtype.
      axis_name: the mesh axis over which the experts are split, R = its size, one of 1, 2, 4, 8;
        None: all experts are here. Rank r holds the experts [r E/R, (r + 1) E/R).
      precision, activation, backend, trainable_experts, return_counts, debug_checks: see
        `MegaMoEConfig`.

    Returns:
      y [..., H] in the dtype of x; with return_counts also the number of rows of each of this
      rank's experts over the tokens of all R ranks, int32 [E/R].

    Raises:
      TypeError, ValueError: while tracing, naming the argument, what it was and what it may be.
      NotImplementedError: under vmap, and when the gradient is differentiated again. (jvp raises
        JAX's own TypeError of custom_vjp functions.)
    """
    config = MegaMoEConfig(
        precision=precision,
        activation=activation,
        backend=backend,
        trainable_experts=trainable_experts,
        return_counts=return_counts,
        debug_checks=debug_checks,
    )
    y, counts = apply(config, axis_name, x, expert_idx, expert_weight, w_gate, w_up, w_down)
    return (y, counts) if return_counts else y


def apply(
    config: MegaMoEConfig,
    axis_name: str | None,
    x: ArrayLike,
    expert_idx: ArrayLike,
    expert_weight: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
) -> tuple[Array, Array]:
    """`mega_moe` with its static choices as one value; always returns (y, counts)."""
    dims = check_call(
        x, expert_idx, expert_weight, w_gate, w_up, w_down, config=config, axis_name=axis_name
    )
    if config.debug_checks:
        expert_idx = checked(expert_idx, num_experts=dims.E)
    ids = canonical_ids(expert_idx, num_experts=dims.E)
    arrays = vary_alike(
        jnp.asarray(x).reshape(dims.T, dims.H),
        ids.reshape(dims.T, dims.K),
        jnp.asarray(expert_weight).reshape(dims.T, dims.K),
        *map(jnp.asarray, (w_gate, w_up, w_down)),
    )
    if dims.T == 0:
        # Not x itself: XLA fails on an empty array that passes through a shard_map.
        y, counts = jnp.zeros(x.shape, x.dtype), jnp.zeros((dims.experts_per_rank,), jnp.int32)
        y, counts, *_ = vary_alike(y, counts, *arrays)
    else:
        if config.debug_checks:
            x_rows, ids, w, *weights = arrays
            arrays = [after_check(x_rows, ids), ids, after_check(w, ids), *weights]
        y, counts = _mega_moe(dims, config, axis_name, *arrays)
    return jnp.reshape(y, x.shape), counts


def vary_alike(*arrays: Array) -> list[Array]:
    """Casts every array to vary over all mesh axes that any of them varies over.

    The transpose of that cast sums a replicated weight's gradient over the axes that the tokens
    vary over; without it the gradient would be one device's share.
    """
    axes = sorted({name for a in arrays for name in _varying_axes(a)})
    return [_vary(a, tuple(n for n in axes if n not in _varying_axes(a))) for a in arrays]


def _evaluate(
    dims: Dims, config: MegaMoEConfig, axis_name: str | None, *arrays: Array
) -> tuple[Array, Array]:
    """arrays: x [T, H], expert_idx int32 [T, K], expert_weight [T, K], w_gate, w_up, w_down."""
    x, *rest = guard(*arrays, backend=config.backend)
    forward = _ffi.forward_call if _is_cuda(config) else reference.forward
    y, counts = forward(x, *rest, dims=dims, config=config, axis_name=axis_name)
    return y, counts


def _mega_moe_fwd(dims: Dims, config: MegaMoEConfig, axis_name: str | None, *arrays: Array):
    return _evaluate(dims, config, axis_name, *arrays), arrays


def _mega_moe_bwd(
    dims: Dims,
    config: MegaMoEConfig,
    axis_name: str | None,
    arrays: tuple[Array, ...],
    cotangents: tuple[ArrayLike, object],
):
    _, expert_idx, expert_weight, *weights = arrays
    (dy,) = guard(jnp.asarray(cotangents[0]), backend=config.backend)
    dy = after_check(dy, expert_idx) if config.debug_checks else dy
    backward = _ffi.backward_call if _is_cuda(config) else reference.backward
    dx, dw, *dw_experts = backward(dy, *arrays, dims=dims, config=config, axis_name=axis_name)
    no_gradient = np.zeros(expert_idx.shape, jax.dtypes.float0)
    dw_experts = [d.astype(w.dtype) for d, w in zip(dw_experts, weights, strict=False)]
    if not config.trainable_experts:
        dw_experts = [None] * len(weights)
    return dx, no_gradient, dw.astype(expert_weight.dtype), *dw_experts


_mega_moe = jax.custom_vjp(_evaluate, nondiff_argnums=(0, 1, 2))
_mega_moe.defvjp(_mega_moe_fwd, _mega_moe_bwd)


def _is_cuda(config: MegaMoEConfig) -> bool:
    """Whether the kernels run; "auto" is the reference until the backward kernel exists."""
    return config.backend == "cuda"


def _varying_axes(a: Array) -> frozenset[str]:
    return jax.typeof(a).mat.varying


def _vary(a: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.pcast(a, axes, to="varying") if axes else a
