"""How a refusal is provoked and judged: by tracing alone, and by the whole of its message."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

T, K, E, H, I = 8, 2, 8, 32, 16


def shaped(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def sizes(**letters: int) -> dict[str, Any]:
    """The six arguments of the given sizes, as shapes that are only traced."""
    d = {"T": T, "K": K, "E": E, "H": H, "I": I, **letters}
    return {
        "x": shaped(d["T"], d["H"]),
        "expert_idx": shaped(d["T"], d["K"], dtype=np.int32),
        "expert_weight": shaped(d["T"], d["K"]),
        "w_gate": shaped(d["E"], d["H"], d["I"]),
        "w_up": shaped(d["E"], d["H"], d["I"]),
        "w_down": shaped(d["E"], d["I"], d["H"]),
    }


def trace(entry: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Calls the entry with tracers for what has a shape; raises what the call raises.

    Other arguments, and arrays that JAX cannot trace, are passed as they are.
    """
    is_traced = {name: isinstance(value, jax.ShapeDtypeStruct) for name, value in arguments.items()}
    traced = {name: value for name, value in arguments.items() if is_traced[name]}
    static = {name: value for name, value in arguments.items() if not is_traced[name]}
    jax.eval_shape(lambda arrays: entry(**arrays, **static), traced)


def with_fields[C](config: C, **fields: Any) -> C:
    """A copy of a frozen config with these fields, which may be of any type."""
    changed = copy.copy(config)
    for name, value in fields.items():
        assert hasattr(config, name)
        object.__setattr__(changed, name, value)
    return changed


@contextlib.contextmanager
def refusal(
    error: type[Exception], argument: str, was: str, may_be: str
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expects "argument: was ...; it may be ..."; was and may_be are patterns."""
    message = rf"^{argument}: was .*{was}.*; it may be .*{may_be}"
    with _unchecked_annotations(), pytest.raises(error, match=message) as found:
        yield found


@contextlib.contextmanager
def _unchecked_annotations() -> Iterator[None]:
    """The tests' own run-time type checker would refuse some of these before the package does."""
    try:
        import jaxtyping
    except ImportError:
        yield
        return
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
