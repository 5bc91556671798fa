"""What `route` warns of and refuses: the argument, what it was, what it may be."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import RouterConfig, presets, route
from tests.refusals import refusal, with_fields

CONSTANT = [
    (RouterConfig(), r"num_choices = 1 with renormalize = True in config.*renormalize=False"),
    (RouterConfig(scores="sigmoid", scale=2.5), r"renormalize = True.*renormalize=False"),
    (presets.GPT_OSS, r"scored = 'chosen' and a softmax.*scored='all' or scores='sigmoid'"),
]
TRAINABLE = [
    RouterConfig(renormalize=False),
    RouterConfig(scores="sigmoid", renormalize=False),
    RouterConfig(scores="sigmoid", scored="chosen", renormalize=False),
]


def size_of_gradient(config: RouterConfig, num_choices: int = 1) -> float:
    """Of a loss of the weights alone, the largest element."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(16, 4)), jnp.float32)
    cotangent = jnp.asarray(rng.normal(size=(16, num_choices)), jnp.float32)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(cotangent * route(x, num_choices, config).expert_weight)

    return float(jnp.abs(jax.grad(loss)(logits)).max())


@pytest.mark.parametrize(("config", "message"), CONSTANT)
def test_26_a_weight_that_is_constant_warns(config: RouterConfig, message: str) -> None:
    """jingyaogong/minimind PR #859: a renormalised choice of one leaves the router untrained."""
    with pytest.warns(UserWarning, match=message):
        size = size_of_gradient(config)
    assert size < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert size_of_gradient(config, num_choices=2) > 1e-2


