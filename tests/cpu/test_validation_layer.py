"""Misuse of the Flax layers, refused before a parameter is drawn or a token is routed.

One table for both modules: they refuse the same, in the same words.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from jax_megamoe import linen
from jax_megamoe.config import MegaMoEConfig, RouterConfig
from jax_megamoe.nnx import MegaMoE
from tests.refusals import refusal, with_fields

H, I, E, K = 16, 12, 8, 2
GOOD: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": I,
    "num_experts": E,
    "num_experts_per_token": K,
}
MODULES = {"nnx": functools.partial(MegaMoE, rngs=nnx.Rngs(0)), "linen": linen.MegaMoE}

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
    "expert_bias a number": (
        {"expert_bias": 1},
        TypeError,
        "expert_bias",
        r"1 \(int\)",
        "True or False, static",
    ),
    "config.activation unknown": (
        {"config": with_fields(MegaMoEConfig(), activation="relu")},
        ValueError,
        "activation",
        "'relu'",
        "one of 'swiglu', 'geglu', or a ClampedSwiGLU",
    ),
    **{
        f"{argument} of no whole FP8 groups": (
            {
                "hidden_size": 256,
                "intermediate_size": 256,
                argument: 192,
                "config": MegaMoEConfig(precision="fp8_block"),
            },
            ValueError,
            argument,
            f"of {letter} = 192 with precision='fp8_block'",
            f"of {letter} a multiple of 128 there",
        )
        for argument, letter in (("hidden_size", "H"), ("intermediate_size", "I"))
    },
    "biases on the kernels of fp8_block": (
        {
            "hidden_size": 128,
            "intermediate_size": 128,
            "expert_bias": True,
            "config": MegaMoEConfig(precision="fp8_block", backend="cuda"),
        },
        ValueError,
        "precision",
        "'fp8_block' with backend='cuda' and biases",
        "'bf16' there",
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
    "shared_intermediate_size None": (
        {"shared_intermediate_size": None},
        TypeError,
        "shared_intermediate_size",
        "None",
        r"an int in 0\.\.",
    ),
    "shared_intermediate_size negative": (
        {"shared_intermediate_size": -1},
        ValueError,
        "shared_intermediate_size",
        "-1",
        r"in 0\.\.",
    ),
    "shared_gate a number": (
        {"shared_intermediate_size": 8, "shared_gate": 1},
        TypeError,
        "shared_gate",
        r"1 \(int\)",
        "True or False",
    ),
    "shared_gate of nothing": (
        {"shared_gate": True},
        ValueError,
        "shared_gate",
        "True with shared_intermediate_size = 0",
        "False",
    ),
}


@pytest.mark.parametrize("bad", BAD_CONSTRUCTION)
@pytest.mark.parametrize("name", MODULES)
def test_construction_refuses(name, bad):
    change, error, argument, was, may_be = BAD_CONSTRUCTION[bad]
    make = functools.partial(MODULES[name], **{**GOOD, **change})
    with refusal(error, argument, was, may_be):
        make()


def test_rngs_are_those_of_nnx():
    with refusal(TypeError, "rngs", "a int", r"a flax\.nnx\.Rngs"):
        MODULES["nnx"](**GOOD, rngs=0)


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
@pytest.mark.parametrize("name", MODULES)
def test_construction_refuses_a_mesh_that_does_not_fit(
    name, axis_type, mesh, options, argument, was, may_be
):
    devices = np.array(jax.devices()[: math.prod(mesh.values())]).reshape(*mesh.values())
    make = functools.partial(MODULES[name], **{**GOOD, "expert_axis": "expert", **options})
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


def call(name, *arguments, **options):
    """A layer of either module is made and called."""
    layer = MODULES[name](**GOOD, **options)
    layer(*arguments) if name == "nnx" else layer.init(jax.random.key(0), *arguments)


@pytest.mark.parametrize("bad", BAD_CALLS)
@pytest.mark.parametrize("name", MODULES)
def test_calls_refuse(name, bad):
    arguments, error, argument, was, may_be = BAD_CALLS[bad]
    with refusal(error, argument, was, may_be):
        call(name, *arguments)


@pytest.mark.parametrize("name", MODULES)
def test_integer_activations_are_refused_whatever_the_dtype(name):
    """A dtype= that casts them would hide token ids passed for embeddings."""
    with refusal(TypeError, "x", "of dtype int32", "of a floating dtype"):
        call(name, jnp.ones((4, H), jnp.int32), dtype=jnp.bfloat16)
