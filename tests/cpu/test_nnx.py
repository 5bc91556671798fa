"""The Flax NNX layer: its mathematics, its sharding, and the transformations it lives in."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe.config import SAVES, MegaMoEConfig, RouterConfig
from jax_megamoe.nnx import MegaMoE
from tests.remat import ROUTING_POLICIES

FLOAT32 = MegaMoEConfig(precision="float32")
H, I, E, K = 16, 12, 8, 2


def make_layer(**options):
    return MegaMoE(H, I, E, K, **{"config": FLOAT32, "rngs": nnx.Rngs(0), **options})


def make_x(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*shape, H)), jnp.float32)


def make_mesh(data, expert, axis_type):
    return jax.make_mesh((data, expert), ("data", "expert"), axis_types=(axis_type,) * 2)


def loss_and_aux(layer, x, mask=None):
    y, aux = layer(x, mask)
    return jnp.mean(y * jnp.sin(y)) + 0.1 * aux.load_balance_loss + 0.01 * aux.z_loss, aux


value_and_grad = nnx.jit(nnx.value_and_grad(loss_and_aux, has_aux=True))


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_close(actual, expected, tolerance):
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def assert_bitwise(actual, expected):
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def as_float64(state):
    return {name: np.asarray(v, np.float64) for name, v in nnx.to_pure_dict(state).items()}


def loss_float64(params, x):
    """The loss of `loss_and_aux` from the definition, token by token; also y and the load."""
    x = np.asarray(x, np.float64).reshape(-1, H)
    logits = x @ params["router"]
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    y, load = np.zeros_like(x), np.zeros(E, int)
    for t, row in enumerate(x):
        chosen = np.argsort(-logits[t], kind="stable")[:K]
        load[chosen] += 1
        for e in chosen:
            g, u = row @ params["w_gate"][e], row @ params["w_up"][e]
            weight = probs[t, e] / probs[t, chosen].sum()
            y[t] += weight * (g / (1 + np.exp(-g)) * u) @ params["w_down"][e]
    balance = E * np.sum(load / len(x) * probs.mean(0))
    z = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    return np.mean(y * np.sin(y)) + 0.1 * balance + 0.01 * z, y, load


def test_matches_the_definition_in_float64():
    layer, x = make_layer(), make_x(4, 9)
    (loss, aux), gradients = value_and_grad(layer, x)
    params = as_float64(nnx.state(layer, nnx.Param))
    expected, y, load = loss_float64(params, x)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(layer(x)[0].reshape(-1, H), y, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(aux.load, load)
    step = 1e-5
    for name, gradient in as_float64(gradients).items():
        direction = np.random.default_rng(7).normal(size=gradient.shape)
        ends = [
            loss_float64({**params, name: params[name] + s * direction}, x)[0]
            for s in (step, -step)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=1e-4, atol=1e-7)


def test_experts_are_drawn_apart_and_at_the_scale_of_one_expert():
    layer = MegaMoE(64, 256, 4, 2, rngs=nnx.Rngs(3))
    for name, fan_in in (("w_gate", 64), ("w_up", 64), ("w_down", 256)):
        value = np.asarray(getattr(layer, name)[...])
        np.testing.assert_allclose(value.std(axis=(1, 2)), fan_in**-0.5, rtol=0.05)
        assert np.abs(value[0] - value[1]).max() > 0
    assert np.abs(np.asarray(layer.w_gate[...]) - np.asarray(layer.w_up[...])).max() > 0


def test_partition_specs():
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(make_layer(expert_axis="expert"))))
    assert {name: spec for name, spec in specs.items() if name != "router"} == {
        name: P("expert", None, None) for name in ("w_gate", "w_up", "w_down")
    }
    assert specs["router"] == P(None, None)
    without_axis = nnx.get_partition_spec(nnx.state(make_layer()))
    assert set(nnx.to_pure_dict(without_axis).values()) == {P(None, None), P(None, None, None)}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_parameters_are_born_sharded_and_equal_for_every_mesh(axis_type):
    plain = make_layer()
    with jax.set_mesh(make_mesh(2, 4, axis_type)):
        eager = make_layer(expert_axis="expert")
        jitted = nnx.jit(lambda: make_layer(expert_axis="expert"))()
    for layer in (eager, jitted):
        assert layer.w_down[...].addressable_shards[0].data.shape == (E // 4, I, H)
        assert layer.router[...].sharding.is_fully_replicated
        assert_bitwise(nnx.state(layer), nnx.state(plain))


@pytest.mark.parametrize(
    ("axis_type", "data", "expert", "placed"),
    [
        (AxisType.Auto, 1, 2, False),
        (AxisType.Auto, 2, 2, True),
        (AxisType.Explicit, 2, 2, False),
        (AxisType.Explicit, 1, 8, True),
        (AxisType.Explicit, 4, 1, True),
    ],
)
def test_meshes_agree_with_one_device(axis_type, data, expert, placed):
    """Losses, load and every gradient; x arrives replicated or split over both axes."""
    x = make_x(8, 5)
    mask = jnp.asarray(np.random.default_rng(1).random((8, 5)) < 0.8)
    expected = value_and_grad(make_layer(), x, mask)
    with jax.set_mesh(mesh := make_mesh(data, expert, axis_type)):
        layer = make_layer(expert_axis="expert", data_axes=("data",))
        spec = P(("data", "expert")) if placed else P()
        x, mask = jax.device_put((x, mask), jax.NamedSharding(mesh, spec))
        actual = value_and_grad(layer, x, mask)
    assert_close(actual, expected, 2e-6)
    np.testing.assert_array_equal(actual[0][1].load, expected[0][1].load)


@pytest.mark.parametrize(("data", "expert"), [(1, 2), (2, 2)])
def test_the_replicated_router_stays_one(data, expert):
    """20 SGD steps: the router's copies stay bitwise equal, and the single-device run's to 1e-6."""

    @nnx.jit
    def sgd_step(layer, x):
        gradients, aux = nnx.grad(loss_and_aux, has_aux=True)(layer, x)
        params = nnx.state(layer, nnx.Param)
        nnx.update(layer, jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients))
        return aux.load

    batches = [make_x(4, 6, seed=seed) for seed in range(20)]
    single = make_layer()
    start = np.asarray(single.router[...])
    singles = []
    for x in batches:
        sgd_step(single, x)
        singles.append(np.asarray(single.router[...]))
    assert np.abs(singles[-1] - start).max() > 1e-2
    with jax.set_mesh(make_mesh(data, expert, AxisType.Auto)):
        layer = make_layer(expert_axis="expert", data_axes=("data",))
        for x, expected in zip(batches, singles, strict=True):
            sgd_step(layer, x)
            copies = [np.asarray(s.data) for s in layer.router[...].addressable_shards]
            assert len(copies) == data * expert
            for copy in copies:
                assert copy.shape == (H, E)
                np.testing.assert_array_equal(copy, copies[0])
            np.testing.assert_allclose(copies[0], expected, atol=1e-6)


@pytest.mark.parametrize("expert_axis", [None, "expert"])
def test_scan_over_layers_with_remat_equals_a_loop(expert_axis):
    """Stacked parameters, scanned and rematerialised; each layer's load is counted once."""
    num_layers, x = 3, make_x(4, 6)
    axes = {nnx.PARTITION_NAME: None}

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=axes)
    def stack(rngs):
        return make_layer(expert_axis=expert_axis, rngs=rngs)

    def scanned(layers, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0), transform_metadata=axes)
        @nnx.remat
        def apply(layer, x):
            y, aux = layer(x)
            return x + y, aux

        return apply(layers, x)

    def looped(layers, x):
        graph, state = nnx.split(layers)
        loads = []
        for i in range(num_layers):
            y, aux = nnx.merge(graph, jax.tree.map(lambda a, i=i: a[i], state))(x)
            x = x + y
            loads.append(aux)
        return x, jax.tree.map(lambda *a: jnp.stack(a), *loads)

    def graded(run):
        def loss(layers, x):
            y, aux = run(layers, x)
            total = jnp.mean(jnp.sin(y)) + aux.load_balance_loss.sum() + aux.z_loss.sum()
            return total, aux.load

        return nnx.jit(nnx.value_and_grad(loss, has_aux=True))

    with jax.set_mesh(make_mesh(1, 2, AxisType.Auto)):
        layers = stack(nnx.Rngs(0))
        assert layers.w_gate[...].shape == (num_layers, E, H, I)
        if expert_axis:
            specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layers)))
            assert specs["w_gate"] == P(None, "expert", None, None)
            assert layers.w_gate[...].addressable_shards[0].data.shape == (3, E // 2, H, I)
        actual, expected = graded(scanned)(layers, x), graded(looped)(layers, x)
    assert_close(actual, expected, 1e-5)
    load = np.asarray(actual[0][1])
    np.testing.assert_array_equal(load, np.asarray(expected[0][1]))
    np.testing.assert_array_equal(load.sum(axis=1), 4 * 6 * K)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_remat_changes_no_bit_at_ties(policy, save):
    """Two identical router columns and repeated rows of x, T = 256; nor does `save`."""
    layer, of_inputs = make_layer(config=dataclasses.replace(FLOAT32, save=save)), make_layer()
    for each in (layer, of_inputs):
        router = each.router[...]
        each.router[...] = router.at[:, 5].set(router[:, 2])
    x = jnp.repeat(make_x(64), 4, axis=0)

    def loss(layer, x):
        y, aux = nnx.remat(lambda layer, x: layer(x), policy=policy)(layer, x)
        return jnp.sum(jnp.sin(y)) + aux.load_balance_loss + aux.z_loss, aux

    def plain(layer, x):
        y, aux = layer(x)
        return jnp.sum(jnp.sin(y)) + aux.load_balance_loss + aux.z_loss, aux

    def graded(f, layer):
        return nnx.jit(nnx.value_and_grad(f, argnums=(0, 1), has_aux=True))(layer, x)

    actual = graded(loss, layer)
    assert_bitwise(actual, graded(plain, of_inputs))
    assert actual[0][1].load.sum() == 256 * K


@pytest.mark.parametrize("save", SAVES)
def test_12_replicated_routers_do_not_drift_apart(save):
    """pytorch/torchtitan #2387: a rank's share of the router's gradient taken for the whole."""
    config, x = dataclasses.replace(FLOAT32, save=save), make_x(8, 6)

    @nnx.jit
    def step(layer, x):
        gradients, _ = nnx.grad(loss_and_aux, has_aux=True)(layer, x)
        params = nnx.state(layer, nnx.Param)
        nnx.update(layer, jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients))

    alone = make_layer(config=config)
    before = np.asarray(alone.router[...])
    with jax.set_mesh(make_mesh(1, 2, AxisType.Auto)):
        layer = make_layer(config=config, expert_axis="expert")
        placed = jax.device_put(x, P("expert"))
        for _ in range(20):
            step(layer, placed)
            step(alone, x)
            shards = [np.asarray(s.data) for s in layer.router[...].addressable_shards]
            assert len(shards) == 2
            np.testing.assert_array_equal(shards[0], shards[1])
            np.testing.assert_allclose(shards[0], alone.router[...], rtol=1e-6, atol=1e-6)
    assert np.abs(np.asarray(alone.router[...]) - before).max() > 1e-2


