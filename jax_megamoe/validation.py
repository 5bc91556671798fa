"""The one place that judges arguments: every refusal is raised here, while tracing, before any
launch. A message names the argument, says what it was and what it may be.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe.config import (
    ACTIVATIONS,
    BACKENDS,
    COMBINE_DTYPES,
    FP8_GROUP,
    INT32_MAX,
    KERNEL_MULTIPLE,
    KERNEL_PRECISIONS,
    MAX_CHOICES,
    MAX_EXPERTS,
    MAX_SLOTS,
    PRECISIONS,
    RANK_COUNTS,
    SAVES,
    ClampedSwiGLU,
    Dims,
    MegaMoEConfig,
)

WEIGHTS = ("w_gate", "w_up", "w_down")
BIASES = ("b_gate", "b_up", "b_down")
# The arrays of a call in their order; without biases it ends before them.
NAMES = ("x", "expert_idx", "expert_weight", *WEIGHTS, *BIASES)
FLOAT_DTYPES = ("bfloat16", "float32")


def refuse(error: type[Exception], argument: str, was: object, may_be: str) -> Never:
    raise error(f"{argument}: was {was}; it may be {may_be}")


def make_config(function: str, options: dict[str, Any]) -> MegaMoEConfig:
    """The options of a call as one value; raises TypeError for a name that is none."""
    known = tuple(field.name for field in dataclasses.fields(MegaMoEConfig))
    for name in options:
        if name not in known:
            refuse(TypeError, f"{name}=", f"given to {function}", _one_of(known))
    return MegaMoEConfig(**options)


def check_array(name: str, value: Any) -> None:
    """Raises TypeError unless `value` is an array that JAX takes as it is, of static shape."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    if not is_array or isinstance(value, np.ma.MaskedArray):
        refuse(TypeError, name, f"a {type(value).__name__}", "a jax.Array or a numpy.ndarray")
    if isinstance(value.dtype, np.dtype) and not value.dtype.isnative:
        refuse(TypeError, name, f"of dtype {value.dtype}", "of the machine's own byte order")
    if not all(isinstance(size, int) for size in value.shape):
        refuse(TypeError, name, f"of symbolic shape {value.shape}", "of static shape")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        refuse(TypeError, name, f"{value!r} ({type(value).__name__})", "True or False, static")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        refuse(TypeError, name, f"{value!r} ({type(value).__name__})", _one_of(choices))
    if value not in choices:
        refuse(ValueError, name, repr(value), _one_of(choices))


def check_size(name: str, value: Any, most: int, *, least: int = 1, multiple: int = 1) -> None:
    allowed = f"in {least}..{most}"
    if multiple > 1:
        allowed += f" and a multiple of {multiple}"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        refuse(TypeError, name, f"{value!r} ({type(value).__name__})", f"an int {allowed}")
    if not least <= value <= most or value % multiple:
        refuse(ValueError, name, str(value), allowed)


def check_pool_factor(value: Any) -> None:
    allowed = "a finite number of at least 1, static"
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(TypeError, "pool_factor", f"{value!r} ({type(value).__name__})", allowed)
    if not 1 <= value <= sys.float_info.max:
        refuse(ValueError, "pool_factor", repr(value), allowed)


def _check_activation(value: Any) -> None:
    if isinstance(value, ClampedSwiGLU):
        for name in ("alpha", "limit"):
            _check_bf16(f"activation.{name}", getattr(value, name), name == "limit")
        return
    may_be = f"{_one_of(ACTIVATIONS)}, or a ClampedSwiGLU"
    if not isinstance(value, str):
        refuse(TypeError, "activation", f"{value!r} ({type(value).__name__})", may_be)
    if value not in ACTIVATIONS:
        refuse(ValueError, "activation", repr(value), may_be)


