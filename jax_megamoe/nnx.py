"""The mixture-of-experts layer as a Flax NNX module: router, experts, losses, load."""

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_megamoe._router_checks import (
    check_mask,
    check_router_config,
    warn_if_weights_are_constant,
)
from jax_megamoe.config import INT32_MAX, MAX_CHOICES, MAX_EXPERTS, MegaMoEConfig, RouterConfig
from jax_megamoe.ops import mega_moe
from jax_megamoe.router import route
from jax_megamoe.sharding import sharded_mega_moe
from jax_megamoe.validation import (
    check_array,
    check_axis_names,
    check_config,
    check_float_dtype,
    check_mesh,
    check_size,
    check_split,
    refuse,
)


class MegaMoEAux(NamedTuple):
    """What a training loop needs of a layer beside its output; over all tokens of the call.

    Attributes:
      load_balance_loss: float32 [], see `jax_megamoe.Routing`; no factor applied.
      sequence_balance_loss, z_loss: float32 [], likewise.
      load: int32 [E], how many choices fell on each expert.
    """

    load_balance_loss: jax.Array
    sequence_balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array


class SelectionBias(nnx.Variable[jax.Array]):
    """What is added to the scores for the choice alone: no parameter, since it has no gradient."""


class MegaMoE(nnx.Module):
    """Router and experts: y_t = sum over the K chosen experts of weight * expert(x_t).

    A call changes no state, so jit, grad, remat, scan over stacked layers and donation treat the
    module like a dense layer. With `expert_axis` it runs expert-parallel on the mesh of
    `jax.set_mesh`, whose axes may be explicit or auto; the expert weights carry that axis as Flax
    `out_sharding`, the router is replicated. The layout of the parameters does not depend on the
    number of devices.

    Parameters:
      router: `param_dtype` [H, E].
      router_bias: `param_dtype` [E], with `router_config.linear_bias`; zeros at first.
      w_gate, w_up: `param_dtype` [E, H, I].
      w_down: `param_dtype` [E, I, H].

    State beside them, with `router_config.selection_bias`:
      selection_bias: a `SelectionBias`, float32 [E], zeros at first. A training loop moves it with
        `jax_megamoe.update_selection_bias` after each step, by the load of that step.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        config: MegaMoEConfig = MegaMoEConfig(),  # noqa: B008 - frozen
        router_config: RouterConfig = RouterConfig(),  # noqa: B008 - frozen
        expert_axis: str | None = None,
        data_axes: tuple[str, ...] = (),
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
          router_config: what the router does, see `jax_megamoe.route` and `jax_megamoe.presets`.
            With K = 1 and weights that are the same for any logits it warns.
          expert_axis: mesh axis that splits the experts, or None for one device.
          data_axes: mesh axes that, with `expert_axis`, split the first dimension of x.
          dtype: of the activations; None keeps the dtype of x.
          param_dtype: of the parameters. The router computes in float32 whatever it is.
          kernel_init: draws one [input, output] matrix: the router's, or one expert's.
          rngs: its `params` stream is used.

        Raises:
          TypeError: an argument of another type or dtype than it may be.
          ValueError: a size that the op does not take, K > E, a router config that does not
            fit E or K, data axes without an expert axis, `config.return_counts`, or axes that do
            not fit the mesh, where one is set.
        """
        sizes = (hidden_size, intermediate_size, num_experts, num_experts_per_token)
        _check_sizes(*sizes)
        choices = ("num_experts_per_token", num_experts_per_token)
        check_router_config("router_config", router_config, num_experts, *choices)
        _check_options(config, dtype, param_dtype, kernel_init, rngs)
        _check_axes(num_experts, expert_axis, data_axes)
        warn_if_weights_are_constant(*choices, "router_config", router_config)
        self.hidden_size = hidden_size
        self.num_experts_per_token = num_experts_per_token
        self.config = config
        self.expert_axis = expert_axis
        self.data_axes = tuple(data_axes)
        self.router_config = router_config
        self.dtype = dtype

        def experts(num_inputs: int, num_outputs: int) -> nnx.Param[jax.Array]:
            def draw(key: jax.Array) -> jax.Array:
                return kernel_init(key, (num_inputs, num_outputs), param_dtype)

            keys = jax.random.split(rngs.params(), num_experts)
            return _variable(nnx.Param, jax.vmap(draw)(keys), spec=(expert_axis, None, None))

        router = kernel_init(rngs.params(), (hidden_size, num_experts), param_dtype)
        self.router = _variable(nnx.Param, router, spec=(None, None))
        if router_config.linear_bias:
            zeros = jnp.zeros((num_experts,), param_dtype)
            self.router_bias = _variable(nnx.Param, zeros, spec=(None,))
        if router_config.selection_bias:
            zeros = jnp.zeros((num_experts,), jnp.float32)
            self.selection_bias = _variable(SelectionBias, zeros, spec=(None,))
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
        if self.router_config.linear_bias:
            bias = self.router_bias[...].astype(jnp.float32)
            logits += jnp.expand_dims(bias, tuple(range(x.ndim - 1)))
        has_selection_bias = self.router_config.selection_bias
        routing = route(
            logits,
            self.num_experts_per_token,
            self.router_config,
            selection_bias=self.selection_bias[...] if has_selection_bias else None,
            mask=mask,
        )
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
        return y, MegaMoEAux(**{name: getattr(routing, name) for name in MegaMoEAux._fields})


def _variable[V: nnx.Variable[jax.Array]](
    kind: type[V], value: jax.Array, spec: tuple[str | None, ...]
) -> V:
    """A variable that carries `spec`, and lies so already when a mesh is set."""
    mesh_is_set = not jax.sharding.get_abstract_mesh().empty
    return kind(value, out_sharding=spec, eager_sharding=mesh_is_set)


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