def test_donated_parameters_are_updated_in_place():
    x = make_x(4, 6)

    def sgd_step(layer, x):
        gradients, _ = nnx.grad(loss_and_aux, has_aux=True)(layer, x)
        params = nnx.state(layer, nnx.Param)
        nnx.update(layer, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients))

    kept, donated = make_layer(), make_layer()
    before = donated.w_gate[...]
    nnx.jit(sgd_step)(kept, x)
    nnx.jit(sgd_step, donate_argnums=0)(donated, x)
    assert before.is_deleted()
    assert_bitwise(nnx.state(donated), nnx.state(kept))


def test_padding_reaches_nothing():
    layer, x = make_layer(), make_x(3, 8)
    mask = jnp.arange(8)[None] < jnp.array([[8], [5], [0]])
    dirty = jnp.where(mask[..., None], x, jnp.nan)
    actual = value_and_grad(layer, dirty, mask)
    assert_bitwise(actual, value_and_grad(layer, x, mask))
    y, aux = layer(dirty, mask)
    np.testing.assert_array_equal(np.asarray(y)[~np.asarray(mask)], 0.0)
    assert aux.load.sum() == mask.sum() * K


def test_bf16_activations_are_routed_in_float32():
    """The router sees the bf16 x but multiplies in float32, so only the rounding of x differs."""
    layer = make_layer(dtype=jnp.bfloat16, config=MegaMoEConfig(precision="bf16"))
    x = make_x(4, 32)
    y, aux = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert y.dtype == jnp.bfloat16
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    expected = loss_float64(as_float64(nnx.state(layer, nnx.Param)), rounded)
    np.testing.assert_array_equal(aux.load, expected[2])
    np.testing.assert_allclose(
        np.asarray(y, np.float64).reshape(-1, H), expected[1], rtol=0.05, atol=0.03
    )
    half_params = make_layer(param_dtype=jnp.bfloat16, config=MegaMoEConfig())
    assert {leaf.dtype for leaf in leaves(nnx.state(half_params))} == {jnp.dtype(jnp.bfloat16)}
    assert half_params(x)[0].dtype == jnp.float32


