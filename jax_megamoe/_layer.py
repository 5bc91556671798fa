"""The Flax layer without Flax: what it may be, which variables it has, what it computes of them.

`nnx.MegaMoE` and `linen.MegaMoE` hold the variables, each in its framework's way, and call this.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_megamoe._router_checks import check_mask
from jax_megamoe.activation import gated, gated_unit
from jax_megamoe.config import MegaMoEConfig, RouterConfig
from jax_megamoe.ops import mega_moe
from jax_megamoe.quantization import QuantizedExperts
from jax_megamoe.router import route
from jax_megamoe.sharding import sharded_mega_moe
from jax_megamoe.validation import BIASES, check_array, refuse

Array = jax.Array
# Of one matrix: (key, shape, dtype) -> array.
Initializer = Callable[..., Array]
# Mesh axis of each dimension; None: all of it on each device.
Spec = tuple[str | None, ...]


@runtime_checkable
class Layer(Protocol):
    """The static choices of a layer, as both modules hold them; `nnx.MegaMoE` describes each."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    config: MegaMoEConfig
    router_config: RouterConfig
    shared_intermediate_size: int
    shared_gate: bool
    expert_bias: bool
    expert_axis: str | None
    data_axes: tuple[str, ...]
    dtype: DTypeLike | None
    param_dtype: DTypeLike


class MegaMoEAux(NamedTuple):
    """What a training loop needs of a layer beside its output; over all tokens of the call.

    Attributes:
      load_balance_loss: float32 [], see `jax_megamoe.Routing`; no factor applied.
      sequence_balance_loss, z_loss: float32 [], likewise.
      load: int32 [E], how many choices fell on each expert; shared experts are none of them.
    """

    load_balance_loss: Array
    sequence_balance_loss: Array
    z_loss: Array
    load: Array


class Variable(NamedTuple):
    """A variable of a layer: a parameter, or with `is_state` what no gradient moves."""

    name: str
    shape: tuple[int, ...]
    dtype: DTypeLike
    spec: Spec
    is_state: bool = False
    is_bias: bool = False

    @property
    def is_drawn(self) -> bool:
        """Matrices are; biases begin with zeros."""
        return not self.is_bias

    def draw(self, key: Array, kernel_init: Initializer) -> Array:
        """The first value: a matrix, or a stack of matrices that are drawn one by one."""
        if len(self.shape) == 2:
            return kernel_init(key, self.shape, self.dtype)
        keys = jax.random.split(key, self.shape[0])
        return jax.vmap(lambda key: kernel_init(key, self.shape[1:], self.dtype))(keys)

    def zeros(self) -> Array:
        return jnp.zeros(self.shape, self.dtype)


def variables_of(layer: Layer) -> Iterator[Variable]:
    """The variables of a layer, in the order in which they are drawn."""
    hidden, inner, shared = (
        layer.hidden_size,
        layer.intermediate_size,
        layer.shared_intermediate_size,
    )
    num_experts, dtype, axis = layer.num_experts, layer.param_dtype, layer.expert_axis
    yield Variable("router", (hidden, num_experts), dtype, (None, None))
    if layer.router_config.linear_bias:
        yield Variable("router_bias", (num_experts,), dtype, (None,), is_bias=True)
    if layer.router_config.selection_bias:
        kind = {"is_state": True, "is_bias": True}
        yield Variable("selection_bias", (num_experts,), jnp.float32, (None,), **kind)
    yield Variable("w_gate", (num_experts, hidden, inner), dtype, (axis, None, None))
    yield Variable("w_up", (num_experts, hidden, inner), dtype, (axis, None, None))
    yield Variable("w_down", (num_experts, inner, hidden), dtype, (axis, None, None))
    if layer.expert_bias:
        for name, outputs in (("b_gate", inner), ("b_up", inner), ("b_down", hidden)):
            yield Variable(name, (num_experts, outputs), dtype, (axis, None), is_bias=True)
    if shared:
        yield Variable("shared_w_gate", (hidden, shared), dtype, (None, None))
        yield Variable("shared_w_up", (hidden, shared), dtype, (None, None))
        yield Variable("shared_w_down", (shared, hidden), dtype, (None, None))
    if layer.shared_gate:
        yield Variable("shared_router", (hidden, 1), dtype, (None, None))


