"""The Flax Linen layer: equal to the NNX layer, and what Linen alone has: boxes, collections."""

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe import presets, update_selection_bias
from jax_megamoe.config import MegaMoEConfig, RouterConfig
from jax_megamoe.linen import STATE, MegaMoE, MegaMoEAux
from tests.modules import (
    FLOAT32,
    E,
    H,
    I,
    K,
    assert_bitwise,
    assert_close,
    graded,
    loss_of,
    make_x,
    of_linen,
    of_nnx,
)

BIASED = RouterConfig(scores="sigmoid", scale=2.5, selection_bias=True, linear_bias=True)
SHARED: dict[str, Any] = {"shared_intermediate_size": 20, "shared_gate": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"config": MegaMoEConfig(save="gate_up"), "dtype": jnp.bfloat16, **SHARED},
    "biases": {"router_config": BIASED, "param_dtype": jnp.bfloat16},
    "gpt_oss": {
        "router_config": presets.GPT_OSS,
        "config": MegaMoEConfig(activation=presets.GPT_OSS_ACTIVATION),
        "expert_bias": True,
        "shared_intermediate_size": 20,
    },
}


def make_mesh(data: int, expert: int, axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((data, expert), ("data", "expert"), axis_types=(axis_type,) * 2)


def drawn(module: MegaMoE, x: jax.Array) -> Any:
    """Its variables; compiled, so that nothing computes the y of `init`."""
    return jax.jit(module.init)(jax.random.key(0), x)


@pytest.mark.parametrize("name", OPTIONS)
def test_is_the_nnx_layer_bit_for_bit(name: str) -> None:
    """The same variables; with equal values the same y, aux and gradients."""
    in_nnx, in_linen = of_nnx(**OPTIONS[name]), of_linen(**OPTIONS[name])
    values, of_linen_init = in_nnx.init(0), in_linen.init(0)
    for bias in ("selection_bias", "b_gate", "b_up", "b_down"):
        if bias in values:
            drawn = np.random.default_rng(2).normal(size=values[bias].shape)
            values[bias] = jnp.asarray(drawn, values[bias].dtype)
    assert {n: (v.shape, v.dtype) for n, v in values.items()} == {
        n: (v.shape, v.dtype) for n, v in of_linen_init.items()
    }
    mask = jnp.asarray(np.random.default_rng(1).random((3, 7)) < 0.8)
    expected = graded(in_nnx.apply)(values, make_x(3, 7), mask)
    assert_bitwise(graded(in_linen.apply)(values, make_x(3, 7), mask), expected)
    assert jnp.abs(expected[1][0]["w_down"]).max() > 0


def test_matrices_are_drawn_apart_and_at_the_scale_of_one() -> None:
    variables: Any = drawn(MegaMoE(64, 256, 4, 2), jnp.ones((1, 64)))
    for name, fan_in in (("w_gate", 64), ("w_up", 64), ("w_down", 256)):
        value = np.asarray(variables["params"][name])
        np.testing.assert_allclose(value.std(axis=(1, 2)), fan_in**-0.5, rtol=0.05)
        assert np.abs(value[0] - value[1]).max() > 0
    assert jnp.abs(variables["params"]["w_gate"] - variables["params"]["w_up"]).max() > 0


def test_the_selection_bias_is_state_that_a_training_loop_moves() -> None:
    module, x = MegaMoE(H, I, E, K, config=FLOAT32, router_config=BIASED), make_x(4, 6)
    variables = drawn(module, x)
    assert set(variables) == {"params", STATE}
    assert "selection_bias" not in variables["params"]
    apply: Any = module.apply
    _, before = apply(variables, x)
    bias = update_selection_bias(variables[STATE]["selection_bias"], before.load, 0.5)
    assert jnp.any(bias != 0)
    _, after = apply({"params": variables["params"], STATE: {"selection_bias": bias}}, x)
    assert jnp.any(after.load != before.load)


def test_the_aux_is_sown_for_who_asks() -> None:
    module, x = MegaMoE(H, I, E, K, config=FLOAT32), make_x(4, 6)
    variables = drawn(module, x)
    assert set(variables) == {"params"}
    (y, aux), sown = module.apply(variables, x, mutable=["intermediates"])
    assert isinstance(aux, MegaMoEAux)
    assert_bitwise(sown["intermediates"]["aux"], (aux,))


def test_without_an_expert_axis_arrays_are_plain() -> None:
    variables = drawn(MegaMoE(H, I, E, K), make_x(2))
    assert all(isinstance(v, jax.Array) for v in variables["params"].values())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_variables_are_boxed_and_born_sharded(axis_type: AxisType) -> None:
    """By `init` as it is and with the shardings of the boxes; the values are equal."""
    options = {"router_config": BIASED, **SHARED}
    module = MegaMoE(H, I, E, K, expert_axis="expert", **options)
    key, x = jax.random.key(0), make_x(8)
    plain = drawn(MegaMoE(H, I, E, K, **options), x)
    with jax.set_mesh(mesh := make_mesh(2, 4, axis_type)):
        abstract = jax.eval_shape(module.init, key, x)
        placed = jax.jit(module.init, out_shardings=nn.get_sharding(abstract, mesh))
        for init in (jax.jit(module.init), placed):
            variables = init(key, x)
            assert_bitwise(nn.unbox(variables), plain)
            for name, box in variables["params"].items():
                assert isinstance(box, nn.Partitioned)
                is_split = name in ("w_gate", "w_up", "w_down")
                shape = (E // 4, *box.value.shape[1:]) if is_split else box.value.shape
                assert box.value.addressable_shards[0].data.shape == shape
        assert len(variables["params"]) == 9
    specs = nn.get_partition_spec(abstract)
    assert specs["params"]["w_gate"] == P("expert", None, None)
    assert specs["params"]["router"] == specs["params"]["shared_router"] == P(None, None)
    assert specs[STATE]["selection_bias"] == P(None)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_meshes_agree_with_one_device(axis_type: AxisType) -> None:
    """Losses, load and every gradient, of split boxes and of plain arrays that nobody has split."""
    x = make_x(8, 5)
    alone = MegaMoE(H, I, E, K, config=FLOAT32)
    params = drawn(alone, x)
    expected = graded(alone.apply)(params, x)
    module = alone.clone(expert_axis="expert", data_axes=("data",))
    with jax.set_mesh(make_mesh(2, 2, axis_type)):
        boxed = drawn(module, x)
        placed = jax.device_put(x, P(("data", "expert")))
        program = graded(module.apply)
        of_boxed = program(boxed, placed)
        assert isinstance(of_boxed[1][0]["params"]["w_gate"], nn.Partitioned)
        assert_close(nn.unbox(of_boxed), expected, 2e-6)
        assert_close(program(jax.device_put(params, P()), placed), expected, 2e-6)


def test_12_replicated_routers_do_not_drift_apart() -> None:
    """pytorch/torchtitan #2387: a rank's share of the router's gradient taken for the whole."""
    alone = MegaMoE(H, I, E, K, config=FLOAT32)
    module = alone.clone(expert_axis="expert", data_axes=("data",))

    def step_of(module: MegaMoE) -> Any:
        gradient = jax.grad(loss_of(module.apply), has_aux=True)

        @jax.jit
        def step(params: Any, x: jax.Array) -> Any:
            return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient(params, x)[0])

        return step

    x = make_x(8, 6)
    single, step = drawn(alone, x), step_of(alone)
    before = np.asarray(single["params"]["router"])
    with jax.set_mesh(make_mesh(2, 2, AxisType.Auto)):
        params, sharded_step = drawn(module, x), step_of(module)
        placed = jax.device_put(x, P(("data", "expert")))
        for _ in range(20):
            single, params = step(single, x), sharded_step(params, placed)
            router = params["params"]["router"].value
            copies = [np.asarray(s.data) for s in router.addressable_shards]
            assert len(copies) == 4
            for copy in copies:
                np.testing.assert_array_equal(copy, copies[0])
            np.testing.assert_allclose(copies[0], single["params"]["router"], atol=1e-6)
    assert np.abs(np.asarray(single["params"]["router"]) - before).max() > 1e-2


def test_one_renormalised_choice_warns() -> None:
    with pytest.warns(UserWarning, match="num_experts_per_token = 1.*renormalize=False"):
        MegaMoE(H, I, E, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MegaMoE(H, I, E, 1, router_config=RouterConfig(renormalize=False))
