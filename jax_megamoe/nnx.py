"""The mixture-of-experts layer as a Flax NNX module: router, experts, losses, load."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_megamoe import _layer
from jax_megamoe._layer import MegaMoEAux as MegaMoEAux
from jax_megamoe._layer_checks import check_layer
from jax_megamoe.config import MegaMoEConfig, RouterConfig
from jax_megamoe.quantization import QuantizedExperts
from jax_megamoe.validation import refuse


class SelectionBias(nnx.Variable[jax.Array]):
    """What is added to the scores for the choice alone: no parameter, since it has no gradient."""


class MegaMoE(nnx.Module):
    """Router and experts: y_t = sum over the K chosen experts of weight * expert(x_t).

    An expert is a gated MLP with the activation of the config, with `expert_bias` also with biases.
    With `shared_intermediate_size` every token goes through a dense one too, without biases, whose
    result is added; the router's scale does not reach it.

    A call changes no state, so jit, grad, remat, scan over stacked layers and donation treat the
    module like a dense layer. With `expert_axis` it runs expert-parallel on the mesh of
    `jax.set_mesh`, whose axes may be explicit or auto; the experts' parameters carry that axis as
    Flax `out_sharding`, everything else is replicated. The layout of the parameters does not depend
    on the number of devices. `jax_megamoe.linen.MegaMoE` is the same layer for Flax Linen.

    Parameters:
      router: `param_dtype` [H, E].
      router_bias: `param_dtype` [E], with `router_config.linear_bias`; zeros at first.
      w_gate, w_up: `param_dtype` [E, H, I].
      w_down: `param_dtype` [E, I, H].
      b_gate, b_up: `param_dtype` [E, I], with `expert_bias`; zeros at first.
      b_down: `param_dtype` [E, H], likewise.
      shared_w_gate, shared_w_up: `param_dtype` [H, S], with `shared_intermediate_size`.
      shared_w_down: `param_dtype` [S, H], likewise.
      shared_router: `param_dtype` [H, 1], with `shared_gate`.

    State beside them, with `router_config.selection_bias`:
      selection_bias: a `SelectionBias`, float32 [E], zeros at first. A training loop moves it with
        `jax_megamoe.update_selection_bias` after each step, by the load of that step.
    """

    router: nnx.Param[jax.Array]
    router_bias: nnx.Param[jax.Array]
    selection_bias: SelectionBias
    w_gate: nnx.Param[jax.Array]
    w_up: nnx.Param[jax.Array]
    w_down: nnx.Param[jax.Array]
    b_gate: nnx.Param[jax.Array]
    b_up: nnx.Param[jax.Array]
    b_down: nnx.Param[jax.Array]
    shared_w_gate: nnx.Param[jax.Array]
    shared_w_up: nnx.Param[jax.Array]
    shared_w_down: nnx.Param[jax.Array]
    shared_router: nnx.Param[jax.Array]

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_token: int,
        *,
        config: MegaMoEConfig = MegaMoEConfig(),  # noqa: B008 - frozen
        router_config: RouterConfig = RouterConfig(),  # noqa: B008 - frozen
        shared_intermediate_size: int = 0,
        shared_gate: bool = False,
        expert_bias: bool = False,
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
            reports the load. Of the shared experts it says the activation and the precision alone.
          router_config: what the router does, see `jax_megamoe.route` and `jax_megamoe.presets`.
            With K = 1 and weights that are the same for any logits it warns.
          shared_intermediate_size: S, of all shared experts side by side; 0 for none. DeepSeek-V3's
            is n_shared_experts * moe_intermediate_size, Qwen2-MoE's
            shared_expert_intermediate_size.
          shared_gate: multiply the shared experts' result by sigmoid(x shared_router), as Qwen2-MoE
            does.
          expert_bias: the experts' three products have biases, as gpt-oss's.
          expert_axis: mesh axis that splits the experts, or None for one device.
          data_axes: mesh axes that, with `expert_axis`, split the first dimension of x.
          dtype: of the activations; None keeps the dtype of x.
          param_dtype: of the parameters. The router computes in float32 whatever it is.
          kernel_init: draws one [input, output] matrix: the router's, or one expert's.
          rngs: its `params` stream is used.

        Raises:
          TypeError: an argument of another type or dtype than it may be.
          ValueError: a size that the op does not take, K > E, a router config that does not
            fit E or K, a gate without shared experts, data axes without an expert axis,
            `config.return_counts`, or axes that do not fit the mesh, where one is set.
        """
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_experts = num_experts
        self.num_experts_per_token = num_experts_per_token
        self.config = config
        self.router_config = router_config
        self.shared_intermediate_size = shared_intermediate_size
        self.shared_gate = shared_gate
        self.expert_bias = expert_bias
        self.expert_axis = expert_axis
        self.data_axes = data_axes
        self.dtype = dtype
        self.param_dtype = param_dtype
        check_layer(self, kernel_init)
        if not isinstance(rngs, nnx.Rngs):
            refuse(TypeError, "rngs", f"a {type(rngs).__name__}", "a flax.nnx.Rngs")
        # They lie as their specs say from the start where a mesh is set.
        mesh_is_set = not jax.sharding.get_abstract_mesh().empty
        for v in _layer.variables_of(self):
            value = v.draw(rngs.params(), kernel_init) if v.is_drawn else v.zeros()
            kind: Any = SelectionBias if v.is_state else nnx.Param
            setattr(self, v.name, kind(value, out_sharding=v.spec, eager_sharding=mesh_is_set))

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        *,
        quantized_experts: QuantizedExperts | None = None,
    ) -> tuple[jax.Array, MegaMoEAux]:
        """Routes each token to its experts and sums what they return.

        Args:
          x: floating [..., H] with at least one leading dimension. With `expert_axis` the first is
            a multiple of the number of devices along (*data_axes, expert_axis).
          mask: bool [...], False for padding: such a token gives y = 0 and no statistic counts it,
            whatever its x holds.
          quantized_experts: with `config.precision="fp8_block"`, of `quantize_expert_weights` of
            this layer's w_gate, w_up and w_down, for calls that share it; None: the call quantises
            for itself, to the same bits.

        Returns:
          y [..., H] in `dtype`, and the losses and the load of this call.

        Raises:
          TypeError, ValueError: while tracing, for what `route` and the op refuse, and for an x
            that is not floating or whose last dimension is not H.
        """
        values = {v.name: getattr(self, v.name)[...] for v in _layer.variables_of(self)}
        return _layer.apply_layer(self, values, x, mask, quantized_experts)
