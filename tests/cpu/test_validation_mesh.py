"""Meshes and axes that do not fit, refused while tracing; as in test_validation.py."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_megamoe import mega_moe, sharded_mega_moe
from tests import cases, layer
from tests.cases import ROUTINGS
from tests.refusals import E, K, T, refusal, sizes, trace

NAMES = ("x", "expert_idx", "expert_weight", "w_gate", "w_up", "w_down")
IDS = ROUTINGS["distinct"](tokens=T, choices=K, experts=E)
GOOD: dict[str, Any] = dict(zip(NAMES, cases.normal(IDS, num_experts=E), strict=False))


def mesh_of(data: int = 2, expert: int = 4) -> Mesh:
    devices = np.array(jax.devices()[: data * expert]).reshape(data, expert)
    return Mesh(devices, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


# Of the sharded entry alone.
BAD_MESH: dict[str, tuple[dict[str, Any], type[Exception], str, str, str]] = {
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


@pytest.mark.parametrize("bad", BAD_MESH)
def test_sharded_refuses(bad: str) -> None:
    change, error, argument, was, may_be = BAD_MESH[bad]
    arguments = {"expert_axis": "expert", "data_axes": ("data",), "mesh": mesh_of(), **sizes()}
    with refusal(error, argument, was, may_be):
        trace(sharded_mega_moe, {**arguments, **change})


def test_sharded_refuses_an_axis_that_is_manual_already() -> None:
    spec = PartitionSpec("expert")

    def inside(arrays: dict[str, Any]) -> Any:
        return sharded_mega_moe(**arrays, expert_axis="expert")

    outer = jax.shard_map(inside, mesh=layer.expert_mesh(2), in_specs=spec, out_specs=spec)
    may_be = r"inside shard_map use mega_moe\(axis_name='expert'\)"
    with refusal(ValueError, "expert_axis", "'expert', manual already", may_be):
        jax.eval_shape(outer, sizes())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_refuses_a_mesh_beside_the_one_that_is_set(axis_type: AxisType) -> None:
    other = Mesh(np.array(jax.devices()[:4]), ("other",), axis_types=(axis_type,))
    arguments = {**sizes(), "expert_axis": "expert", "mesh": layer.expert_mesh(2)}
    was = r"Mesh\('expert': 2.* where AbstractMesh\('other': 4.* is set"
    with jax.set_mesh(other), refusal(ValueError, "mesh", was, "left out, or equal to that one"):
        trace(sharded_mega_moe, arguments)


def test_sharded_refuses_a_concrete_mesh_where_some_of_its_axes_are_manual() -> None:
    """The mesh of the enclosing shard_map differs from it by just that."""

    def inside(arrays: dict[str, Any]) -> Any:
        return sharded_mega_moe(**arrays, expert_axis="expert", mesh=mesh_of())

    data, whole = PartitionSpec("data"), PartitionSpec()
    specs = {name: whole if name.startswith("w_") else data for name in NAMES}
    outer = jax.shard_map(
        inside, mesh=mesh_of(), in_specs=(specs,), out_specs=data, axis_names={"data"}
    )
    with refusal(ValueError, "mesh", "Mesh.* where .*Manual.* is set", "left out"):
        jax.eval_shape(outer, sizes())


@pytest.mark.parametrize("name", NAMES)
def test_sharded_refuses_arrays_of_another_explicit_mesh(name: str) -> None:
    devices = np.array(jax.devices())
    other = Mesh(devices, ("other",), axis_types=(AxisType.Explicit,))
    mesh = Mesh(devices.reshape(2, 4), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    split = jax.device_put(GOOD[name], NamedSharding(other, PartitionSpec("other")))
    with (
        jax.set_mesh(mesh),
        refusal(ValueError, name, r"sharded as P.*'other'.* over the mesh", "jax.device_put"),
    ):
        sharded_mega_moe(**{**GOOD, name: split}, expert_axis="expert")


# axis_name, inside a shard_map over the axis "expert" of some devices.
BAD_AXIS: dict[str, tuple[Any, int, type[Exception], str, str]] = {
    "another axis": ("ep", 2, ValueError, "'ep', which is not bound here", "use sharded_mega_moe"),
    "a tuple": (("expert",), 2, TypeError, r"\('expert',\)", "the name of one mesh axis"),
    "a number": (0, 2, TypeError, "0", "the name of one mesh axis"),
    "3 devices": ("expert", 3, ValueError, "an axis of 3 devices", "of size one of 1, 2, 4, 8"),
    "5 devices": ("expert", 5, ValueError, "an axis of 5 devices", "of size one of 1, 2, 4, 8"),
}


@pytest.mark.parametrize("bad", BAD_AXIS)
def test_refuses_axis_name(bad: str) -> None:
    axis_name, num_devices, error, was, may_be = BAD_AXIS[bad]
    spec = PartitionSpec("expert")
    inside = jax.shard_map(
        lambda arrays: mega_moe(**arrays, axis_name=axis_name),
        mesh=layer.expert_mesh(num_devices),
        in_specs=spec,
        out_specs=spec,
    )
    with refusal(error, "axis_name", was, may_be):
        jax.eval_shape(inside, sizes(T=30, E=30))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_refuses_axis_name_outside_shard_map(axis_type: AxisType) -> None:
    """Also where a mesh with such an axis is set: it is not manual there."""
    mesh = Mesh(np.array(jax.devices()), ("expert",), axis_types=(axis_type,))
    with (
        jax.set_mesh(mesh),
        refusal(ValueError, "axis_name", "'expert', which is not bound", "sharded_mega_moe"),
    ):
        trace(mega_moe, {**sizes(), "axis_name": "expert"})


@pytest.mark.parametrize("name", NAMES)
def test_refuses_arrays_that_are_split_over_explicit_axes(name: str) -> None:
    mesh = Mesh(np.array(jax.devices()), ("expert",), axis_types=(AxisType.Explicit,))
    split = jax.device_put(GOOD[name], NamedSharding(mesh, PartitionSpec("expert")))
    with (
        jax.set_mesh(mesh),
        refusal(ValueError, name, r"sharded as P.*'expert'", "use sharded_mega_moe"),
    ):
        jax.eval_shape(lambda a: mega_moe(**{**GOOD, name: a}), split)
