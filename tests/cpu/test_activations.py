"""Each activation: its formula against those of the models, and the layer against float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import ClampedSwiGLU
from jax_megamoe.activation import GatedUnit, gated, gated_unit, gated_with_gradients
from tests import cases, compare, layer
from tests.cases import F32, ROUTINGS
from tests.gated import UNITS, Biases, geglu, normal_biases, swiglu

E = 8
IDS = ROUTINGS["invalid"](tokens=150, choices=3, experts=E)
# What every model has: 0, both sides of it, a limit of 0.75 and of 7 and their neighbours.
VALUES = np.array([0, -0.0, 0.5, -0.5, 0.75, -0.75, 0.8, 3, -3, 6.99, 7, -7, 7.01, 20, -20, 100])
G, U = (a.astype(F32).ravel() for a in np.meshgrid(VALUES, VALUES))


@pytest.mark.parametrize("activation", UNITS)
def test_the_formulas_of_these_tests_have_their_own_slopes(activation: Any) -> None:
    """By differences in float64, off the limits, where there is no slope."""
    rng, step = np.random.default_rng(0), 1e-6
    g, u = 4 * rng.standard_normal((2, 1000))
    _, slope_g, slope_u = UNITS[activation](g, u)
    for slope, dg, du in ((slope_g, step, 0), (slope_u, 0, step)):
        ends = [UNITS[activation](g + s * dg, u + s * du)[0] for s in (1, -1)]
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("activation", UNITS)
def test_the_one_formula_is_that_of_each_model(activation: Any) -> None:
    unit, right = gated_unit(activation), UNITS[activation](*(a.astype(np.float64) for a in (G, U)))
    dh = np.random.default_rng(0).standard_normal(G.shape).astype(F32)
    h, dg, du = gated_with_gradients(unit, *map(jnp.asarray, (G, U, dh)))
    for found, expected in ((h, right[0]), (dg, dh * right[1]), (du, dh * right[2])):
        np.testing.assert_allclose(found, expected, rtol=3e-6, atol=1e-6)
    compare.assert_bitwise(gated(unit, jnp.asarray(G), jnp.asarray(U)), h)


@pytest.mark.parametrize("activation", UNITS)
def test_automatic_differentiation_agrees_at_the_limits_too(activation: Any) -> None:
    """As the shared experts of the modules are differentiated."""
    unit = gated_unit(activation)
    dh = jnp.ones(G.shape)
    _, *right = gated_with_gradients(unit, jnp.asarray(G), jnp.asarray(U), dh)
    found = jax.vjp(functools.partial(gated, unit), jnp.asarray(G), jnp.asarray(U))[1](dh)
    for a, b in zip(found, right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_geglu_is_jax_nn_gelu() -> None:
    h = gated(gated_unit("geglu"), jnp.asarray(G), jnp.asarray(U))
    np.testing.assert_allclose(h, jax.nn.gelu(G) * U, rtol=1e-5, atol=1e-5)


def test_constants() -> None:
    assert gated_unit("swiglu") == GatedUnit(alpha=1, beta=0, limit=np.inf, offset=0)
    right = GatedUnit(1.702, 0, 7, 1)
    assert gated_unit(ClampedSwiGLU()) == right
    alpha, beta, limit, offset = gated_unit("geglu")
    np.testing.assert_allclose((alpha, beta), (1.5957691216057308, 0.07135481627260025))
    assert (limit, offset) == (np.inf, 0)


@pytest.mark.parametrize("activation", UNITS)
def test_no_finite_gate_makes_nan(activation: Any) -> None:
    """Neither 0 times the overflow of g^3, nor infinity on its way through a limit."""
    g = jnp.asarray([-3e38, -1e20, -1e13, -90, -30, 30, 1e13, 1e20, 3e38], jnp.float32)
    zero, one = jnp.zeros_like(g), jnp.ones_like(g)
    h, dg, du = gated_with_gradients(gated_unit(activation), g, zero, one)
    assert np.isfinite(h).all() and np.isfinite(dg).all() and np.isfinite(du).all()
    # u = 0 leaves the offset of it, and where there is one, a limit takes the gradient.
    np.testing.assert_allclose(dg, np.zeros(9), atol=1e-6)


def test_no_gradient_passes_a_limit_whatever_comes() -> None:
    beyond = jnp.asarray([8, jnp.inf, 1e30], jnp.float32)
    bad = jnp.asarray([jnp.nan, 1, jnp.inf], jnp.float32)
    _, dg, du = gated_with_gradients(gated_unit(ClampedSwiGLU()), beyond, -beyond, bad)
    np.testing.assert_array_equal((dg, du), np.zeros((2, 3)))
    nan = jnp.full(3, jnp.nan)
    h, dg, du = gated_with_gradients(gated_unit(ClampedSwiGLU()), nan, nan, jnp.ones(3))
    assert np.isnan(h).all() and np.isnan(dg).all() and np.isnan(du).all()


@functools.cache
def batch_and_biases(third: bool) -> tuple[cases.Batch, Biases]:
    """With `third` of data that bf16 does not hold."""
    batch = cases.normal(IDS, num_experts=E, hidden=64, intermediate=32)
    if third:
        names = ("x", "w_gate", "w_up", "w_down", "dy")
        batch = batch._replace(**{n: getattr(batch, n) * F32.type(4 / 3) for n in names})
    return batch, normal_biases(batch.w_gate)


def relative_errors(found: Any, right: Any) -> dict[str, float]:
    """Of y and each gradient: root mean square of the deviation over that of the right value."""
    names = (*cases.Results._fields, *Biases._fields)
    pairs = zip((*found[0], *found[1]), (*right[0], *right[1]), strict=True)
    return {
        name: float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))
        for name, (a, b) in zip(names, pairs, strict=True)
    }


@pytest.mark.parametrize("activation", UNITS)
def test_float32_agrees_with_float64(activation: Any) -> None:
    batch, biases = batch_and_biases(False)
    found = layer.run_biased(batch, biases, precision="float32", activation=activation)
    errors = relative_errors(found, cases.dense_of(batch, UNITS[activation], biases))
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("activation", UNITS)
def test_without_biases(activation: Any) -> None:
    batch, _ = batch_and_biases(False)
    found = layer.run(batch, precision="float32", activation=activation)
    right, _ = cases.dense_of(batch, UNITS[activation], cases.no_biases(batch.w_gate))
    compare.assert_within(found, right, 1e-5)


@functools.cache
def bf16_results(activation: Any) -> tuple[cases.Results, Biases]:
    return layer.run_biased(*batch_and_biases(True), activation=activation)


@pytest.mark.parametrize("activation", UNITS)
def test_bf16_rounds_where_the_contract_says(activation: Any) -> None:
    """What is left is float32 sums that fall on the other side of a rounding, now and then."""
    batch, biases = batch_and_biases(True)
    right = cases.dense_of(batch, UNITS[activation], biases, cases.ROUNDINGS)
    errors = relative_errors(bf16_results(activation), right)
    assert max(errors.values()) < 4e-4, errors


@pytest.mark.parametrize("change", ["biases", *cases.ROUNDINGS])
def test_a_rounding_more_or_less_would_be_seen(change: str) -> None:
    """Rounded biases, too, which the contract has as they are."""
    batch, biases = batch_and_biases(True)
    rounded = {*cases.ROUNDINGS} ^ {change}
    activation = ClampedSwiGLU()
    wrong = cases.dense_of(batch, UNITS[activation], biases, rounded)
    errors = relative_errors(bf16_results(activation), wrong)
    assert max(errors.values()) > 8e-4, errors


def test_another_activation_would_be_seen() -> None:
    batch, biases = batch_and_biases(False)
    found = cases.dense_of(batch, swiglu, biases)
    errors = relative_errors(found, cases.dense_of(batch, geglu, biases))
    assert errors["y"] > 0.05 and errors["dw_gate"] > 0.05
