"""precision="fp8_block" of both Flax modules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe import linen, mega_moe, quantize_expert_weights, route
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.nnx import MegaMoE
from tests.modules import Values, assert_bitwise, assert_close

H, I, E, K, S = 128, 256, 8, 2, 10
FP8 = MegaMoEConfig(precision="fp8_block")
NAMES = ("w_gate", "w_up", "w_down")


def of_nnx(seed: int = 0, **options: Any) -> tuple[Values, Any]:
    """The values of a layer, and (values, x, quantised weights) -> y."""

    def make() -> MegaMoE:
        return MegaMoE(H, I, E, K, **{"config": FP8, **options}, rngs=nnx.Rngs(seed))

    def apply(values: Values, x: Any, quantized: Any = None) -> Any:
        layer = nnx.eval_shape(make)
        for name, value in values.items():
            getattr(layer, name).set_value(value)
        return layer(x, quantized_experts=quantized)[0]

    return dict(nnx.to_pure_dict(nnx.state(make()))), apply


def of_linen(seed: int = 0, **options: Any) -> tuple[Values, Any]:
    module = linen.MegaMoE(H, I, E, K, **{"config": FP8, **options})
    values, _ = of_nnx(seed, **options)

    def apply(values: Values, x: Any, quantized: Any = None) -> Any:
        y, _ = module.apply({"params": values}, x, quantized_experts=quantized)  # type: ignore[misc]
        return y

    return values, apply


MODULES = {"nnx": of_nnx, "linen": of_linen}


def make_x(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (*shape, H))


def quantize(values: Values) -> Any:
    return quantize_expert_weights(*(values[name] for name in NAMES))


def graded(apply: Any) -> Any:
    """(values, x, quantised weights) -> y and the gradients of values and x, as one program."""

    def loss(values: Values, x: Any, quantized: Any) -> Any:
        y = apply(values, x, quantized)
        return jnp.sum(y * jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize(("name", "save"), [("nnx", "none"), ("linen", "gate_up")])
def test_the_caller_may_quantise(name: str, save: str) -> None:
    """To the same bits; and what is given is what is multiplied."""
    config = MegaMoEConfig(precision="fp8_block", save=save)
    values, apply = MODULES[name](config=config, shared_intermediate_size=S, expert_bias=True)
    x, run = make_x(3, 8), graded(apply)
    right = run(values, x, None)
    assert_bitwise(run(values, x, quantize(values)), right)
    stale = quantize({n: 2 * values[n] for n in NAMES})
    assert np.mean(np.asarray(run(values, x, stale)[0][1]) != right[0][1]) > 0.9
    assert {n for n, g in right[1][0].items() if not np.any(g)} == set()


@pytest.mark.parametrize("name", MODULES)
def test_it_is_the_op_of_its_routing(name: str) -> None:
    values, apply = MODULES[name]()
    x = make_x(24)
    r = route(jnp.matmul(x, values["router"], precision="highest"), K)
    experts = (values[n] for n in NAMES)
    right = mega_moe(x, r.expert_idx, r.expert_weight, *experts, precision="fp8_block")
    assert_bitwise(apply(values, x), right)


@pytest.mark.parametrize("name", MODULES)
def test_shared_experts_stay_bf16(name: str) -> None:
    """What they add to a layer without routed experts is the same as in precision "bf16"."""
    found = []
    for config in (FP8, MegaMoEConfig()):
        values, apply = MODULES[name](config=config, shared_intermediate_size=S)
        without = values | {n: jnp.zeros_like(values[n]) for n in NAMES}
        found.append(apply(without, make_x(16)))
    assert_bitwise(*found)
    assert np.any(found[0])


@pytest.mark.parametrize(
    ("caller_quantises", "axis_type"), [(False, AxisType.Auto), (True, AxisType.Explicit)]
)
@pytest.mark.parametrize("name", MODULES)
def test_meshes_agree_with_one_device(
    name: str, caller_quantises: bool, axis_type: AxisType
) -> None:
    values, apply = MODULES[name]()
    x = make_x(8, 5)
    expected = graded(apply)(values, x, None)
    _, split = MODULES[name](expert_axis="expert", data_axes=("data",))
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "expert"), axis_types=(axis_type,) * 2)):
        placed, x = jax.device_put((values, x), P())
        quantized = jax.jit(quantize)(placed) if caller_quantises else None
        actual = graded(split)(placed, x, quantized)
    np.testing.assert_array_equal(actual[0][1], expected[0][1])
    # Sums of another order, over tokens.
    assert_close(actual, expected, 1e-4)


@pytest.mark.parametrize("name", MODULES)
def test_another_precision_takes_no_quantised_weights(name: str) -> None:
    values, apply = MODULES[name](config=MegaMoEConfig())
    with pytest.raises(ValueError, match="^quantized_experts: was given with precision='bf16'"):
        apply(values, make_x(4), quantize(values))


@pytest.mark.parametrize("name", MODULES)
def test_it_learns(name: str) -> None:
    """Some steps of descent, each of which quantises its own weights."""
    values, apply = MODULES[name]()
    x = make_x(64)
    target = jnp.cumsum(x, axis=-1) / 10

    @jax.jit
    def step(values: Values) -> tuple[jax.Array, Values]:
        quantized = quantize(values)
        loss = lambda v: jnp.mean((apply(v, x, quantized) - target) ** 2)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(values)
        return value, jax.tree.map(lambda v, g: v - 0.5 * g, values, gradients)

    losses = []
    for _ in range(20):
        value, values = step(values)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0], losses