def test_one_renormalised_choice_warns():
    def make(num_choices, renormalize):
        router_config = RouterConfig(renormalize=renormalize)
        return MegaMoE(H, I, E, num_choices, router_config=router_config, rngs=nnx.Rngs(0))

    with pytest.warns(UserWarning, match="num_experts_per_token = 1.*renormalize=False"):
        make(1, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(1, False)
        make(2, True)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, I, E, K), {}, "hidden_size: was 0;"),
        ((H, -1, E, K), {}, "intermediate_size: was -1;"),
        ((H, I, 0, K), {}, "num_experts: was 0;"),
        ((H, I, E, 0), {}, "num_experts_per_token: was 0;"),
        ((H, I, E, 9), {}, "num_experts_per_token: was 9;.*1..8"),
        ((H, I, E, K), {"data_axes": ("data",)}, r"data_axes: was \('data',\).*expert_axis"),
        ((H, I, E, K), {"config": MegaMoEConfig(return_counts=True)}, "return_counts: was True;"),
        ((H, I, E, K), {"config": MegaMoEConfig(precision="fp4")}, "precision: was 'fp4'"),
    ],
)
def test_refusals(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        MegaMoE(*arguments, **options, rngs=nnx.Rngs(0))


def test_calls_are_refused_by_name():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"x: was of shape \(4, 15\);.*H = 16"):
        layer(jnp.ones((4, H - 1)))
    with pytest.raises(ValueError, match=r"mask: was of shape \(3,\);.*\(4,\)"):
        layer(make_x(4), jnp.ones((3,), bool))
    with pytest.raises(TypeError, match="x: was of dtype int32"):
        layer(jnp.ones((4, H), jnp.int32))


def test_an_expert_axis_without_its_mesh_is_refused():
    layer = make_layer(expert_axis="expert")
    with pytest.raises(ValueError, match="mesh: was not given"):
        layer(make_x(4))
