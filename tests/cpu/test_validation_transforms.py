"""Transformations that the op does not have, refused by name, and the platform of the kernels."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import mega_moe, sharded_mega_moe
from tests import cases, layer
from tests.cases import ROUTINGS
from tests.refusals import E, K, T

NAMES = ("x", "expert_idx", "expert_weight", "w_gate", "w_up", "w_down")
IDS = ROUTINGS["distinct"](tokens=T, choices=K, experts=E)
GOOD: dict[str, Any] = dict(zip(NAMES, cases.normal(IDS, num_experts=E), strict=False))


@pytest.mark.parametrize("name", NAMES)
def test_refuses_vmap_over_any_argument(name: str) -> None:
    with pytest.raises(NotImplementedError, match="vmap of mega_moe is not supported: .* Fold"):
        jax.eval_shape(
            jax.vmap(lambda a: mega_moe(**{**GOOD, name: a})), np.stack([GOOD[name]] * 2)
        )


def _loss(name: str) -> Callable[[Any], Any]:
    """A loss as a function of the named argument."""
    return lambda a: jnp.sum(jnp.sin(layer.bind()(**{**GOOD, name: a})))


FLOAT_NAMES = [name for name in NAMES if name != "expert_idx"]
SHARDED = functools.partial(sharded_mega_moe, expert_axis="expert")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("second", FLOAT_NAMES)
def test_refuses_a_second_derivative_in_any_argument(second: str, sharded: bool) -> None:
    """The gradient in x, differentiated again in each argument."""
    entry: Any = functools.partial(SHARDED, mesh=layer.expert_mesh(2)) if sharded else layer.bind()

    def first(value: Any) -> Any:
        arguments = {**GOOD, second: value}
        grad = jax.grad(lambda x: jnp.sum(jnp.sin(entry(**{**arguments, "x": x}))))
        return jnp.sum(grad(arguments["x"]))

    with pytest.raises(NotImplementedError, match="first derivatives only: grad of grad"):
        jax.eval_shape(jax.grad(first), GOOD[second])


def test_the_way_that_the_refusal_names_works() -> None:
    """A gradient that is a constant of another one, as a penalty's weight or a probe has it."""

    def penalised(x: Any) -> Any:
        constant = jax.grad(_loss("x"))(jax.lax.stop_gradient(x))
        return jnp.sum(constant * x) + _loss("x")(x)

    with pytest.raises(NotImplementedError, match=r"it at jax\.lax\.stop_gradient of its"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(_loss("x"))(x))), GOOD["x"])
    jax.eval_shape(jax.grad(penalised), GOOD["x"])


def test_refuses_hessian() -> None:
    with pytest.raises(NotImplementedError, match="mega_moe"):
        jax.eval_shape(jax.hessian(_loss("x")), GOOD["x"])


@pytest.mark.parametrize("transform", [jax.grad, jax.hessian, jax.jacrev, jax.jacfwd])
def test_refuses_to_transform_a_pullback(transform: Any) -> None:
    """The gradient as a function of the cotangent alone, whose forward has long been done."""
    y, pull = jax.vjp(lambda x: layer.bind()(**{**GOOD, "x": x}), GOOD["x"])
    with pytest.raises(NotImplementedError, match="mega_moe"):
        jax.eval_shape(transform(lambda dy: jnp.sum(pull(dy)[0])), y)


def test_refuses_vmap_of_a_gradient() -> None:
    with pytest.raises(NotImplementedError, match="vmap of mega_moe is not supported"):
        jax.eval_shape(jax.jacrev(lambda x: layer.bind()(**{**GOOD, "x": x})), GOOD["x"])


@pytest.mark.parametrize("transform", ["jvp", "linearize", "jacfwd"])
def test_forward_mode_raises_the_error_of_jax(transform: str) -> None:
    f, x = _loss("w_down"), GOOD["w_down"]
    calls = {
        "jvp": lambda: jax.jvp(f, (x,), (x,)),
        "linearize": lambda: jax.linearize(f, x)[1](x),
        "jacfwd": lambda: jax.jacfwd(f)(x),
    }
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp"):
        calls[transform]()


@pytest.mark.parametrize("jit", [False, True])
def test_refuses_the_kernels_without_a_gpu(jit: bool) -> None:
    batch = cases.normal(IDS, num_experts=E, hidden=64, intermediate=64)
    op = layer.bind(backend="cuda")
    with pytest.raises(ValueError, match="backend was 'cuda' .* platform 'cpu'; it may be 'ref"):
        (jax.jit(op) if jit else op)(*batch[:6])
