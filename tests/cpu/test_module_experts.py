"""Activations and expert biases of both Flax modules."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe import linen, presets
from jax_megamoe.config import ClampedSwiGLU, MegaMoEConfig
from jax_megamoe.nnx import MegaMoE
from tests.gated import UNITS, Unit
from tests.modules import MODULES, E, H, I, K, Values, assert_close, graded, make_x

BIASES = {"b_gate": (E, I), "b_up": (E, I), "b_down": (E, H)}
S = 10
TIGHT = ClampedSwiGLU(alpha=1.5, limit=0.75)


def config(activation: Any, **options: Any) -> MegaMoEConfig:
    return MegaMoEConfig(precision="float32", activation=activation, **options)


def with_biases(values: Values) -> Values:
    """Random ones in place of the zeros of the start."""
    rng = np.random.default_rng(5)
    return values | {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in BIASES.items()
    }


def layer_float64(values: Values, x: np.ndarray, unit: Unit) -> np.ndarray:
    """From the definition, token by token, with the shared experts."""
    v = {name: np.asarray(value, np.float64) for name, value in values.items()}
    logits, y = x @ v["router"], np.zeros_like(x)
    for t, row in enumerate(x):
        chosen = np.argsort(-logits[t], kind="stable")[:K]
        weights = np.exp(logits[t, chosen]) / np.exp(logits[t, chosen]).sum()
        for weight, e in zip(weights, chosen, strict=True):
            g, u = (row @ v[f"w_{n}"][e] + v[f"b_{n}"][e] for n in ("gate", "up"))
            y[t] += weight * (unit(g, u)[0] @ v["w_down"][e] + v["b_down"][e])
    shared = unit(x @ v["shared_w_gate"], x @ v["shared_w_up"])[0]
    return y + shared @ v["shared_w_down"]


@pytest.mark.parametrize("activation", ["geglu", ClampedSwiGLU(), TIGHT])
@pytest.mark.parametrize("name", MODULES)
def test_matches_the_definition_in_float64(name: str, activation: Any) -> None:
    """Shared experts have the activation too, and no biases."""
    functions = MODULES[name](
        config=config(activation), expert_bias=True, shared_intermediate_size=S
    )
    values, x = with_biases(functions.init(0)), make_x(20)
    unit, x64 = UNITS[activation], np.asarray(x, np.float64)
    y, _ = functions.apply(values, x)
    np.testing.assert_allclose(y, layer_float64(values, x64, unit), atol=2e-5)

    dy = np.random.default_rng(3).normal(size=x.shape)
    gradients = jax.grad(lambda v: jnp.sum(functions.apply(v, x)[0] * jnp.asarray(dy, x.dtype)))(
        values
    )
    for changed in (*BIASES, "w_gate", "w_down", "shared_w_gate", "shared_w_up"):
        direction = np.random.default_rng(7).normal(size=values[changed].shape)
        moved, step = np.asarray(values[changed], np.float64), 1e-6
        ends: list[Any] = [
            np.sum(dy * layer_float64({**values, changed: moved + s * direction}, x64, unit))  # pyright: ignore[reportArgumentType]
            for s in (step, -step)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        found = np.sum(np.asarray(gradients[changed], np.float64) * direction)
        np.testing.assert_allclose(found, slope, rtol=1e-3, atol=1e-3, err_msg=changed)


@pytest.mark.parametrize("name", MODULES)
def test_the_largest_constants_make_no_nan_of_zeros(name: str) -> None:
    """In bf16 too, which shared experts work in."""
    most = float(jnp.finfo(jnp.bfloat16).max)
    largest = MegaMoEConfig(activation=ClampedSwiGLU(alpha=most, limit=most))
    functions = MODULES[name](config=largest, shared_intermediate_size=S)
    y, _ = functions.apply(functions.init(0), jnp.zeros_like(make_x(3)))
    assert not np.any(y)


@pytest.mark.parametrize("name", MODULES)
def test_biases_begin_with_zeros_beside_the_same_weights(name: str) -> None:
    plain = MODULES[name]().init(0)
    biased = MODULES[name](expert_bias=True, param_dtype=jnp.float32).init(0)
    assert {n: b.shape for n, b in biased.items() if n not in plain} == BIASES
    for n, value in biased.items():
        np.testing.assert_array_equal(value, plain.get(n, jnp.zeros_like(value)))
    bf16 = MODULES[name](expert_bias=True, param_dtype=jnp.bfloat16).init(0)
    assert {b.dtype for b in bf16.values()} == {jnp.dtype(jnp.bfloat16)}


def test_biases_are_split_with_the_experts() -> None:
    options: dict[str, Any] = {"expert_bias": True, "expert_axis": "expert"}
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        layer = MegaMoE(H, I, E, K, **options, rngs=nnx.Rngs(0))
        module = linen.MegaMoE(H, I, E, K, **options)
        boxed = jax.eval_shape(module.init, jax.random.key(0), make_x(8))
    of_nnx = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
    for name, (_, outputs) in BIASES.items():
        assert of_nnx[name] == nn.get_partition_spec(boxed)["params"][name] == P("expert", None)
        shard = getattr(layer, name)[...].addressable_shards[0].data
        assert shard.shape == (E // 4, outputs)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", MODULES)
def test_meshes_agree_with_one_device(name: str, axis_type: AxisType) -> None:
    options: dict[str, Any] = {"config": config(TIGHT, save="gate_up"), "expert_bias": True}
    alone, x = MODULES[name](**options), make_x(8, 5)
    values = with_biases(alone.init(0))
    expected = graded(alone.apply)(values, x)
    assert all(np.any(expected[1][0][name]) for name in BIASES)
    split = MODULES[name](**options, expert_axis="expert", data_axes=("data",))
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "expert"), axis_types=(axis_type,) * 2)):
        placed, x = jax.device_put((values, x), P())
        actual = graded(split.apply)(placed, x)
    assert_close(actual, expected, 5e-6)


@pytest.mark.parametrize("name", MODULES)
def test_frozen_experts_have_frozen_biases(name: str) -> None:
    frozen = config("geglu", trainable_experts=False)
    functions = MODULES[name](config=frozen, expert_bias=True)
    _, (gradients, _) = graded(functions.apply)(with_biases(functions.init(0)), make_x(2, 3))
    assert {n for n, g in gradients.items() if not np.any(g)} == {
        *BIASES, "w_gate", "w_up", "w_down",
    }  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_gpt_oss_learns_in_bf16(name: str) -> None:
    """Some steps of descent on a fixed target, with everything that its preset has."""
    functions = MODULES[name](
        config=MegaMoEConfig(activation=presets.GPT_OSS_ACTIVATION),
        router_config=presets.GPT_OSS,
        expert_bias=True,
        dtype=jnp.bfloat16,
    )
    values, x = functions.init(0), make_x(4, 8)
    target = jnp.cumsum(x, axis=-1)

    @jax.jit
    def step(values: Values) -> tuple[jax.Array, Values]:
        loss = lambda v: jnp.mean((functions.apply(v, x)[0].astype(jnp.float32) - target) ** 2)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(values)
        return value, jax.tree.map(lambda v, g: v - 0.3 * g, values, gradients)

    losses = []
    for _ in range(30):
        value, values = step(values)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0], losses
    assert all(np.any(values[b]) for b in (*BIASES, "router_bias"))