def _check_bf16(name: str, value: Any, positive: bool) -> None:
    """A number that bf16 has, rounded: neither infinity nor, for a positive one, 0."""
    limits = jnp.finfo(jnp.bfloat16)
    least, most = float(limits.tiny if positive else limits.min), float(limits.max)
    allowed = f"a Python number from {least:.3g} to {most:.3g}, static"
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(TypeError, name, f"{value!r} ({type(value).__name__})", allowed)
    if not least <= value <= most:
        refuse(ValueError, name, repr(value), allowed)


def given_biases(b_gate: Any, b_up: Any, b_down: Any) -> tuple[Any, ...]:
    """The three biases of a call, or () where it has none.

    Raises:
      ValueError: naming a bias that is missing beside others.
    """
    biases = (b_gate, b_up, b_down)
    if all(bias is None for bias in biases):
        return ()
    for name, bias in zip(BIASES, biases, strict=True):
        if bias is None:
            others = ", ".join(n for n, b in zip(BIASES, biases, strict=True) if b is not None)
            refuse(ValueError, name, f"left out beside {others}", "left out with all three only")
    return biases


def check_float_dtype(name: str, value: Any) -> None:
    """value: what JAX takes for a dtype."""
    try:
        dtype = str(jnp.dtype(value))
    except TypeError:
        dtype = repr(value)
    if dtype not in FLOAT_DTYPES:
        refuse(TypeError, name, dtype, _one_of(FLOAT_DTYPES))


def check_config(config: MegaMoEConfig) -> None:
    """Raises TypeError or ValueError for a field of the wrong type or value."""
    if not isinstance(config, MegaMoEConfig):
        refuse(TypeError, "config", type(config).__name__, "a MegaMoEConfig")
    for name, choices in (
        ("precision", PRECISIONS),
        ("backend", BACKENDS),
        ("save", SAVES),
        ("combine_dtype", COMBINE_DTYPES),
    ):
        check_choice(name, getattr(config, name), choices)
    _check_activation(config.activation)
    check_pool_factor(config.pool_factor)
    for name in ("trainable_experts", "return_counts", "debug_checks"):
        check_flag(name, getattr(config, name))
    if config.backend == "cuda" and config.precision not in KERNEL_PRECISIONS:
        refuse(
            ValueError,
            "precision",
            f"{config.precision!r} with backend='cuda'",
            f"{_one_of(KERNEL_PRECISIONS)} there; {config.precision!r} exists with "
            "backend='reference' only",
        )
    if config.combine_dtype == "bfloat16" and config.precision == "float32":
        refuse(
            ValueError,
            "combine_dtype",
            "'bfloat16' with precision='float32'",
            "'float32' there, where nothing is rounded; 'bfloat16' goes with precision='bf16' "
            "and 'fp8_block'",
        )


def check_call(
    x: Any,
    expert_idx: Any,
    expert_weight: Any,
    *experts: Any,
    config: MegaMoEConfig,
    axis_name: str | None,
) -> Dims:
    """Judges the arguments of one call, as one rank sees them, and returns its sizes.

    experts: the three weights and, where they are given, the three biases.

    Raises:
      TypeError: an argument that is no array, or a dtype that is not supported.
      ValueError: a shape, a size, an option or an axis that is not supported.
    """
    check_config(config)
    num_ranks = _axis_size(axis_name)
    arrays = (x, expert_idx, expert_weight, *experts)
    _check_arrays(*arrays)
    _check_routes(x, expert_idx, expert_weight)
    w_gate, w_up, w_down, *biases = experts
    check_weights(w_gate, w_up, w_down, hidden=x.shape[-1])
    _check_biases(w_gate, biases)
    check_whole(dict(zip(NAMES, arrays, strict=False)))
    dims = Dims(
        T=math.prod(x.shape[:-1]),
        K=expert_idx.shape[-1],
        E=w_gate.shape[0] * num_ranks,
        R=num_ranks,
        H=x.shape[-1],
        I=w_gate.shape[2],
        pool_factor=float(config.pool_factor),
    )
    _check_dims(dims, config)
    return dims


