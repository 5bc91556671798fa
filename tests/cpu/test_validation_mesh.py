"""Meshes and axes that do not fit, refused while tracing; as in test_validation.py."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_megamoe import mega_moe, sharded_mega_moe
from tests import layer
from tests.mesh_refusal_cases import BAD_MESH, mesh_of, refuse_mesh
from tests.refusal_cases import GOOD, NAMES
from tests.refusals import refusal, sizes, trace


@pytest.mark.parametrize("bad", BAD_MESH)
def test_sharded_refuses(bad: str) -> None:
    refuse_mesh(bad)


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
