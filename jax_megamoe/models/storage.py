"""Fully sharded parameters (FSDP): stored split over mesh axes, whole where they are used.

A variable's `out_sharding` says how it is stored, so optimizer state that is made of it and
checkpoints follow. What splits it beside the axis of the experts is one entry of that, a tuple of
all these axes; the axis of the experts is a name by itself.
"""

import functools
import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe.validation import refuse

Array = jax.Array


def check_fsdp_axes(axes: Any, expert_axis: str | None) -> None:
    """Judges the axes against the mesh that is set.

    Raises:
      TypeError: no tuple of names.
      ValueError: no mesh is set, or one with axes that are not automatic, or an axis that it lacks
        or that splits the experts.
    """
    if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in axes):
        refuse(TypeError, "fsdp_axes", repr(axes), "a tuple of names of mesh axes")
    if not axes:
        return
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    is_known = len(set(axes)) == len(axes) and set(axes) <= set(types)
    if not is_known or any(kind != AxisType.Auto for kind in types.values()):
        may_be = "axes of the mesh of jax.set_mesh, each once, where that has automatic ones alone"
        refuse(ValueError, "fsdp_axes", f"{axes!r} with a mesh of {types}", may_be)
    if expert_axis in axes:
        may_be = f"other axes than expert_axis = {expert_axis!r}, which splits all else anyway"
        refuse(ValueError, "fsdp_axes", repr(axes), may_be)


def split(module: nnx.Module, axes: tuple[str, ...], expert_axis: str | None) -> None:
    """Splits each parameter's largest dimension that the devices divide; others stay as they are.

    Args:
      module: whose variables say in `out_sharding` how they lie. Those below `runs` are stacked
        over layers, their first dimension, which is never split: each layer is gathered by itself.
      axes: of the mesh that is set. What the axis of the experts splits is split
        over them, everything else over that axis too.
      expert_axis: or None.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    for path, variable in nnx.iter_graph(module):
        if not isinstance(variable, nnx.Param):
            continue
        spec = list(variable.get_metadata("out_sharding"))
        of_others = () if expert_axis is None or expert_axis in spec else (expert_axis,)
        over = (*axes, *of_others)
        count = math.prod(sizes[axis] for axis in over)
        shape, first = variable.shape, 1 if path[0] == "runs" else 0
        free = [
            n
            for n in range(first, len(shape))
            if spec[n] is None and shape[n] and shape[n] % count == 0
        ]
        if free:
            spec[max(free, key=lambda n, shape=shape: (shape[n], -n))] = over
            variable.set_metadata(out_sharding=tuple(spec))
            variable.set_value(_place(variable.get_value(), P(*spec)))


def whole(variable: nnx.Param[Array], expert_axis: str | None) -> Array:
    """What a call of a layer takes: all of a parameter on each device, or of the experts' all of
    those that the device has. The gradient goes back to where the parameter is stored, as sums of
    which each device gets its part.

    variable: of one layer: where it is stacked, its metadata say one dimension more.
    """
    value = variable.get_value()
    spec = variable.get_metadata("out_sharding")
    spec = spec[len(spec) - value.ndim :]
    used = (axis if axis == expert_axis else None for axis in spec)
    return _gathered(value, P(*used), P(*spec))


def rows_of(matrix: Array, idx: Array, axes: tuple[str, ...]) -> Array:
    """[B, S, H] of a whole matrix [V, H] and int [B, S], whose first dimension `axes` split.

    Each device adds up the gradients of its own positions, before they are summed over devices;
    left to itself, XLA brings those of all positions to each device.
    """

    def of_a_device(matrix: Array, idx: Array) -> Array:
        return jax.lax.pcast(matrix, axes, to="varying")[idx]

    return jax.shard_map(of_a_device, in_specs=(P(), P(axes)), out_specs=P(axes))(matrix, idx)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(value: Array, used: P, stored: P) -> Array:
    return _place(value, used)


def _gathered_fwd(value: Array, used: P, stored: P) -> tuple[Array, None]:
    return _place(value, used), None


def _gathered_bwd(used: P, stored: P, _: None, gradient: Array) -> tuple[Array]:
    return (_place(gradient, stored),)


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def _place(value: Array, spec: P) -> Array:
    return jax.lax.with_sharding_constraint(value, spec)