@pytest.mark.parametrize("config", TRAINABLE)
def test_26_a_weight_that_trains_does_not_warn(config: RouterConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert size_of_gradient(config) > 1e-2


RAW = RouterConfig(renormalize=False)
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
        route(jnp.asarray(logits), num_choices, RAW, mask=mask)


# Changed arguments of a good call -> what is refused: argument, what it was, what it may be.
ARRAY = r"a jax\.Array or a numpy\.ndarray"
NO_ARRAYS: dict[str, tuple[dict[str, Any], str, str, str]] = {
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
    "num_choices a string": (
        {"num_choices": "2"},
        "num_choices",
        r"'2' \(str\)",
        r"an int in 1\.\.4",
    ),
}


@pytest.mark.parametrize("name", NO_ARRAYS)
def test_refuses_what_is_no_array(name):
    change, argument, was, may_be = NO_ARRAYS[name]
    call = functools.partial(route, **{"logits": ONES, "num_choices": 2, **change})
    with refusal(TypeError, argument, was, may_be):
        call()


BIAS = jnp.zeros(4)
BIASED = RouterConfig(scores="sigmoid", selection_bias=True)
# Changed arguments of a good call -> the exception, and what it says.
CONFIG_REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str, str, str]] = {
    "a preset's name": ({"config": "deepseek_v3"}, TypeError, "config", "a str", "a RouterConfig"),
    "a class": ({"config": RouterConfig}, TypeError, "config", "a type", "a RouterConfig"),
    "scores": (
        {"config": RouterConfig(scores="tanh")},
        ValueError,
        "config.scores",
        "'tanh'",
        "one of 'softmax', 'sigmoid'",
    ),
    "scored": (
        {"config": RouterConfig(scored="top")},
        ValueError,
        "config.scored",
        "'top'",
        "one of 'all', 'chosen'",
    ),
    "scores no str": (
        {"config": with_fields(RouterConfig(), scores=None)},
        TypeError,
        "config.scores",
        "None",
        "one of 'softmax'",
    ),
    "scale 0": (
        {"config": RouterConfig(scale=0.0)},
        ValueError,
        "config.scale",
        "0.0",
        "finite and above 0",
    ),
    "scale NaN": (
        {"config": RouterConfig(scale=float("nan"))},
        ValueError,
        "config.scale",
        "nan",
        "finite",
    ),
    "scale beyond float32": (
        {"config": RouterConfig(scale=1e39)},
        ValueError,
        "config.scale",
        r"1e\+39",
        "finite.*as a float32",
    ),
    "scale that float32 takes for 0": (
        {"config": RouterConfig(scale=1e-46)},
        ValueError,
        "config.scale",
        "1e-46",
        "above 0, as a float32",
    ),
    "scale beyond float64": (
        {"config": with_fields(RouterConfig(), scale=10**400)},
        ValueError,
        "config.scale",
        "1000",
        "finite",
    ),
    "scale True": (
        {"config": with_fields(RouterConfig(), scale=True)},
        TypeError,
        "config.scale",
        "True",
        "a float",
    ),
    "no group": (
        {"config": RouterConfig(num_groups=0)},
        ValueError,
        "config.num_groups",
        "0",
        r"1\.\.4",
    ),
    "groups that do not divide": (
        {"config": RouterConfig(num_groups=3)},
        ValueError,
        "config.num_groups",
        "3 with E = 4",
        "a divisor of E",
    ),
    "groups of one": (
        {"config": RouterConfig(num_groups=4)},
        ValueError,
        "config.num_groups",
        "4 with E = 4",
        "two experts or more",
    ),
    "more groups than there are": (
        {"config": RouterConfig(num_groups=2, num_chosen_groups=3)},
        ValueError,
        "config.num_chosen_groups",
        "3",
        r"1\.\.2",
    ),
    "more choices than the groups have": (
        {
            "config": RouterConfig(num_groups=4, num_chosen_groups=2),
            "logits": jnp.ones((3, 16)),
            "num_choices": 9,
        },
        ValueError,
        "num_choices",
        r"9 with config\.num_chosen_groups = 2",
        r"1\.\.8",
    ),
    "no bias": ({"config": BIASED}, ValueError, "selection_bias", "None", r"\[E\] = \(4,\)"),
    "a bias unasked": (
        {"selection_bias": BIAS},
        ValueError,
        "selection_bias",
        "config.selection_bias = False",
        "selection_bias=True",
    ),
    "a bias of others": (
        {"config": BIASED, "selection_bias": jnp.zeros(5)},
        ValueError,
        "selection_bias",
        r"\(5,\)",
        r"\(4,\)",
    ),
    "a bias in bf16": (
        {"config": BIASED, "selection_bias": BIAS.astype(jnp.bfloat16)},
        TypeError,
        "selection_bias",
        "bfloat16",
        "float32",
    ),
    "a bias as a list": (
        {"config": BIASED, "selection_bias": [0.0] * 4},
        TypeError,
        "selection_bias",
        "a list",
        ARRAY,
    ),
    "an axis that is not bound": (
        {"axis_name": "data"},
        ValueError,
        "axis_name",
        "'data', which is not bound",
        "jax.shard_map.*None",
    ),
    "an axis twice": ({"axis_name": ("a", "a")}, ValueError, "axis_name", "'a', 'a'", "once"),
    "an axis as a number": ({"axis_name": 0}, TypeError, "axis_name", "0", "name of a mesh axis"),
    "no axes": ({"axis_name": ()}, TypeError, "axis_name", r"\(\)", "name of a mesh axis"),
}
FLAGS = ("renormalize", "selection_bias", "linear_bias")
CONFIG_REFUSALS |= {
    f"{flag} a string": (
        {"config": with_fields(RouterConfig(), **{flag: "no"})},
        TypeError,
        f"config.{flag}",
        r"'no' \(str\)",
        "True or False, static",
    )
    for flag in FLAGS
}


@pytest.mark.parametrize("name", CONFIG_REFUSALS)
def test_refuses_a_config_and_what_does_not_fit_it(name: str) -> None:
    change, error, argument, was, may_be = CONFIG_REFUSALS[name]
    arguments: dict[str, Any] = {"logits": jnp.asarray(ONES), "num_choices": 2, **change}
    with refusal(error, argument, was, may_be):
        route(**arguments)


def test_every_field_of_the_config_is_judged() -> None:
    """A field that is an object of no known type is refused by its name."""
    for field in vars(RouterConfig()):
        config = with_fields(RouterConfig(), **{field: object()})
        with refusal(TypeError, f"config.{field}", "object", ""):
            route(jnp.asarray(ONES), 2, config)


def test_refuses_a_traced_flag() -> None:
    def run(flag: jax.Array) -> Any:
        return route(jnp.asarray(ONES), 2, with_fields(RouterConfig(), renormalize=flag))

    with refusal(TypeError, "config.renormalize", "Tracer", "True or False, static"):
        jax.eval_shape(run, np.True_)
