"""Both Flax modules in scan over layers and remat: a plain loop's values, gradients and loads."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe.config import RouterConfig
from jax_megamoe.linen import STATE, MegaMoE, MegaMoEAux
from tests.modules import FLOAT32, MODULES, E, H, I, K, Values, assert_close, graded, make_x

NUM_LAYERS = 3
SHARED = {"shared_intermediate_size": 4, "shared_gate": True}
BIASED: dict[str, Any] = {
    **SHARED,
    "router_config": RouterConfig(scores="sigmoid", selection_bias=True),
}


def stack_of(name: str, seed: int = 0) -> Values:
    """The values of NUM_LAYERS layers with different biases, on a leading dimension."""
    layers = [MODULES[name](**BIASED).init(seed + i) for i in range(NUM_LAYERS)]
    stack = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    bias = np.random.default_rng(5).normal(size=(NUM_LAYERS, E))
    return {**stack, "selection_bias": jnp.asarray(bias, jnp.float32)}


def looped(apply: Any, stack: Values, x: jax.Array) -> tuple[jax.Array, MegaMoEAux]:
    auxs = []
    for i in range(NUM_LAYERS):
        y, aux = apply(jax.tree.map(lambda a, i=i: a[i], stack), x)
        x = x + y
        auxs.append(aux)
    return x, jax.tree.map(lambda *a: jnp.stack(a), *auxs)


def assert_loads_are_counted_once(load: jax.Array) -> None:
    """[L, E] of 8 x 6 tokens (NVIDIA/Megatron-LM #1330: twice under recomputation)."""
    assert load.shape == (NUM_LAYERS, E)
    np.testing.assert_array_equal(np.asarray(load).sum(-1), 8 * 6 * K)


@pytest.mark.parametrize("name", MODULES)
def test_lax_scan_over_stacked_values_with_remat_equals_a_loop(name: str) -> None:
    """On a mesh, against a loop on one device."""
    stack, x = stack_of(name), make_x(8, 6)
    alone = MODULES[name](**BIASED).apply
    expected = graded(lambda stack, x, _: looped(alone, stack, x))(stack, x)
    apply = MODULES[name](**BIASED, expert_axis="expert", data_axes=("data",)).apply

    def scanned(stack: Values, x: jax.Array, _: None) -> tuple[jax.Array, MegaMoEAux]:
        @jax.checkpoint
        def block(x: jax.Array, values: Values) -> tuple[jax.Array, MegaMoEAux]:
            y, aux = apply(values, x)
            return x + y, aux

        return jax.lax.scan(block, x, stack)

    auto = (AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "expert"), axis_types=auto)):
        actual = graded(scanned)(stack, jax.device_put(x, P(("data", "expert"))))
    assert_close(actual, expected, 1e-5)
    assert_loads_are_counted_once(actual[0][1][1].load)


class Block(nn.Module):
    """A residual layer, the body of a scan."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, MegaMoEAux]:
        layer = MegaMoE(H, I, E, K, config=FLOAT32, expert_axis="expert", **BIASED, name="experts")
        y, aux = layer(x)
        return x + y, aux


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_nn_scan_with_nn_remat_equals_a_loop(axis_type: AxisType) -> None:
    """Boxes get the layers' axis; the bias is scanned over, and what is sown is stacked."""
    scan = nn.scan(
        nn.remat(Block),
        variable_axes={"params": 0, STATE: 0, "intermediates": 0},
        split_rngs={"params": True},
        length=NUM_LAYERS,
        metadata_params={nn.PARTITION_NAME: None},
    )
    model, x, key = scan(), make_x(8, 6), jax.random.key(0)
    with jax.set_mesh(mesh := jax.make_mesh((2,), ("expert",), axis_types=(axis_type,))):
        abstract = jax.eval_shape(model.init, key, x, None)
        shardings = nn.get_sharding(abstract, mesh)
        variables = jax.jit(model.init, out_shardings=shardings)(key, x, None)
        box = variables["params"]["experts"]["w_gate"]
        assert box.names == (None, "expert", None, None)
        assert box.value.addressable_shards[0].data.shape == (NUM_LAYERS, E // 2, H, I)
        actual = graded(lambda variables, x, _: model.apply(variables, x, None))(variables, x)
        _, sown = model.apply(variables, x, None, mutable=["intermediates"])
    stack = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), nn.unbox(variables))
    assert np.ptp(stack["params"]["experts"]["router"], axis=0).min() > 0  # layers are drawn apart
    alone = MegaMoE(H, I, E, K, config=FLOAT32, **BIASED)

    def apply(values: Any, x: jax.Array) -> Any:
        return alone.apply({name: value["experts"] for name, value in values.items()}, x)

    expected = graded(lambda stack, x, _: looped(apply, stack, x))(stack, x)
    assert_close(nn.unbox(actual), expected, 1e-5)
    load = actual[0][1][1].load
    assert_loads_are_counted_once(load)
    sown_aux: Any = sown["intermediates"]["experts"]["aux"][0]
    np.testing.assert_array_equal(sown_aux.load, load)
