"""The mixture-of-experts layer as a Flax NNX module: router, experts, losses, load."""

import dataclasses
import warnings
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_megamoe.config import INT32_MAX, MAX_CHOICES, MAX_EXPERTS, MegaMoEConfig
from jax_megamoe.ops import mega_moe
from jax_megamoe.router import check_mask, route
from jax_megamoe.sharding import sharded_mega_moe
from jax_megamoe.validation import (
    check_array,
    check_axis_names,
    check_config,
    check_flag,
    check_float_dtype,
    check_mesh,
    check_size,
    check_split,
    refuse,
)


class MegaMoEAux(NamedTuple):
    """What a training loop needs of a layer beside its output; over all tokens of the call.

    Attributes:
      load_balance_loss: float32 [], see `jax_megamoe.router.load_balance_loss`; no factor applied.
      z_loss: float32 [], see `jax_megamoe.router.z_loss`; no factor applied.
      load: int32 [E], how many choices fell on each expert.
    """

    load_balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array


class MegaMoE(nnx.Module):
    """Router and experts: y_t = sum over the K chosen experts of weight * expert(x_t).

    The module has no state but its parameters, so jit, grad, remat, scan over stacked layers and
    donation treat it like a dense layer. With `expert_axis` it runs expert-parallel on the mesh of
    `jax.set_mesh`, whose axes may be explicit or auto; the expert weights carry that axis as Flax
    `out_sharding`, the router is replicated. The layout of the parameters does not depend on the
    number of devices.

    Parameters:
      router: `param_dtype` [H, E].
      w_gate, w_up: `param_dtype` [E, H, I].
      w_down: `param_dtype` [E, I, H].
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        config: MegaMoEConfig = MegaMoEConfig(),  # noqa: B008 - frozen
        expert_axis: str | None = None,
        data_axes: tuple[str, ...] = (),
        renormalize: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = nnx.initializers.lecun_normal(),  # noqa: B008 - pure
        rngs: nnx.Rngs,
    ) -> None:
        """Draws the parameters.

        Args:
          hidden_size: H.
          intermediate_size: I, of one expert.
          num_experts: E, over all ranks.
          num_experts_per_token: K.
          config: the static choices of the op; `return_counts` stays False, since the layer always
            reports the load.
          expert_axis: mesh axis that splits the experts, or None for one device.
          data_axes: mesh axes that, with `expert_axis`, split the first dimension of x.
          renormalize: see `jax_megamoe.router.route`; with K = 1 it warns.
          dtype: of the activations; None keeps the dtype of x.
          param_dtype: of the parameters. The router computes in float32 whatever it is.
          kernel_init: draws one [input, output] matrix: the router's, or one expert's.
          rngs: its `params` stream is used.

        Raises:
          TypeError: an argument of another type or dtype than it may be.
          ValueError: a size that the op does not take, K > E, data axes without an expert axis,
            `config.return_counts`, or axes that do not fit the mesh, where one is set.
        """
        sizes = (hidden_size, intermediate_size, num_experts, num_experts_per_token)
        _check_sizes(*sizes)
        _check_options(config, renormalize, dtype, param_dtype, kernel_init, rngs)
        _check_axes(num_experts, expert_axis, data_axes)
        if num_experts_per_token == 1 and renormalize:
            warnings.warn(
                "num_experts_per_token = 1 with renormalize = True makes every expert weight 1:"
                " the router gets no gradient through the experts. Pass renormalize=False.",
                stacklevel=2,
            )
        self.hidden_size = hidden_size
        self.num_experts_per_token = num_experts_per_token
        self.config = config
        self.expert_axis = expert_axis
        self.data_axes = tuple(data_axes)
        self.renormalize = renormalize
        self.dtype = dtype

        def experts(num_inputs: int, num_outputs: int) -> nnx.Param[jax.Array]:
            def draw(key: jax.Array) -> jax.Array:
                return kernel_init(key, (num_inputs, num_outputs), param_dtype)

            keys = jax.random.split(rngs.params(), num_experts)
            return _param(jax.vmap(draw)(keys), spec=(expert_axis, None, None))

        router = kernel_init(rngs.params(), (hidden_size, num_experts), param_dtype)
        self.router = _param(router, spec=(None, None))
        self.w_gate = experts(hidden_size, intermediate_size)
        self.w_up = experts(hidden_size, intermediate_size)
        self.w_down = experts(intermediate_size, hidden_size)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> tuple[jax.Array, MegaMoEAux]:
        """Routes each token to its experts and sums what they return.

        Args:
          x: floating [..., H] with at least one leading dimension. With `expert_axis` the first is
            a multiple of the number of devices along (*data_axes, expert_axis).
          mask: bool [...], False for padding: such a token gives y = 0 and no statistic counts it,
            whatever its x holds.

        Returns:
          y [..., H] in `dtype`, and the losses and the load of this call.

        Raises:
          TypeError, ValueError: while tracing, for what `route` and the op refuse, and for an x
            that is not floating or whose last dimension is not H.
        """
        check_array("x", x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            refuse(TypeError, "x", f"of dtype {x.dtype}", "of a floating dtype")
        if x.ndim < 1 or x.shape[-1] != self.hidden_size:
            refuse(ValueError, "x", f"of shape {x.shape}", f"[..., H] with H = {self.hidden_size}")
        if self.dtype is not None:
            x = x.astype(self.dtype)
        if mask is not None:
            check_mask(mask, x.shape[:-1])
            x = jnp.where(mask[..., None], x, jnp.zeros_like(x))
        logits = jnp.matmul(
            x.astype(jnp.float32),
            self.router[...].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        routing = route(logits, self.num_experts_per_token, renormalize=self.renormalize, mask=mask)
        operands = (
            x,
            routing.expert_idx,
            routing.expert_weight,
            self.w_gate[...],
            self.w_up[...],
            self.w_down[...],
        )
        options = dataclasses.asdict(self.config)
        if self.expert_axis is None:
            y = mega_moe(*operands, **options)
        else:
            y = sharded_mega_moe(
                *operands, expert_axis=self.expert_axis, data_axes=self.data_axes, **options
            )
        y = cast(jax.Array, y)  # and no counts beside it: config.return_counts is False
        return y, MegaMoEAux(routing.load_balance_loss, routing.z_loss, routing.load)


def _param(value: jax.Array, spec: tuple[str | None, ...]) -> nnx.Param[jax.Array]:
    """A parameter that carries `spec`, and lies so already when a mesh is set."""
    mesh_is_set = not jax.sharding.get_abstract_mesh().empty
    return nnx.Param(value, out_sharding=spec, eager_sharding=mesh_is_set)


def _check_sizes(
    hidden_size: int, intermediate_size: int, num_experts: int, num_experts_per_token: int
) -> None:
    check_size("hidden_size", hidden_size, INT32_MAX)
    check_size("intermediate_size", intermediate_size, INT32_MAX)
    check_size("num_experts", num_experts, MAX_EXPERTS)
    most = min(num_experts, MAX_CHOICES)
    check_size("num_experts_per_token", num_experts_per_token, most)


def _check_options(
    config: MegaMoEConfig,
    renormalize: bool,
    dtype: DTypeLike | None,
    param_dtype: DTypeLike,
    kernel_init: nnx.Initializer,
    rngs: nnx.Rngs,
) -> None:
    check_config(config)
    if config.return_counts:
        refuse(
            ValueError,
            "config.return_counts",
            "True",
            "False; the second result of the layer always holds the load of each expert",
        )
    check_flag("renormalize", renormalize)
    if dtype is not None:
        check_float_dtype("dtype", dtype)
    check_float_dtype("param_dtype", param_dtype)
    if not callable(kernel_init):
        refuse(TypeError, "kernel_init", f"a {type(kernel_init).__name__}", "an nnx.Initializer")
    if not isinstance(rngs, nnx.Rngs):
        refuse(TypeError, "rngs", f"a {type(rngs).__name__}", "a flax.nnx.Rngs")


def _check_axes(num_experts: int, expert_axis: str | None, data_axes: tuple[str, ...]) -> None:
    if expert_axis is None:
        if data_axes:
            refuse(
                ValueError,
                "data_axes",
                f"{data_axes} without an expert_axis",
                "given beside an expert_axis, which may be a mesh axis of size 1",
            )
        return
    check_axis_names(expert_axis, data_axes)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        check_mesh(mesh, expert_axis, data_axes)
        check_split("num_experts", num_experts, mesh, expert_axis)
