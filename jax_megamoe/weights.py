"""Weights of other code in, and out again: each tensor by itself, in the layout that is named.

    parameters = import_weights(tensors, layouts.QWEN3_MOE, prefix="model.layers.0.mlp.",
                                num_experts=128, hidden_size=2048, intermediate_size=768)

Both ways give a mapping that computes what is asked of it, when it is asked. So neither a second
copy of a model is made nor all of a file read; what is held is up to the caller. Values are moved,
never changed: dtypes stay, and an export of an import is the same bits.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe.config import INT32_MAX, MAX_EXPERTS
from jax_megamoe.layouts import EXPERT, OF_AN_EXPERT, OF_THE_LAYER, Layout, Stored
from jax_megamoe.validation import check_array, check_size, refuse

Array = jax.Array | np.ndarray


class Computed(Mapping):
    """Numpy or jax arrays by name, each made anew on each access."""

    def __init__(self, makes: Mapping[str, Callable[[], Array]]) -> None:
        self._makes = makes

    def __getitem__(self, name: str) -> Array:
        return self._makes[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makes)

    def __len__(self) -> int:
        return len(self._makes)


def import_weights(
    tensors: Mapping[str, Any],
    layout: Layout,
    *,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    shared_intermediate_size: int = 0,
    prefix: str = "",
) -> Computed:
    """The parameters of a layer, by their names in the modules, from the tensors of other code.

    Args:
      tensors: by name, numpy or jax arrays. It may load on access: that a name is in it is asked
        at once, a value when a parameter is taken, and again when it is taken again.
      layout: one of `jax_megamoe.layouts`, or the caller's own.
      num_experts: E. hidden_size: H. intermediate_size: I, of one expert.
      shared_intermediate_size: S, of all shared experts together; 0: they are left where they are.
      prefix: in front of the layout's names, such as "model.layers.0.mlp.".

    Returns:
      A mapping from the names of `Layout` to numpy or jax arrays, as the tensors are; numpy arrays
      may be views of them. A parameter that lies in E tensors is filled one tensor at a time.

    Raises:
      TypeError: an argument of another type, or, on access, a tensor that is no array.
      ValueError: a size out of range, a tensor that is missing, or one of an expert beyond E; on
        access, a shape or a dtype that does not fit. The tensor is named, what it was and what it
        may be.
    """
    sizes = _Sizes(num_experts, hidden_size, intermediate_size, shared_intermediate_size)
    _check(tensors, "tensors", layout, sizes, prefix)
    described = _described(layout, sizes)
    for stored in described.values():
        for name in _names(stored, sizes, prefix):
            if name not in tensors:
                refuse(ValueError, name, f"missing, among {_some(tensors)}", "in the tensors")
        if EXPERT in stored.name and (beyond := _name(stored, prefix, num_experts)) in tensors:
            refuse(ValueError, beyond, "there", f"missing: num_experts = {num_experts}")

    def make(parameter: str, stored: Stored) -> Array:
        shape, names = sizes.stored(parameter, stored), _names(stored, sizes, prefix)
        loaded = (_array(name, tensors[name], shape) for name in names)
        if EXPERT not in stored.name:
            return _taken(next(loaded), stored, sizes)
        return _stack(names, (_taken(a, stored, sizes) for a in loaded), num_experts)

    return Computed({p: _deferred(make, p, stored) for p, stored in described.items()})


def export_weights(
    parameters: Mapping[str, Any],
    layout: Layout,
    *,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    shared_intermediate_size: int = 0,
    prefix: str = "",
) -> Computed:
    """The tensors of other code from the parameters of a layer: `import_weights` the other way.

    Args: as `import_weights`; parameters: numpy or jax arrays by the names of `Layout`.

    Returns:
      A mapping from the layout's names, behind the prefix, to contiguous arrays.

    Raises:
      TypeError, ValueError: as `import_weights`, of the parameters; also for one that the layout
        has no place for.
    """
    sizes = _Sizes(num_experts, hidden_size, intermediate_size, shared_intermediate_size)
    _check(parameters, "parameters", layout, sizes, prefix)
    described = _described(layout, sizes)
    for parameter in described:
        if parameter not in parameters:
            refuse(ValueError, parameter, f"missing, among {_some(parameters)}", "a parameter")
    for parameter in parameters:
        if parameter not in described:
            refuse(ValueError, parameter, "given", "left out: the layout has no place for it")

    def make(stored: Stored, held: Sequence[str], expert: int | None) -> Array:
        arrays = []
        for parameter in held:
            a = _array(parameter, parameters[parameter], sizes.natural(parameter))
            arrays.append(a if expert is None else a[expert])
        return _put(held, arrays, stored, sizes)

    makes: dict[str, Callable[[], Array]] = {}
    for stored in described.values():
        held = _held(described, stored.name)
        experts = range(num_experts) if EXPERT in stored.name else (None,)
        for expert in experts:
            makes[_name(stored, prefix, expert)] = _deferred(make, described[held[0]], held, expert)
    return Computed(makes)


def tensor_names(
    layout: Layout, *, num_experts: int, shared_intermediate_size: int = 0, prefix: str = ""
) -> frozenset[str]:
    """The tensors that an import reads and an export writes: what else there is, it leaves."""
    sizes = _Sizes(num_experts, 1, 1, shared_intermediate_size)
    _check({}, "tensors", layout, sizes, prefix)
    described = _described(layout, sizes).values()
    return frozenset(name for stored in described for name in _names(stored, sizes, prefix))


def _deferred(make: Callable[..., Array], *arguments: Any) -> Callable[[], Array]:
    return lambda: make(*arguments)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    E: int
    H: int
    I: int
    S: int

    def natural(self, parameter: str, outputs: int = 1) -> tuple[int, ...]:
        """The shape of a parameter, with its outputs that many times."""
        letters = (OF_AN_EXPERT | OF_THE_LAYER)[parameter]
        *inputs, last = (1 if c == "1" else getattr(self, c) for c in letters)
        experts = (self.E,) if parameter in OF_AN_EXPERT else ()
        return (*experts, *inputs, last * outputs)

    def stored(self, parameter: str, stored: Stored) -> tuple[int, ...]:
        """The shape of each tensor that it lies in."""
        shape = self.natural(parameter, 1 if stored.part == "whole" else 2)
        if EXPERT in stored.name:
            shape = shape[1:]
        if stored.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return (shape[0] * shape[1], *shape[2:]) if stored.flat else shape


def _check(
    given: Mapping[str, Any], argument: str, layout: Layout, sizes: _Sizes, prefix: str
) -> None:
    if not isinstance(given, Mapping):
        refuse(TypeError, argument, f"a {type(given).__name__}", "a mapping of arrays by name")
    if not isinstance(layout, Layout):
        refuse(TypeError, "layout", f"a {type(layout).__name__}", "a jax_megamoe.layouts.Layout")
    if not isinstance(prefix, str):
        refuse(TypeError, "prefix", f"a {type(prefix).__name__}", "a str")
    check_size("num_experts", sizes.E, MAX_EXPERTS)
    check_size("hidden_size", sizes.H, INT32_MAX)
    check_size("intermediate_size", sizes.I, INT32_MAX)
    check_size("shared_intermediate_size", sizes.S, INT32_MAX, least=0)
    if sizes.S and layout.shared_w_gate is None:
        refuse(
            ValueError,
            "shared_intermediate_size",
            str(sizes.S),
            "0: the layout has no shared experts",
        )


def _described(layout: Layout, sizes: _Sizes) -> dict[str, Stored]:
    """The parameters that a call is about."""
    described = layout.parameters()
    return {p: s for p, s in described.items() if sizes.S or not p.startswith("shared_")}


def _held(described: Mapping[str, Stored], name: str) -> list[str]:
    """The parameters in the tensor of that name: the first half or the even places first."""
    held = [p for p, stored in described.items() if stored.name == name]
    return sorted(held, key=lambda p: described[p].part in ("second", "odd"))


def _name(stored: Stored, prefix: str, expert: int | None) -> str:
    return prefix + stored.name.replace(EXPERT, str(expert))


def _names(stored: Stored, sizes: _Sizes, prefix: str) -> list[str]:
    experts = range(sizes.E) if EXPERT in stored.name else (None,)
    return [_name(stored, prefix, expert) for expert in experts]


def _some(given: Mapping[str, Any]) -> str:
    """A few of the names, for a message."""
    names = list(given)
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if names[4:] else "")


def _array(name: str, value: Any, shape: tuple[int, ...]) -> Array:
    check_array(name, value)
    if value.shape != shape:
        refuse(ValueError, name, f"of shape {value.shape}", f"of shape {shape}")
    return value


def _library(a: Array) -> ModuleType:
    """numpy or jax.numpy, whose array it is."""
    return np if isinstance(a, np.ndarray) else jnp


def _taken(a: Array, stored: Stored, sizes: _Sizes) -> Array:
    """A parameter, or one expert's part of it, out of its tensor."""
    if stored.flat:
        a = a.reshape(sizes.E, a.shape[0] // sizes.E, *a.shape[1:])
    if stored.transposed:
        a = a.swapaxes(-1, -2)
    half = a.shape[-1] // 2
    places = {
        "whole": slice(None),
        "first": slice(half),
        "second": slice(half, None),
        "even": slice(0, None, 2),
        "odd": slice(1, None, 2),
    }
    return a[..., places[stored.part]]


def _put(held: Sequence[str], arrays: Sequence[Array], stored: Stored, sizes: _Sizes) -> Array:
    """The tensor that holds the given parameters, or one expert's part of them, in their order."""
    _check_dtypes(held, [a.dtype for a in arrays])
    a, library = arrays[0], _library(arrays[0])
    if stored.part in ("first", "second"):
        a = library.concatenate(arrays, axis=-1)
    elif stored.part != "whole":
        a = library.stack(arrays, axis=-1).reshape(*a.shape[:-1], 2 * a.shape[-1])
    if stored.transposed:
        a = a.swapaxes(-1, -2)
    if stored.flat:
        a = a.reshape(a.shape[0] * a.shape[1], *a.shape[2:])
    return np.ascontiguousarray(a) if library is np else a


def _stack(names: Sequence[str], arrays: Iterator[Array], count: int) -> Array:
    """[E, ...] of E arrays; those of numpy are copied and let go one by one."""
    first = next(arrays)
    if not isinstance(first, np.ndarray):
        found = [first, *arrays]
        _check_dtypes(names, [a.dtype for a in found])
        return jnp.stack(found)
    stacked = np.empty((count, *first.shape), first.dtype)
    stacked[0] = first
    for expert, a in enumerate(arrays, 1):
        _check_dtypes((names[0], names[expert]), [first.dtype, a.dtype])
        stacked[expert] = a
    return stacked


def _check_dtypes(names: Sequence[str], dtypes: Sequence[Any]) -> None:
    for name, dtype in zip(names, dtypes, strict=True):
        if dtype != dtypes[0]:
            refuse(ValueError, name, f"of dtype {dtype}", f"of {names[0]}'s dtype {dtypes[0]}")
