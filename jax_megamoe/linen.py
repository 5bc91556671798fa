"""The mixture-of-experts layer as a Flax Linen module: `nnx.MegaMoE` with the same parameters."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jax_megamoe import _layer
from jax_megamoe._layer import MegaMoEAux as MegaMoEAux
from jax_megamoe._layer_checks import check_layer
from jax_megamoe.config import MegaMoEConfig, RouterConfig
from jax_megamoe.quantization import QuantizedExperts

# The collection of the selection bias, which is no parameter.
STATE = "router_state"


class MegaMoE(nn.Module):
    """Router and experts: `jax_megamoe.nnx.MegaMoE` for Flax Linen.

    Attributes, parameters, results and refusals are those of that class, which describes them:
    with equal parameters the same bits. What differs is how Linen holds things:

      * Collection "params" has the parameters, by the names there; "router_state" (`STATE`) has
        `selection_bias`, with `router_config.selection_bias`. A call changes neither.
      * With `expert_axis` each variable is boxed as `nn.Partitioned`, so that
        `nn.get_partition_spec` and `nn.get_sharding` know its layout; `nn.scan` and `nn.vmap` over
        layers then need `metadata_params={nn.PARTITION_NAME: None}`. Without, arrays are plain.
        Variables with and without their boxes are taken.
      * The losses and the load are the second result and are sown too, as `aux` in "intermediates".
      * `init` draws other numbers than the NNX module from the same seed.
      * Attributes are refused when the module is constructed.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    config: MegaMoEConfig = MegaMoEConfig()
    router_config: RouterConfig = RouterConfig()
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    expert_axis: str | None = None
    data_axes: tuple[str, ...] = ()
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()

    def __post_init__(self) -> None:
        check_layer(self, self.kernel_init)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        *,
        quantized_experts: QuantizedExperts | None = None,
    ) -> tuple[jax.Array, MegaMoEAux]:
        """As `jax_megamoe.nnx.MegaMoE`: y [..., H] of x [..., H], the losses and the load."""
        values = {v.name: self._value(v) for v in _layer.variables_of(self)}
        y, aux = _layer.apply_layer(self, values, x, mask, quantized_experts)
        self.sow("intermediates", "aux", aux)
        return y, aux

    def _value(self, v: _layer.Variable) -> jax.Array:
        def first(key: jax.Array | None = None) -> Any:
            value = v.zeros() if key is None or not v.is_drawn else v.draw(key, self.kernel_init)
            if self.expert_axis is None:
                return value
            return nn.Partitioned(_place(value, v.spec), v.spec)

        if v.is_state:
            value = self.variable(STATE, v.name, first, unbox=False).value
        else:
            value = self.param(v.name, first, unbox=False)
        # Unboxing constrains the layout, which with explicit axes asserts it; the op moves what
        # lies otherwise, so no layout is asked for.
        return value.value if isinstance(value, nn.Partitioned) else nn.unbox(value)


def _place(value: jax.Array, spec: _layer.Spec) -> jax.Array:
    """`value` laid out as `spec` says where a mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return value
    move = jax.sharding.reshard if mesh.are_all_axes_explicit else jax.lax.with_sharding_constraint
    return move(value, PartitionSpec(*spec))