def check_sharded_call(
    x: Any,
    expert_idx: Any,
    expert_weight: Any,
    *experts: Any,
    config: MegaMoEConfig,
    mesh: Any,
    expert_axis: Any,
    data_axes: Any,
) -> tuple[str, ...]:
    """Judges the arguments of the sharded entry, before `check_call` sees them on each device.

    Returns the data axes that are not manual yet.

    Raises:
      TypeError: a mesh, an axis name or a tuple of axis names that is none.
      ValueError: no mesh, an axis that the mesh lacks or that cannot play its part, or a dimension
        that the mesh does not divide.
    """
    check_config(config)
    arrays = (x, expert_idx, expert_weight, *experts)
    _check_arrays(*arrays)
    _check_routes(x, expert_idx, expert_weight)
    w_gate, w_up, w_down, *biases = experts
    check_weights(w_gate, w_up, w_down, hidden=x.shape[-1])
    _check_biases(w_gate, biases)
    check_mesh(mesh, expert_axis, data_axes)
    check_same_mesh(mesh, dict(zip(NAMES, arrays, strict=False)))
    free = tuple(a for a in data_axes if a not in mesh.manual_axes)
    check_split("w_gate", w_gate.shape[0], mesh, expert_axis)
    num_parts = math.prod(mesh.shape[a] for a in (*free, expert_axis))
    if x.shape[0] % num_parts:
        refuse(
            ValueError,
            "x",
            f"of leading dimension {x.shape[0]}",
            f"of a multiple of {num_parts}: it is split over the axes {(*free, expert_axis)}",
        )
    return free


def check_axis_names(expert_axis: Any, data_axes: Any) -> None:
    """Raises TypeError or ValueError for names of mesh axes that fit no mesh."""
    if not isinstance(expert_axis, str):
        refuse(TypeError, "expert_axis", repr(expert_axis), "the name of one mesh axis, a str")
    is_names = isinstance(data_axes, Sequence) and not isinstance(data_axes, str)
    if not is_names or not all(isinstance(axis, str) for axis in data_axes):
        refuse(TypeError, "data_axes", repr(data_axes), "a tuple of names of mesh axes")
    if len(set(data_axes)) != len(data_axes):
        refuse(ValueError, "data_axes", repr(tuple(data_axes)), "each axis once")
    if expert_axis in data_axes:
        refuse(
            ValueError,
            "data_axes",
            repr(tuple(data_axes)),
            f"the axes beside the expert axis {expert_axis!r}, which always splits the tokens too",
        )


def check_mesh(mesh: Any, expert_axis: Any, data_axes: Any) -> None:
    """Raises TypeError or ValueError for a mesh that is none or lacks what the axes name."""
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        refuse(TypeError, "mesh", type(mesh).__name__, "a jax.sharding.Mesh, AbstractMesh or None")
    if mesh.empty:
        refuse(
            ValueError,
            "mesh",
            "not given and none is set",
            "given as mesh=..., or set with jax.set_mesh(mesh)",
        )
    check_axis_names(expert_axis, data_axes)
    for name, axis in (("expert_axis", expert_axis), *(("data_axes", a) for a in data_axes)):
        if axis not in mesh.axis_names:
            refuse(ValueError, name, repr(axis), f"one of the mesh axes {mesh.axis_names}")
    if expert_axis in mesh.manual_axes:
        refuse(
            ValueError,
            "expert_axis",
            f"{expert_axis!r}, manual already in the outer shard_map",
            f"an axis that is not manual; inside shard_map use mega_moe(axis_name={expert_axis!r})",
        )


def check_split(argument: str, num_experts: int, mesh: Any, expert_axis: str) -> None:
    """Raises ValueError unless the mesh can split `num_experts`, which `argument` sets."""
    num_ranks = mesh.shape[expert_axis]
    _check_rank_count("expert_axis", num_ranks)
    if num_experts % num_ranks:
        refuse(
            ValueError,
            argument,
            f"of E = {num_experts} experts",
            f"of a multiple of {num_ranks}, the size of the expert axis {expert_axis!r}",
        )


