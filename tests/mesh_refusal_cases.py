"""Bad meshes and axes of the sharded entry, as in tests/refusal_cases.py."""

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jax_megamoe import sharded_mega_moe
from tests.refusal_cases import Refused
from tests.refusals import refusal, sizes, trace


def mesh_of(data: int = 2, expert: int = 4) -> Mesh:
    devices = np.array(jax.devices()[: data * expert]).reshape(data, expert)
    return Mesh(devices, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


BAD_MESH: dict[str, Refused] = {
    "no mesh": ({"mesh": None}, ValueError, "mesh", "not given", r"jax\.set_mesh\(mesh\)"),
    "mesh a string": ({"mesh": "expert"}, TypeError, "mesh", "str", r"a jax\.sharding\.Mesh"),
    "mesh of devices": ({"mesh": jax.devices()}, TypeError, "mesh", "list", "AbstractMesh"),
    "expert_axis not in mesh": (
        {"expert_axis": "ep"},
        ValueError,
        "expert_axis",
        "'ep'",
        r"one of the mesh axes \('data', 'expert'\)",
    ),
    "expert_axis a tuple": (
        {"expert_axis": ("expert",)},
        TypeError,
        "expert_axis",
        r"\('expert',\)",
        "the name of one mesh axis, a str",
    ),
    "expert_axis None": (
        {"expert_axis": None},
        TypeError,
        "expert_axis",
        "None",
        "the name of one mesh axis",
    ),
    "expert_axis of 3 devices": (
        {"mesh": AbstractMesh((3,), ("expert",)), "data_axes": (), **sizes(T=6, E=6)},
        ValueError,
        "expert_axis",
        "an axis of 3 devices",
        "of size one of 1, 2, 4, 8",
    ),
    "expert_axis of 16 devices": (
        {"mesh": AbstractMesh((16,), ("expert",)), "data_axes": (), **sizes(T=16, E=16)},
        ValueError,
        "expert_axis",
        "an axis of 16 devices",
        "of size one of 1, 2, 4, 8",
    ),
    "data_axes a string": (
        {"data_axes": "data"},
        TypeError,
        "data_axes",
        "'data'",
        "a tuple of names",
    ),
    "data_axes None": ({"data_axes": None}, TypeError, "data_axes", "None", "a tuple of names"),
    "data_axes a set": ({"data_axes": {"data"}}, TypeError, "data_axes", "data", "a tuple"),
    "data_axes not in mesh": (
        {"data_axes": ("fsdp",)},
        ValueError,
        "data_axes",
        "'fsdp'",
        r"one of the mesh axes \('data', 'expert'\)",
    ),
    "data_axes a number": (
        {"data_axes": (0,)},
        TypeError,
        "data_axes",
        r"\(0,\)",
        "a tuple of names of mesh axes",
    ),
    "data_axes nested": (
        {"data_axes": (["data"],)},
        TypeError,
        "data_axes",
        r"\['data'\]",
        "a tuple of names of mesh axes",
    ),
    "data_axes repeated": (
        {"data_axes": ("data", "data")},
        ValueError,
        "data_axes",
        r"\('data', 'data'\)",
        "each axis once",
    ),
    "data_axes with the expert axis": (
        {"data_axes": ("data", "expert")},
        ValueError,
        "data_axes",
        r"\('data', 'expert'\)",
        "beside the expert axis 'expert'",
    ),
    "T not divisible": (
        sizes(T=12),
        ValueError,
        "x",
        "leading dimension 12",
        r"multiple of 8: .*\('data', 'expert'\)",
    ),
    "E not divisible": (
        sizes(E=6),
        ValueError,
        "w_gate",
        "E = 6 experts",
        "multiple of 4, the size of the expert axis 'expert'",
    ),
    "an option that is none": (
        {"presicion": "bf16"},
        TypeError,
        "presicion=",
        "given to sharded_mega_moe",
        "one of 'precision', 'activation'",
    ),
    "axis_name": (
        {"axis_name": "expert"},
        TypeError,
        "axis_name=",
        "given to sharded_mega_moe",
        "one of 'precision'",
    ),
}


def refuse_mesh(bad: str) -> str:
    """Asks one of BAD_MESH; returns the text of the refusal, or raises AssertionError."""
    change, error, argument, was, may_be = BAD_MESH[bad]
    arguments = {"expert_axis": "expert", "data_axes": ("data",), "mesh": mesh_of(), **sizes()}
    with refusal(error, argument, was, may_be) as found:
        trace(sharded_mega_moe, {**arguments, **change})
    return str(found.value)