def apply_layer(
    layer: Layer,
    values: Mapping[str, Array],
    x: Array,
    mask: Array | None,
    quantized_experts: QuantizedExperts | None,
) -> tuple[Array, MegaMoEAux]:
    """Routes each token to its experts and sums what they return.

    Args:
      layer: whose choices hold.
      values: of `variables_of(layer)` by their names.
      x, mask, quantized_experts: as the modules take them.

    Raises:
      TypeError, ValueError: as the modules.
    """
    _check_x(layer, x)
    if layer.dtype is not None:
        x = x.astype(layer.dtype)
    if mask is not None:
        check_mask(mask, x.shape[:-1])
        x = jnp.where(mask[..., None], x, jnp.zeros_like(x))
    logits = _linear_float32(x, values["router"])
    if layer.router_config.linear_bias:
        bias = values["router_bias"].astype(jnp.float32)
        logits += jnp.expand_dims(bias, tuple(range(x.ndim - 1)))
    routing = route(
        logits,
        layer.num_experts_per_token,
        layer.router_config,
        selection_bias=values.get("selection_bias"),
        mask=mask,
    )
    routes = (routing.expert_idx, routing.expert_weight)
    weights = (values["w_gate"], values["w_up"], values["w_down"])
    # Not asdict, which would make a dict of the activation, too.
    options = {f.name: getattr(layer.config, f.name) for f in dataclasses.fields(layer.config)}
    if layer.expert_bias:
        options |= {name: values[name] for name in BIASES}
    options["quantized_experts"] = quantized_experts
    if layer.expert_axis is None:
        y = mega_moe(x, *routes, *weights, **options)
    else:
        axes = {"expert_axis": layer.expert_axis, "data_axes": layer.data_axes}
        y = sharded_mega_moe(x, *routes, *weights, **axes, **options)
    y = cast(Array, y)  # and no counts beside it: config.return_counts is False
    if layer.shared_intermediate_size:
        y = (y.astype(jnp.float32) + _shared_experts(layer, values, x)).astype(y.dtype)
    return y, MegaMoEAux(**{name: getattr(routing, name) for name in MegaMoEAux._fields})


def _check_x(layer: Layer, x: Array) -> None:
    check_array("x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        refuse(TypeError, "x", f"of dtype {x.dtype}", "of a floating dtype")
    hidden = layer.hidden_size
    if x.ndim < 1 or x.shape[-1] != hidden:
        refuse(ValueError, "x", f"of shape {x.shape}", f"[..., H] with H = {hidden}")


def _shared_experts(layer: Layer, values: Mapping[str, Array], x: Array) -> Array:
    """float32 [..., H]: a dense gated MLP of every token, its activation as the config says, in
    float32 with precision "float32" and else in bf16.

    With `shared_gate` times sigmoid(x shared_router), as Qwen2-MoE does.
    """
    is_float32 = layer.config.precision == "float32"
    dtype = jnp.float32 if is_float32 else jnp.bfloat16
    precision = jax.lax.Precision.HIGHEST if is_float32 else None
    gate, up, down = (values[f"shared_w_{name}"].astype(dtype) for name in ("gate", "up", "down"))
    inputs = x.astype(dtype)
    # Results in the dtype of the operands, so that the products of the backward have it too.
    g = jnp.matmul(inputs, gate, precision=precision)
    u = jnp.matmul(inputs, up, precision=precision)
    h = gated(gated_unit(layer.config.activation), g, u)
    y = jnp.matmul(h, down, precision=precision).astype(jnp.float32)
    if layer.shared_gate:
        y *= jax.nn.sigmoid(_linear_float32(x, values["shared_router"]))
    return y


def _linear_float32(x: Array, matrix: Array) -> Array:
    """x [..., H] times [H, C], float32 whatever the dtypes: what decides is not rounded."""
    return jnp.matmul(
        x.astype(jnp.float32), matrix.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