def check_same_mesh(mesh: Any, arrays: dict[str, Any]) -> None:
    """One program has one mesh: the given one, the one that is set, and that of the arrays."""
    set_mesh = jax.sharding.get_abstract_mesh()
    if not set_mesh.empty and mesh.abstract_mesh != set_mesh:
        refuse(
            ValueError, "mesh", f"{mesh} where {set_mesh} is set", "left out, or equal to that one"
        )
    for name, value in arrays.items():
        sharding = jax.typeof(value).sharding
        if any(sharding.spec) and sharding.mesh.shape != mesh.shape:
            refuse(
                ValueError,
                name,
                f"sharded as {sharding.spec} over the mesh {dict(sharding.mesh.shape)}",
                f"sharded over the mesh {dict(mesh.shape)} of the call; jax.device_put moves it",
            )


def _check_rank_count(argument: str, num_ranks: int) -> None:
    if num_ranks not in RANK_COUNTS:
        refuse(
            ValueError,
            argument,
            f"an axis of {num_ranks} devices",
            f"of size {_one_of(RANK_COUNTS)}",
        )


def _one_of(choices: Sequence[object]) -> str:
    return ("one of " if len(choices) > 1 else "") + ", ".join(repr(c) for c in choices)


def _axis_size(axis_name: str | None) -> int:
    if axis_name is None:
        return 1
    if not isinstance(axis_name, str):
        refuse(TypeError, "axis_name", repr(axis_name), "the name of one mesh axis, a str, or None")
    try:
        num_ranks = jax.lax.axis_size(axis_name)
    except NameError:
        refuse(
            ValueError,
            "axis_name",
            f"{axis_name!r}, which is not bound here",
            "an axis of the enclosing jax.shard_map; outside of one use sharded_mega_moe, or None",
        )
    _check_rank_count("axis_name", num_ranks)
    return num_ranks


def _check_arrays(*arrays: Any) -> None:
    given = dict(zip(NAMES, arrays, strict=False))
    expert_idx = given["expert_idx"]
    for name, value in given.items():
        check_array(name, value)
    check_floats({name: value for name, value in given.items() if name != "expert_idx"})
    is_numpy = isinstance(expert_idx.dtype, np.dtype)
    if not is_numpy or not np.issubdtype(expert_idx.dtype, np.integer):
        refuse(
            TypeError,
            "expert_idx",
            f"of dtype {expert_idx.dtype}",
            "of an integer dtype of 8 to 64 bits; ids outside [0, E) are no route",
        )


def check_floats(given: dict[str, Any]) -> None:
    """Raises TypeError unless all arrays are floating, weights of one dtype and biases of one."""
    for name, value in given.items():
        if str(value.dtype) not in FLOAT_DTYPES:
            refuse(TypeError, name, f"of dtype {value.dtype}", f"of dtype {_one_of(FLOAT_DTYPES)}")
    for first, *others in (WEIGHTS, BIASES):
        for name in others:
            if name in given and (dtype := given[name].dtype) != (wanted := given[first].dtype):
                refuse(TypeError, name, f"of dtype {dtype}", f"of {first}'s dtype {wanted}")


def check_whole(arrays: dict[str, Any]) -> None:
    """The op sees what one device holds; an array split over explicit mesh axes is more."""
    for name, value in arrays.items():
        spec = jax.typeof(value).sharding.spec
        if any(spec):
            refuse(
                ValueError,
                name,
                f"sharded as {spec} over explicit mesh axes",
                "what one device holds, inside jax.shard_map; outside of it use sharded_mega_moe",
            )


