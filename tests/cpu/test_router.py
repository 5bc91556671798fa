"""The router against a dense float64 router in NumPy, its ties, its padding and its refusals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe.router import route
from tests.refusals import refusal
from tests.remat import ROUTING_POLICIES


def route_float64(logits, num_choices, renormalize=True, mask=None):
    """The definition, token by token; returns the fields of Routing in order."""
    num_experts = logits.shape[-1]
    logits = np.asarray(logits, np.float64).reshape(-1, num_experts)
    num_tokens = len(logits)
    mask = np.ones(num_tokens, bool) if mask is None else np.asarray(mask).reshape(-1)
    idx = np.full((num_tokens, num_choices), -1)
    weight = np.zeros((num_tokens, num_choices))
    load, score_sum, z_sum = np.zeros(num_experts, int), np.zeros(num_experts), 0.0
    for t in np.flatnonzero(mask):
        exp = np.exp(logits[t] - logits[t].max())
        probs = exp / exp.sum()
        idx[t] = np.argsort(-logits[t], kind="stable")[:num_choices]
        weight[t] = probs[idx[t]] / (probs[idx[t]].sum() if renormalize else 1.0)
        load += np.bincount(idx[t], minlength=num_experts)
        score_sum += probs
        z_sum += (np.log(exp.sum()) + logits[t].max()) ** 2
    n = max(mask.sum(), 1)
    return idx, weight, num_experts * np.sum(load / n * score_sum / n), z_sum / n, load


def random_logits(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "num_choices"), [(8, 2), (128, 8), (5, 5), (7, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_matches_the_definition(num_experts, num_choices, renormalize, masked):
    logits = random_logits((3, 17, num_experts), seed=num_experts)
    mask = np.random.default_rng(1).random((3, 17)) < 0.6 if masked else None
    routing = jax.jit(lambda x, m: route(x, num_choices, renormalize=renormalize, mask=m))(
        logits, mask
    )
    idx, weight, balance, z, load = route_float64(logits, num_choices, renormalize, mask)
    np.testing.assert_array_equal(routing.expert_idx.reshape(idx.shape), idx)
    np.testing.assert_allclose(
        routing.expert_weight.reshape(idx.shape), weight, rtol=2e-6, atol=1e-9
    )
    np.testing.assert_allclose(routing.load_balance_loss, balance, rtol=1e-6)
    np.testing.assert_allclose(routing.z_loss, z, rtol=1e-6)
    np.testing.assert_array_equal(routing.load, load)
    dtypes = [a.dtype for a in routing]
    assert dtypes == [jnp.int32, jnp.float32, jnp.float32, jnp.float32, jnp.int32]


@pytest.mark.parametrize(("renormalize", "right"), [(True, 1.2689414), (False, 1.0593262)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_order_of_softmax_and_renormalisation(renormalize, right, dtype):
    routing = route(jnp.array([[2, 1, 0, 0]], dtype), 2, renormalize=renormalize)
    y = np.sum(np.asarray(routing.expert_weight) * (np.asarray(routing.expert_idx) + 1))
    np.testing.assert_allclose(y, right, rtol=1e-6)
    assert routing.expert_weight.dtype == jnp.float32


def test_an_even_load_gives_k_and_a_collapsed_one_gives_e():
    even = 20.0 * np.eye(8, dtype=np.float32) + 20.0 * np.roll(np.eye(8, dtype=np.float32), 1, 1)
    np.testing.assert_allclose(route(jnp.array(even), 2).load_balance_loss, 2.0, rtol=1e-6)
    collapsed = jnp.zeros((8, 8)).at[:, 3].set(200.0)
    np.testing.assert_allclose(route(collapsed, 1).load_balance_loss, 8.0, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e38])
def test_ties_go_to_the_lowest_id(value):
    logits = jnp.full((4, 9), value, jnp.float32).at[1, 4].set(-value)  # 0.0 and -0.0 tie too
    expected = np.tile(np.arange(3), (4, 1))
    if value != 0:
        expected[1] = [4, 0, 1] if value < 0 else [0, 1, 2]
    np.testing.assert_array_equal(jax.jit(lambda x: route(x, 3).expert_idx)(logits), expected)


def test_logits_that_the_softmax_rounds_together_keep_their_order():
    logits = jnp.array([[-200.0, -199.0, 0.0]], jnp.float32)  # both probabilities round to 0
    np.testing.assert_array_equal(route(logits, 2).expert_idx, [[2, 1]])


@pytest.mark.parametrize("renormalize", [True, False])
def test_gradient_against_float64_differences(renormalize):
    logits = random_logits((6, 5), seed=3)
    mask = jnp.array([True, True, False, True, True, True])
    cotangent = random_logits((6, 2), seed=4)

    def loss(x):
        r = route(x, 2, renormalize=renormalize, mask=mask)
        return jnp.sum(r.expert_weight * cotangent) + 0.3 * r.load_balance_loss + 0.1 * r.z_loss

    def loss_float64(x):
        _, weight, balance, z, _ = route_float64(x, 2, renormalize, mask)
        return np.sum(weight * cotangent) + 0.3 * balance + 0.1 * z

    step = 1e-6
    expected = np.zeros_like(logits, np.float64)
    for t, e in np.ndindex(*logits.shape):
        delta = np.zeros(logits.shape)
        delta[t, e] = step
        expected[t, e] = (loss_float64(logits + delta) - loss_float64(logits - delta)) / (2 * step)
    gradient = np.asarray(jax.jit(jax.grad(loss))(logits))
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    np.testing.assert_array_equal(gradient[2], 0.0)


def test_padding_reaches_nothing():
    logits = random_logits((10, 6))
    mask = jnp.arange(10) < 7
    dirty = np.where(np.asarray(mask)[:, None], logits, np.nan)

    def loss(x, m):
        r = route(x, 2, mask=m)
        return jnp.sum(r.expert_weight**2) + r.load_balance_loss + r.z_loss, r

    (_, padded), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.array(dirty), mask)
    (_, short), short_gradient = jax.value_and_grad(loss, has_aux=True)(logits[:7], None)
    np.testing.assert_array_equal(padded.expert_idx[7:], -1)
    np.testing.assert_array_equal(padded.expert_weight[7:], 0.0)
    np.testing.assert_array_equal(padded.expert_idx[:7], short.expert_idx)
    np.testing.assert_array_equal(padded.load, short.load)
    np.testing.assert_allclose(padded.load_balance_loss, short.load_balance_loss, rtol=1e-6)
    np.testing.assert_allclose(padded.z_loss, short.z_loss, rtol=1e-6)
    np.testing.assert_array_equal(gradient[7:], 0.0)
    np.testing.assert_allclose(gradient[:7], short_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_without_a_token_everything_is_zero(num_tokens):
    mask = jnp.zeros((num_tokens,), bool)
    values, gradient = jax.value_and_grad(
        lambda x: route(x, 2, mask=mask).load_balance_loss + route(x, 2, mask=mask).z_loss
    )(jnp.ones((num_tokens, 5)))
    assert values == 0.0
    np.testing.assert_array_equal(gradient, 0.0)
    routing = route(jnp.ones((num_tokens, 5)), 2, mask=mask)
    np.testing.assert_array_equal(routing.load, 0)
    assert not np.isnan(route(jnp.ones((num_tokens, 5)), 2).load_balance_loss)


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_recomputed_ties_route_the_same(policy):
    """Two identical gate columns and repeated rows; the load counts each choice once."""
    rng = np.random.default_rng(0)
    gate = rng.normal(size=(32, 8)).astype(np.float32)
    gate[:, 5] = gate[:, 2]
    x = np.repeat(rng.normal(size=(64, 32)), 4, axis=0).astype(np.float32)
    tables = jnp.asarray(rng.normal(size=(8, 32)), jnp.float32)

    def layer(gate, x):
        r = route(x @ gate, 2)
        scale = jnp.sum(tables[r.expert_idx] * r.expert_weight[..., None], axis=-2)
        return x * jnp.tanh(scale), r

    def loss(layer):
        def f(gate, x):
            y, r = layer(gate, x)
            return jnp.sum(jnp.sin(y)) + r.load_balance_loss + r.z_loss, (r.expert_idx, r.load)

        return jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))

    plain = loss(layer)(gate, x)
    remat = loss(jax.checkpoint(layer, policy=policy))(gate, x)
    jax.tree.map(np.testing.assert_array_equal, plain, remat)
    (_, (ids, load)), _ = remat
    assert np.any(np.asarray(ids) == 2)
    ids, load = np.asarray(ids), np.asarray(load)
    np.testing.assert_array_equal(load, np.bincount(ids.ravel(), minlength=8))
    with_5 = (ids == 5).any(-1)
    np.testing.assert_array_equal((ids == 2).any(-1) | ~with_5, True)  # 5 never without 2


def test_one_renormalised_choice_leaves_the_router_without_gradient():
    """With K = 1 the weight is p / p; without renormalisation the gradient is there."""
    logits = random_logits((16, 4))
    cotangent = random_logits((16, 1), seed=1)

    def size(renormalize):
        def loss(x):
            return jnp.sum(cotangent * route(x, 1, renormalize=renormalize).expert_weight)

        return float(jnp.abs(jax.grad(loss)(logits)).max())

    assert size(True) < 1e-6
    assert size(False) > 1e-2


ONES = np.ones((3, 4), np.float32)
WIDE = np.ones((3, 1024), np.float32)
# logits, num_choices, mask -> the exception, and what its message must name in this order.
REFUSALS = {
    "integer_logits": (np.ones((3, 4), np.int32), 2, None, TypeError, r"logits.*int32.*floating"),
    "scalar_logits": (np.float32(1), 1, None, ValueError, r"logits.*\(\).*\[\.\.\., E\]"),
    "no_experts": (np.ones((3, 0), np.float32), 1, None, ValueError, r"logits.*E = 0.*1\.\.512"),
    "too_many_experts": (WIDE, 2, None, ValueError, r"logits.*E = 1024.*1\.\.512"),
    "too_many_choices": (ONES, 5, None, ValueError, r"num_choices.*5.*1\.\.4"),
    "above_the_limit": (WIDE[:, :64], 33, None, ValueError, r"num_choices.*33.*1\.\.32"),
    "zero_choices": (ONES, 0, None, ValueError, r"num_choices.*0.*1\.\.4"),
    "negative_choices": (ONES, -1, None, ValueError, r"num_choices.*-1.*1\.\.4"),
    "float_choices": (ONES, 2.0, None, TypeError, r"(?s)num_choices.*2\.0.*int"),
    "bool_choices": (ONES, True, None, TypeError, r"num_choices.*True.*int"),
    "int_mask": (ONES, 2, np.ones(3, np.int32), TypeError, r"mask.*int32.*bool"),
    "short_mask": (ONES, 2, np.ones(2, bool), ValueError, r"mask.*\(2,\).*\(3,\)"),
    "wide_mask": (ONES, 2, np.ones((3, 1), bool), ValueError, r"mask.*\(3, 1\).*\(3,\)"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    logits, num_choices, mask, error, message = REFUSALS[name]
    mask = None if mask is None else jnp.asarray(mask)
    with pytest.raises(error, match=message):
        route(jnp.asarray(logits), num_choices, mask=mask)


# Changed arguments of a good call -> what is refused: argument, what it was, what it may be.
ARRAY = r"a jax\.Array or a numpy\.ndarray"
NO_ARRAYS_OR_FLAGS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "logits a list": ({"logits": [[1.0, 2.0]]}, "logits", "a list", ARRAY),
    "logits None": ({"logits": None}, "logits", "a NoneType", ARRAY),
    "logits masked": ({"logits": np.ma.ones((3, 4))}, "logits", "a MaskedArray", ARRAY),
    "logits other byte order": (
        {"logits": np.ones((3, 4), np.dtype(np.float32).newbyteorder())},
        "logits",
        "of dtype .f4",
        "byte order",
    ),
    "mask a list": ({"mask": [True, True, False]}, "mask", "a list", ARRAY),
    "mask True": ({"mask": True}, "mask", "a bool", ARRAY),
    "renormalize a string": (
        {"renormalize": "no"},
        "renormalize",
        r"'no' \(str\)",
        "True or False",
    ),
    "renormalize None": ({"renormalize": None}, "renormalize", "None", "True or False"),
    "num_choices a string": (
        {"num_choices": "2"},
        "num_choices",
        r"'2' \(str\)",
        r"an int in 1\.\.4",
    ),
}


@pytest.mark.parametrize("name", NO_ARRAYS_OR_FLAGS)
def test_refuses_what_is_no_array_or_no_flag(name):
    change, argument, was, may_be = NO_ARRAYS_OR_FLAGS[name]
    call = functools.partial(route, **{"logits": ONES, "num_choices": 2, **change})
    with refusal(TypeError, argument, was, may_be):
        call()


def test_refuses_a_traced_flag():
    with refusal(TypeError, "renormalize", "Tracer", "True or False, static"):
        jax.eval_shape(lambda flag: route(jnp.asarray(ONES), 2, renormalize=flag), np.True_)
