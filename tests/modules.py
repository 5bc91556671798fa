"""Both Flax modules as plain functions of their values, so that one test is for both."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_megamoe import linen
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.nnx import MegaMoE, MegaMoEAux

H, I, E, K = 16, 12, 8, 2
FLOAT32 = MegaMoEConfig(precision="float32")
Values = dict[str, jax.Array]


class Functions(NamedTuple):
    """A module of H, I, E, K with its options.

    Attributes:
      init: seed -> its values by name, the selection bias among them.
      apply: (values, x, mask=None) -> y and the aux.
    """

    init: Callable[[int], Values]
    apply: Callable[..., tuple[jax.Array, MegaMoEAux]]


def of_nnx(**options: Any) -> Functions:
    def make(seed: int) -> MegaMoE:
        return MegaMoE(H, I, E, K, **{"config": FLOAT32, **options}, rngs=nnx.Rngs(seed))

    def apply(values: Values, x: jax.Array, mask: Any = None) -> tuple[jax.Array, MegaMoEAux]:
        layer = nnx.eval_shape(lambda: make(0))
        for name, value in values.items():
            getattr(layer, name).set_value(value)
        return layer(x, mask)

    return Functions(lambda seed: dict(nnx.to_pure_dict(nnx.state(make(seed)))), apply)


def of_linen(**options: Any) -> Functions:
    module = linen.MegaMoE(H, I, E, K, **{"config": FLOAT32, **options})

    def init(seed: int) -> Values:
        variables = nn.unbox(jax.jit(module.init)(jax.random.key(seed), make_x(8)))
        return {**variables["params"], **variables.get(linen.STATE, {})}

    def apply(values: Values, x: jax.Array, mask: Any = None) -> tuple[jax.Array, MegaMoEAux]:
        params, bias = dict(values), {}
        if "selection_bias" in params:
            bias["selection_bias"] = params.pop("selection_bias")
        return cast(Any, module.apply({"params": params, linen.STATE: bias}, x, mask))

    return Functions(init, apply)


MODULES = {"nnx": of_nnx, "linen": of_linen}


def make_x(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*shape, H)), jnp.float32)


def loss_of(apply: Callable[..., Any]) -> Callable[..., Any]:
    """(values, x, mask=None) -> a loss that needs y and every loss of the aux; and y, aux."""

    def loss(values: Values, x: jax.Array, mask: Any = None) -> Any:
        y, aux = apply(values, x, mask)
        balance = aux.load_balance_loss.sum() + aux.sequence_balance_loss.sum()
        y32 = y.astype(jnp.float32)
        return jnp.mean(y32 * jnp.sin(y32)) + 0.1 * balance + 0.01 * aux.z_loss.sum(), (y, aux)

    return loss


def graded(apply: Callable[..., Any]) -> Callable[..., Any]:
    """One program: (values, x, mask=None) -> ((loss, (y, aux)), gradients of values and x)."""
    return jax.jit(jax.value_and_grad(loss_of(apply), argnums=(0, 1), has_aux=True))


def assert_bitwise(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_close(actual: Any, expected: Any, tolerance: float) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