def _check_routes(x: Any, expert_idx: Any, expert_weight: Any) -> None:
    if x.ndim < 2:
        refuse(
            ValueError, "x", f"of shape {x.shape}", "[..., H] with at least one leading dimension"
        )
    for name, value in (("expert_idx", expert_idx), ("expert_weight", expert_weight)):
        if value.ndim != x.ndim or value.shape[:-1] != x.shape[:-1]:
            refuse(
                ValueError,
                name,
                f"of shape {value.shape}",
                f"[..., K] with the leading dimensions {x.shape[:-1]} of x",
            )
    if expert_weight.shape != expert_idx.shape:
        refuse(
            ValueError,
            "expert_weight",
            f"of shape {expert_weight.shape}",
            f"of the shape {expert_idx.shape} of expert_idx",
        )


def check_weights(w_gate: Any, w_up: Any, w_down: Any, hidden: int | None = None) -> None:
    """Raises ValueError unless the shapes fit each other and, where it is given, x's H."""
    if w_gate.ndim != 3:
        refuse(ValueError, "w_gate", f"of shape {w_gate.shape}", "[E/R, H, I], input before output")
    num_local, of_weights, intermediate = w_gate.shape
    if hidden is not None and hidden != of_weights:
        refuse(
            ValueError,
            "w_gate",
            f"of shape {w_gate.shape}",
            f"[E/R, H, I] with H = {hidden}, the last dimension of x",
        )
    if w_up.shape != w_gate.shape:
        refuse(ValueError, "w_up", f"of shape {w_up.shape}", f"of w_gate's shape {w_gate.shape}")
    down = (num_local, intermediate, of_weights)
    if w_down.shape != down:
        refuse(ValueError, "w_down", f"of shape {w_down.shape}", f"[E/R, I, H] = {down}")


def check_groups(argument: str, **sizes: int) -> None:
    """Raises ValueError for a size, named by its letter, that groups of FP8 do not divide."""
    for letter, size in sizes.items():
        if size % FP8_GROUP:
            refuse(
                ValueError,
                argument,
                f"of {letter} = {size} with precision='fp8_block'",
                f"of {letter} a multiple of {FP8_GROUP} there; precision='bf16' takes any size",
            )


def _check_biases(w_gate: Any, biases: Sequence[Any]) -> None:
    num_local, hidden, intermediate = w_gate.shape
    letters = {"b_gate": "I", "b_up": "I", "b_down": "H"}
    sizes = {"I": intermediate, "H": hidden}
    for (name, letter), bias in zip(letters.items(), biases, strict=False):
        if bias.shape != (shape := (num_local, sizes[letter])):
            refuse(ValueError, name, f"of shape {bias.shape}", f"[E/R, {letter}] = {shape}")


def _check_dims(dims: Dims, config: MegaMoEConfig) -> None:
    for argument, letter, size, most in (
        ("expert_idx", "K", dims.K, MAX_CHOICES),
        ("w_gate", "E", dims.E, MAX_EXPERTS),
        ("x", "H", dims.H, INT32_MAX),
        ("w_gate", "I", dims.I, INT32_MAX),
    ):
        if not 1 <= size <= most:
            refuse(ValueError, argument, f"of {letter} = {size}", f"of {letter} in 1..{most}")
    slots = dims.R * dims.T * dims.K
    if slots > MAX_SLOTS:
        refuse(
            ValueError,
            "x",
            f"of R T K = {dims.R} x {dims.T} x {dims.K} = {slots} routes",
            f"of at most {MAX_SLOTS} routes over all ranks; split the batch",
        )
    # The groups of "fp8_block" are larger, and judged with its weights, for every backend.
    if config.backend == "cuda" and config.precision != "fp8_block":
        for argument, letter, size in (("x", "H", dims.H), ("w_gate", "I", dims.I)):
            if size % KERNEL_MULTIPLE:
                refuse(
                    ValueError,
                    argument,
                    f"of {letter} = {size} with backend='cuda'",
                    f"of {letter} a multiple of {KERNEL_MULTIPLE} there; "
                    "backend='reference' takes any size",
                )
