"""`mega_moe`: the op, as one device inside `jax.shard_map` sees it, and its gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name_fwd

from jax_megamoe import _backend
from jax_megamoe._guard import guard
from jax_megamoe._ids import after_check, canonical_ids, checked
from jax_megamoe._quantized_checks import check_fp8_kernels, check_quantized
from jax_megamoe.config import POOL_FACTOR, ClampedSwiGLU, Dims, MegaMoEConfig
from jax_megamoe.quantization import QuantizedExperts, quantize_expert_weights
from jax_megamoe.validation import WEIGHTS, check_call, given_biases

Array = jax.Array
ArrayLike = jax.Array | np.ndarray

# The name of what save="gate_up" keeps, for the policies of jax.checkpoint.
GATE_UP_NAME = "megamoe_gate_up"


def mega_moe(
    x: ArrayLike,
    expert_idx: ArrayLike,
    expert_weight: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    *,
    b_gate: ArrayLike | None = None,
    b_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    quantized_experts: QuantizedExperts | None = None,
    axis_name: str | None = None,
    precision: str = "bf16",
    activation: str | ClampedSwiGLU = "swiglu",
    backend: str = "auto",
    save: str = "none",
    combine_dtype: str = "float32",
    pool_factor: float = POOL_FACTOR,
    trainable_experts: bool = True,
    return_counts: bool = False,
    debug_checks: bool = False,
) -> Array | tuple[Array, Array]:
    """What a mixture-of-experts layer does after routing: y_t = sum_k w_tk MLP_{e_tk}(x_t).

    MLP_e(x) = (silu(g) * u) Wd_e + bd_e with g = x Wg_e + bg_e and u = x Wu_e + bu_e, or another
    `activation` of g and u. Differentiable once, in reverse mode, in x, expert_weight, weights and
    biases; the residuals are the inputs and what `save` adds. Dropless at any skew.

    Args:
      x: [..., H] bf16 or float32: the tokens of this device, with any leading dimensions.
      expert_idx: [..., K] of an integer dtype: expert ids over all ranks. An id outside [0, E) is
        no route: it adds 0 and its weight gets gradient 0. Repeated ids of a token add up.
      expert_weight: [..., K] bf16 or float32: the router's weights.
      w_gate, w_up: [E/R, H, I] bf16 or float32: the experts of this rank, input before output.
      w_down: [E/R, I, H], of w_gate's dtype.
      b_gate, b_up: [E/R, I] bf16 or float32, of one dtype, which may be another than the weights':
        the experts' biases. b_down: [E/R, H], likewise. All three or none. They are added to
        float32 products and not rounded before.
      quantized_experts: with precision="fp8_block", of `quantize_expert_weights(w_gate, w_up,
        w_down)`, so that several calls of a step share it; products take these weights, gradients
        go to w_gate, w_up and w_down all the same. None: each pass quantises for itself.
      axis_name: the mesh axis over which the experts are split, R = its size, one of 1, 2, 4, 8;
        None: all experts are here. Rank r holds the experts [r E/R, (r + 1) E/R).
      precision, activation, backend, save, combine_dtype, pool_factor, trainable_experts,
        return_counts, debug_checks: see `MegaMoEConfig`.

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
        save=save,
        combine_dtype=combine_dtype,
        pool_factor=pool_factor,
        trainable_experts=trainable_experts,
        return_counts=return_counts,
        debug_checks=debug_checks,
    )
    biases = given_biases(b_gate, b_up, b_down)
    arrays = (x, expert_idx, expert_weight, w_gate, w_up, w_down, *biases)
    y, counts = apply(config, axis_name, *arrays, quantized=quantized_experts)
    return (y, counts) if return_counts else y


def apply(
    config: MegaMoEConfig,
    axis_name: str | None,
    *arrays: ArrayLike,
    quantized: QuantizedExperts | None,
    kept: Sequence[Array] = (),
) -> tuple[Array, Array]:
    """`mega_moe` with its static choices as one value; always returns (y, counts).

    Args:
      arrays: x, expert_idx, expert_weight, w_gate, w_up, w_down and, with biases, these.
      quantized: the quantized_experts of `mega_moe`.
      kept: what `apply_keeping` returned for the same arrays; the backward then takes it from there
        and the forward keeps nothing again.
    """

    def op(dims: Dims, quantized: QuantizedExperts | None, *arrays: Array) -> tuple[Array, ...]:
        return _mega_moe(dims, config, axis_name, tuple(kept), quantized, *arrays)

    y, counts = _on_rows(op, config, axis_name, quantized, *arrays)
    return y, counts


def apply_keeping(
    config: MegaMoEConfig,
    axis_name: str | None,
    *arrays: ArrayLike,
    quantized: QuantizedExperts | None,
) -> tuple[Array, Array, tuple[Array, ...]]:
    """`apply` for a caller with a derivative of its own: not differentiable.

    Returns y, counts, and what the backward wants kept beside the arrays: () or, with
    config.save = "gate_up" and T > 0, (g and u, [P, 2I]).
    """

    def op(dims: Dims, quantized: QuantizedExperts | None, *arrays: Array) -> tuple[Array, ...]:
        keep = config.save == "gate_up"
        return _forward(dims, config, axis_name, quantized, *arrays, keep=keep)

    y, counts, *kept = _on_rows(op, config, axis_name, quantized, *arrays)
    return y, counts, tuple(kept)


