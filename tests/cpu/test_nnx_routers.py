"""The routers of the Flax NNX layer: what they compute, and their parameters and state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe import RouterConfig, presets, update_selection_bias
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.nnx import MegaMoE, MegaMoEAux, SelectionBias
from tests.routers import route_float64

H, I, E, K = 16, 12, 8, 2
# DeepSeek-V3's with groups that divide the 8 experts of these tests.
DEEPSEEK = RouterConfig(
    scores="sigmoid", scale=2.5, num_groups=4, num_chosen_groups=2, selection_bias=True
)
BOTH_BIASES = RouterConfig(scores="sigmoid", selection_bias=True, linear_bias=True)
ROUTERS = {"qwen3": presets.QWEN3_MOE, "deepseek": DEEPSEEK, "gpt_oss": presets.GPT_OSS}


def make_layer(router_config: RouterConfig, **options: Any) -> MegaMoE:
    """A layer with biases that change choices."""
    config = MegaMoEConfig(precision="float32")
    rngs = options.pop("rngs", nnx.Rngs(0))
    layer = MegaMoE(H, I, E, K, config=config, router_config=router_config, rngs=rngs, **options)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=E), jnp.float32)
    if router_config.linear_bias:
        layer.router_bias[...] = bias
    if router_config.selection_bias:
        layer.selection_bias[...] = -bias
    return layer


def make_x(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*shape, H)), jnp.float32)


def loss(layer: MegaMoE, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, MegaMoEAux]]:
    y, aux = layer(x)
    losses = 0.1 * aux.load_balance_loss + 0.1 * aux.sequence_balance_loss + 0.01 * aux.z_loss
    return jnp.mean(y * jnp.sin(y)) + losses, (y, aux)


value_and_grad = nnx.jit(nnx.value_and_grad(loss, has_aux=True))


def loss_float64(params: dict[str, Any], x: Any, config: RouterConfig, bias: Any) -> Any:
    """The loss from the definition, y and what the router gives."""
    x = np.asarray(x, np.float64)
    logits = x @ params["router"] + params.get("router_bias", np.zeros(E))
    routing = route_float64(logits, K, config, bias)
    y = np.zeros_like(x)
    for t in np.ndindex(*x.shape[:-1]):
        for e, weight in zip(routing.expert_idx[t], routing.expert_weight[t], strict=True):
            g, u = x[t] @ params["w_gate"][e], x[t] @ params["w_up"][e]
            y[t] += weight * (g / (1 + np.exp(-g)) * u) @ params["w_down"][e]
    losses = 0.1 * routing.load_balance_loss + 0.1 * routing.sequence_balance_loss
    return np.mean(y * np.sin(y)) + losses + 0.01 * routing.z_loss, y, routing


@pytest.mark.parametrize("name", ROUTERS)
def test_matches_the_definition_in_float64(name: str) -> None:
    config, x = ROUTERS[name], make_x(3, 7)
    layer = make_layer(config)
    bias = layer.selection_bias[...] if config.selection_bias else None
    (total, (y, aux)), gradients = value_and_grad(layer, x)
    params = {
        name: np.asarray(value, np.float64)
        for name, value in nnx.to_pure_dict(nnx.state(layer, nnx.Param)).items()
    }
    expected, right_y, routing = loss_float64(params, x, config, bias)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_allclose(y, right_y, rtol=1e-5, atol=1e-6)
    for field in MegaMoEAux._fields:
        np.testing.assert_allclose(getattr(aux, field), getattr(routing, field), rtol=1e-5)
    step = 1e-5
    for name, gradient in nnx.to_pure_dict(gradients).items():
        direction = np.random.default_rng(7).normal(size=gradient.shape)
        ends = [
            loss_float64({**params, name: params[name] + s * direction}, x, config, bias)[0]
            for s in (step, -step)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        found = np.sum(np.asarray(gradient, np.float64) * direction)
        np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-7, err_msg=name)


def test_what_each_router_holds() -> None:
    def names(config: RouterConfig, kind: Any) -> set[str]:
        layer = MegaMoE(H, I, E, K, router_config=config, rngs=nnx.Rngs(0))
        return set(nnx.to_pure_dict(nnx.state(layer, kind)))

    common = {"router", "w_gate", "w_up", "w_down"}
    assert names(presets.QWEN3_MOE, ...) == common
    assert names(presets.GPT_OSS, ...) == common | {"router_bias"}
    assert names(presets.GPT_OSS, nnx.Param) == common | {"router_bias"}
    assert names(DEEPSEEK, nnx.Param) == common
    assert names(DEEPSEEK, SelectionBias) == {"selection_bias"}
    layer = MegaMoE(H, I, E, K, router_config=BOTH_BIASES, param_dtype="bfloat16", rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer.router_bias[...], jnp.zeros(E, jnp.bfloat16))
    np.testing.assert_array_equal(layer.selection_bias[...], jnp.zeros(E, jnp.float32))
    assert layer.router_bias[...].dtype == jnp.bfloat16
    assert layer.selection_bias[...].dtype == jnp.float32


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_meshes_agree_with_one_device(axis_type: AxisType) -> None:
    x = make_x(8, 5)
    expected = value_and_grad(make_layer(BOTH_BIASES), x)
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "expert"), axis_types=(axis_type,) * 2)):
        layer = make_layer(BOTH_BIASES, expert_axis="expert", data_axes=("data",))
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
        assert specs["router_bias"] == specs["selection_bias"] == P(None)
        assert layer.selection_bias[...].sharding.is_fully_replicated
        actual = value_and_grad(layer, jax.device_put(x, P(("data", "expert"))))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_a_training_loop_moves_the_bias_of_each_layer() -> None:
    """Stacked layers in a scan: the optimizer sees no bias, the update takes each layer's load."""
    num_layers, x = 3, make_x(4, 6)
    axes = {nnx.PARTITION_NAME: None}

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=axes)
    def stack(rngs: nnx.Rngs) -> MegaMoE:
        return make_layer(DEEPSEEK, rngs=rngs)

    def stacked_loss(layers: MegaMoE, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=axes)
        @nnx.remat
        def apply(layer: MegaMoE, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, aux = layer(x)
            return x + y, aux.load

        y, loads = apply(layers, x)
        return jnp.mean(jnp.sin(y)), loads

    @nnx.jit
    def train_step(layers: MegaMoE, x: jax.Array) -> jax.Array:
        gradients, loads = nnx.grad(stacked_loss, has_aux=True)(layers, x)
        params = nnx.state(layers, nnx.Param)
        nnx.update(layers, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients))
        bias = layers.selection_bias
        bias[...] = jax.vmap(lambda b, n: update_selection_bias(b, n, 0.01))(bias[...], loads)
        return loads

    layers = stack(nnx.Rngs(0))
    before = np.asarray(layers.selection_bias[...])
    loads = np.asarray(train_step(layers, x))
    np.testing.assert_array_equal(loads.sum(-1), 4 * 6 * K)
    moved = np.sign(loads.mean(-1, keepdims=True) - loads).astype(np.float32)
    assert np.any(moved)
    np.testing.assert_allclose(layers.selection_bias[...], before + 0.01 * moved, rtol=1e-6)
