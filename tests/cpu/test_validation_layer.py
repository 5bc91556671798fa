"""Misuse of the Flax NNX layer, refused before a parameter is drawn or a token is routed."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from jax_megamoe.config import RouterConfig
from jax_megamoe.nnx import MegaMoE
from tests.refusals import refusal, with_fields

H, I, E, K = 16, 12, 8, 2
GOOD = {
    "hidden_size": H,
    "intermediate_size": I,
    "num_experts": E,
    "num_experts_per_token": K,
    "rngs": nnx.Rngs(0),
}

AXIS = "the name of one mesh axis"
AXES = "a tuple of names of mesh axes"
FLOATS = "one of 'bfloat16', 'float32'"
# Changed arguments of a good construction -> what is refused.
BAD_CONSTRUCTION: dict[str, tuple[dict[str, Any], type[Exception], str, str, str]] = {
    "H a float": ({"hidden_size": 16.0}, TypeError, "hidden_size", r"16\.0", r"an int in 1\.\."),
    "I a string": ({"intermediate_size": "8"}, TypeError, "intermediate_size", "'8'", "an int"),
    "E a bool": ({"num_experts": True}, TypeError, "num_experts", r"True \(bool\)", "an int in"),
    "E above the limit": ({"num_experts": 1024}, ValueError, "num_experts", "1024", r"in 1\.\.512"),
    "K above the limit": (
        {"num_experts": 64, "num_experts_per_token": 33},
        ValueError,
        "num_experts_per_token",
        "33",
        r"in 1\.\.32",
    ),
    "config a dict": ({"config": {}}, TypeError, "config", "dict", "a MegaMoEConfig"),
    "expert_axis a tuple": ({"expert_axis": ("e",)}, TypeError, "expert_axis", "'e'", AXIS),
    "expert_axis a number": ({"expert_axis": 1}, TypeError, "expert_axis", "1", AXIS),
    "data_axes a string": (
        {"expert_axis": "expert", "data_axes": "data"},
        TypeError,
        "data_axes",
        "'data'",
        AXES,
    ),
    "data_axes None": (
        {"expert_axis": "expert", "data_axes": None},
        TypeError,
        "data_axes",
        "None",
        AXES,
    ),
    "data_axes with the expert axis": (
        {"expert_axis": "expert", "data_axes": ("expert",)},
        ValueError,
        "data_axes",
        "'expert'",
        "beside the expert axis 'expert'",
    ),
    "router_config a dict": (
        {"router_config": {"renormalize": False}},
        TypeError,
        "router_config",
        "a dict",
        "a RouterConfig",
    ),
    "router_config.renormalize a string": (
        {"router_config": with_fields(RouterConfig(), renormalize="no")},
        TypeError,
        "router_config.renormalize",
        r"'no' \(str\)",
        "True or False",
    ),
    "router_config with groups of one expert": (
        {"router_config": RouterConfig(num_groups=8)},
        ValueError,
        "router_config.num_groups",
        "8 with E = 8 experts",
        "two experts or more",
    ),
    "dtype unknown": ({"dtype": "bf16"}, TypeError, "dtype", "'bf16'", FLOATS),
    "dtype float16": ({"dtype": jnp.float16}, TypeError, "dtype", "float16", FLOATS),
    "param_dtype float16": (
        {"param_dtype": np.float16},
        TypeError,
        "param_dtype",
        "float16",
        FLOATS,
    ),
    "kernel_init None": (
        {"kernel_init": None},
        TypeError,
        "kernel_init",
        "a NoneType",
        "an initializer",
    ),
    "rngs a seed": ({"rngs": 0}, TypeError, "rngs", "a int", r"a flax\.nnx\.Rngs"),
}


@pytest.mark.parametrize("bad", BAD_CONSTRUCTION)
def test_construction_refuses(bad):
    change, error, argument, was, may_be = BAD_CONSTRUCTION[bad]
    make = functools.partial(MegaMoE, **{**GOOD, **change})
    with refusal(error, argument, was, may_be):
        make()


@pytest.mark.parametrize(
    ("mesh", "options", "argument", "was", "may_be"),
    [
        ({"data": 2}, {}, "expert_axis", "'expert'", r"one of the mesh axes \('data',\)"),
        ({"expert": 2}, {"data_axes": ("data",)}, "data_axes", "'data'", "one of the mesh axes"),
        ({"expert": 3}, {}, "expert_axis", "an axis of 3 devices", "of size one of 1, 2, 4, 8"),
        ({"expert": 4}, {"num_experts": 6}, "num_experts", "E = 6", "a multiple of 4"),
    ],
)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_construction_refuses_a_mesh_that_does_not_fit(
    axis_type, mesh, options, argument, was, may_be
):
    devices = np.array(jax.devices()[: math.prod(mesh.values())]).reshape(*mesh.values())
    make = functools.partial(MegaMoE, **{**GOOD, "expert_axis": "expert", **options})
    with (
        jax.set_mesh(Mesh(devices, tuple(mesh), axis_types=(axis_type,) * len(mesh))),
        refusal(ValueError, argument, was, may_be),
    ):
        make()


BAD_CALLS: dict[str, tuple[tuple[Any, ...], type[Exception], str, str, str]] = {
    "x a list": (([[1.0] * 16],), TypeError, "x", "a list", r"a jax\.Array"),
    "x None": ((None,), TypeError, "x", "a NoneType", r"a jax\.Array"),
    "x a scalar": ((jnp.ones(()),), ValueError, "x", r"shape \(\)", r"\[\.\.\., H\] with H = 16"),
    "mask a list": ((jnp.ones((1, 16)), [True]), TypeError, "mask", "a list", r"a jax\.Array"),
}


@pytest.mark.parametrize("bad", BAD_CALLS)
def test_calls_refuse(bad):
    arguments, error, argument, was, may_be = BAD_CALLS[bad]
    with refusal(error, argument, was, may_be):
        MegaMoE(**GOOD)(*arguments)


def test_integer_activations_are_refused_whatever_the_dtype():
    """A dtype= that casts them would hide token ids passed for embeddings."""
    layer = MegaMoE(**GOOD, dtype=jnp.bfloat16)
    with refusal(TypeError, "x", "of dtype int32", "of a floating dtype"):
        layer(jnp.ones((4, H), jnp.int32))