def _on_rows(
    op: Callable[..., tuple[Array, ...]],
    config: MegaMoEConfig,
    axis_name: str | None,
    quantized: QuantizedExperts | None,
    x: ArrayLike,
    expert_idx: ArrayLike,
    expert_weight: ArrayLike,
    *experts: ArrayLike,
) -> tuple[Array, ...]:
    """Judges the arguments and gives them to op(dims, quantized, *arrays) as rows [T, ...]; y as x
    was.
    """
    dims = check_call(x, expert_idx, expert_weight, *experts, config=config, axis_name=axis_name)
    check_fp8_kernels(config, expert_bias=len(experts) > len(WEIGHTS))
    check_quantized(quantized, experts[0], config)
    if config.debug_checks:
        expert_idx = checked(expert_idx, num_experts=dims.E)
    ids = canonical_ids(expert_idx, num_experts=dims.E)
    quantized, *arrays = vary_alike(
        quantized,
        jnp.asarray(x).reshape(dims.T, dims.H),
        ids.reshape(dims.T, dims.K),
        jnp.asarray(expert_weight).reshape(dims.T, dims.K),
        *experts,
    )
    if dims.T == 0:
        # Not x itself: XLA fails on an empty array that passes through a shard_map.
        y, counts = jnp.zeros(x.shape, x.dtype), jnp.zeros((dims.experts_per_rank,), jnp.int32)
        return tuple(vary_alike(y, counts, *arrays)[:2])
    if config.debug_checks:
        x_rows, ids, w, *rest = arrays
        arrays = [after_check(x_rows, ids), ids, after_check(w, ids), *rest]
    y, *rest = op(dims, quantized, *arrays)
    return jnp.reshape(y, x.shape), *rest


def vary_alike(*trees: Any) -> list[Any]:
    """Casts every array to vary over all mesh axes that any of them varies over.

    The transpose of that cast sums a replicated weight's gradient over the axes that the tokens
    vary over; without it the gradient would be one device's share.
    """
    arrays, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, trees))
    axes = sorted({name for a in arrays for name in _varying_axes(a)})
    cast = [_vary(a, tuple(n for n in axes if n not in _varying_axes(a))) for a in arrays]
    return [*jax.tree.unflatten(structure, cast)]


def name_kept(kept: Sequence[Array]) -> tuple[Array, ...]:
    """What a custom_vjp's forward rule keeps, named for the policies of jax.checkpoint."""
    return tuple(checkpoint_name_fwd(a, GATE_UP_NAME) for a in kept)


def _forward(
    dims: Dims,
    config: MegaMoEConfig,
    axis_name: str | None,
    quantized: QuantizedExperts | None,
    *arrays: Array,
    keep: bool,
) -> tuple[Array, ...]:
    """arrays: x [T, H], expert_idx int32 [T, K], expert_weight [T, K], the experts' weights and, if
    they have any, biases.

    Returns y, counts and, with keep, g and u, [P, 2I], in the order of the backend.
    """
    given, structure = jax.tree.flatten((quantized, *arrays))
    quantized, *rows = jax.tree.unflatten(structure, guard(*given, backend=config.backend))
    return _backend.forward(
        *rows,
        dims=dims,
        config=config,
        axis_name=axis_name,
        quantized=_for_products(config, quantized, rows),
        keep_gate_up=keep,
    )


def _for_products(
    config: MegaMoEConfig, quantized: QuantizedExperts | None, arrays: Sequence[Array]
) -> QuantizedExperts | None:
    """The quantised weights that a pass multiplies: those given, or of the arrays' own weights."""
    if config.precision != "fp8_block" or quantized is not None:
        return quantized
    return quantize_expert_weights(*arrays[3:6])


def _evaluate(
    dims: Dims,
    config: MegaMoEConfig,
    axis_name: str | None,
    kept: tuple[Array, ...],
    quantized: QuantizedExperts | None,
    *arrays: Array,
) -> tuple[Array, ...]:
    return _forward(dims, config, axis_name, quantized, *arrays, keep=False)


def _mega_moe_fwd(
    dims: Dims,
    config: MegaMoEConfig,
    axis_name: str | None,
    kept: tuple[Array, ...],
    quantized: QuantizedExperts | None,
    *arrays: Array,
):
    keep = config.save == "gate_up" and not kept
    y, counts, *gate_up = _forward(dims, config, axis_name, quantized, *arrays, keep=keep)
    return (y, counts), (arrays, quantized, name_kept(gate_up) if keep else kept)


def _mega_moe_bwd(
    dims: Dims,
    config: MegaMoEConfig,
    axis_name: str | None,
    residuals: tuple[tuple[Array, ...], QuantizedExperts | None, tuple[Array, ...]],
    cotangents: tuple[ArrayLike, object],
):
    arrays, quantized, kept = residuals
    _, expert_idx, expert_weight, *experts = arrays
    (dy,) = guard(jnp.asarray(cotangents[0]), backend=config.backend)
    dy = after_check(dy, expert_idx) if config.debug_checks else dy
    gate_up = kept[0] if kept else None
    dx, dw, *d_experts = _backend.backward(
        dy,
        *arrays,
        dims=dims,
        config=config,
        axis_name=axis_name,
        quantized=_for_products(config, quantized, arrays),
        gate_up=gate_up,
    )
    no_gradient = np.zeros(expert_idx.shape, jax.dtypes.float0)
    if not config.trainable_experts:
        d_experts = [None] * len(experts)
    return None, None, dx, no_gradient, dw.astype(expert_weight.dtype), *d_experts


_mega_moe = jax.custom_vjp(_evaluate, nondiff_argnums=(0, 1, 2))
_mega_moe.defvjp(_mega_moe_fwd, _mega_moe_bwd)


def _varying_axes(a: Array) -> frozenset[str]:
    return jax.typeof(a).mat.varying


def _vary(a: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.pcast(a, axes, to="varying") if axes else a
