"""Shared experts of both Flax modules: a dense SwiGLU beside the router, on every token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe.config import MegaMoEConfig, RouterConfig
from tests.modules import MODULES, E, H, I, K, Values, assert_bitwise, assert_close, graded, make_x

S = 10
OPTIONS: dict[str, Any] = {"shared_intermediate_size": S, "shared_gate": True}


@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("name", MODULES)
def test_28_the_routed_scale_does_not_touch_them(name: str, precision: str) -> None:
    """vllm PR #45037: tagged experts, routed sum 3.0, times 2.5, and a shared output of 1.0."""
    functions = MODULES[name](
        config=MegaMoEConfig(precision=precision),
        router_config=RouterConfig(scale=2.5),
        shared_intermediate_size=S,
    )
    zeros: Values = jax.tree.map(jnp.zeros_like, functions.init(0))
    tags = jnp.arange(1, E + 1, dtype=jnp.float32)[:, None] / 32
    values = {
        **zeros,
        "router": zeros["router"].at[0, 1].set(2.0).at[0, 3].set(2.0),  # 0.5 * (2 + 4)
        "w_gate": zeros["w_gate"].at[:, 0, 0].set(32.0),
        "w_up": zeros["w_up"].at[:, 0, 0].set(1.0),
        "w_down": zeros["w_down"].at[:, 0].set(tags),
        "shared_w_gate": zeros["shared_w_gate"].at[0, 0].set(32.0),
        "shared_w_up": zeros["shared_w_up"].at[0, 0].set(1.0),
        "shared_w_down": zeros["shared_w_down"].at[0].set(1 / 32),
    }
    x = jnp.zeros((2, 3, H)).at[..., 0].set(1.0)
    apply = jax.jit(functions.apply)
    y, aux = apply(values, x)
    np.testing.assert_array_equal(y, np.full((2, 3, H), 8.5))
    np.testing.assert_array_equal(aux.load, [0, 6, 0, 6, 0, 0, 0, 0])
    masked, _ = apply(values, x, jnp.zeros((2, 3), jnp.bool_))
    np.testing.assert_array_equal(masked, 0.0)


def shared_float64(values: Values, x: Any) -> np.ndarray:
    v = {name: np.asarray(value, np.float64) for name, value in values.items()}
    g, u = x @ v["shared_w_gate"], x @ v["shared_w_up"]
    y = (g / (1 + np.exp(-g)) * u) @ v["shared_w_down"]
    return y / (1 + np.exp(-x @ v["shared_router"])) if "shared_router" in v else y


@pytest.mark.parametrize("shared_gate", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_they_add_the_definition_in_float64(name: str, shared_gate: bool) -> None:
    """y and the gradients of what they add, beside the layer without them."""
    shared = MODULES[name](**{**OPTIONS, "shared_gate": shared_gate})
    values, x = shared.init(0), make_x(3, 5)
    of_routed = {n: v for n, v in values.items() if not n.startswith("shared_")}
    names = set(values) - set(of_routed)
    assert len(names) == 3 + shared_gate
    routed, expected_aux = MODULES[name]().apply(of_routed, x)
    y, aux = shared.apply(values, x)
    assert_bitwise(aux, expected_aux)
    x64 = np.asarray(x, np.float64)
    np.testing.assert_allclose(y - routed, shared_float64(values, x64), atol=2e-6)

    dy = np.random.default_rng(3).normal(size=x.shape)
    gradients = jax.grad(lambda v: jnp.sum(shared.apply(v, x)[0] * jnp.asarray(dy, x.dtype)))(
        values
    )
    step = 1e-5
    for changed in names:
        direction = np.random.default_rng(7).normal(size=values[changed].shape)
        moved = np.asarray(values[changed], np.float64)
        ends: list[Any] = [
            np.sum(dy * shared_float64({**values, changed: moved + s * direction}, x64))  # pyright: ignore[reportArgumentType]
            for s in (step, -step)
        ]
        slope = (ends[0] - ends[1]) / (2 * step)
        found = np.sum(np.asarray(gradients[changed], np.float64) * direction)
        np.testing.assert_allclose(found, slope, rtol=1e-4, err_msg=changed)


def test_bf16_multiplies_in_bf16_and_gives_float32_gradients() -> None:
    options = {**OPTIONS, "config": MegaMoEConfig(precision="bf16"), "dtype": jnp.bfloat16}
    functions = MODULES["nnx"](**options)
    values, x = functions.init(0), make_x(4, 8)
    (_, (y, _)), (gradients, _) = graded(functions.apply)(values, x)
    assert y.dtype == jnp.bfloat16
    exact, _ = MODULES["nnx"](**OPTIONS).apply(values, x)
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=0.05, atol=0.05)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}
    program = str(jax.make_jaxpr(functions.apply)(values, x))
    assert f"bf16[4,8,{S}] = dot_general" in program


def test_a_mesh_of_explicit_axes_agrees_with_one_device() -> None:
    alone = MODULES["nnx"](**OPTIONS)
    values, x = alone.init(0), make_x(8, 5)
    expected = graded(alone.apply)(values, x)
    apply = MODULES["nnx"](**OPTIONS, expert_axis="expert", data_axes=("data",)).apply
    with jax.set_mesh(
        jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    ):
        values = jax.device_put(values, P())
        actual = graded(apply)(values, jax.device_put(x, P(("data", "expert"))))
    assert_close(actual, expected, 2e-6)


def test_frozen_experts_leave_their_gradients() -> None:
    config = MegaMoEConfig(precision="float32", trainable_experts=False)
    functions = MODULES["nnx"](**OPTIONS, config=config)
    values = functions.init(0)
    _, (gradients, _) = graded(functions.apply)(values, make_x(2, 3))
    for name, gradient in gradients.items():
        assert bool(jnp.any(gradient != 0)) == (name not in ("w_gate", "w_up", "w_down")), name


def test_sizes_are_those_of_the_arguments() -> None:
    values = MODULES["nnx"](**OPTIONS).init(0)
    assert {n: v.shape for n, v in values.items() if n.startswith("shared")} == {
        "shared_w_gate": (H, S),
        "shared_w_up": (H, S),
        "shared_w_down": (S, H),
        "shared_router": (H, 1),
    }
    assert values["w_gate"].shape == (E, H, I) and K < E
