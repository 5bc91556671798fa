"""An identity that refuses, by name, the transformations the op does not have.

`custom_vjp` alone would let them through and fail far from the cause. The guard costs nothing: it
lowers to its operands.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_guard_p = Primitive("mega_moe_guard")
_guard_p.multiple_results = True


def guard(*arrays: jax.Array, backend: str) -> list[jax.Array]:
    """Returns the arrays: all inputs of a pass, so that a transformation of any one is seen.

    Raises (when the computation is transformed or lowered):
      NotImplementedError: under vmap, or when a gradient of mega_moe is differentiated again.
      ValueError: backend="cuda" in a computation lowered for another platform.
    """
    return _guard_p.bind(*arrays, backend=backend)


def _check_platform(backend: str, platform: str) -> None:
    if backend == "cuda" and platform not in ("cuda", "gpu"):
        raise ValueError(
            f"mega_moe: backend was 'cuda' in a computation for the platform {platform!r}; it may "
            "be 'reference' or 'auto' there. The kernels need an NVIDIA GPU that JAX can see "
            "(pip install 'jax[cuda13]')."
        )


@_guard_p.def_impl
def _impl(*arrays: jax.Array, backend: str) -> list[jax.Array]:
    _check_platform(backend, jax.default_backend())
    return list(arrays)


@_guard_p.def_abstract_eval
def _abstract_eval(*avals: Any, backend: str) -> list[Any]:
    return list(avals)


def _lower(ctx: Any, *arrays: Any, backend: str) -> list[Any]:
    for platform in ctx.module_context.platforms:
        _check_platform(backend, platform)
    return list(arrays)


def _refuse_vmap(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "vmap of mega_moe is not supported: its rows are tokens already. Fold the mapped axis into "
        "the leading dimensions of x, expert_idx and expert_weight instead; for a stack of layers "
        "use jax.lax.scan over the weights."
    )


def _refuse_second_derivative(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "mega_moe has first derivatives only: grad of grad, hessian and jvp of its gradient are "
        "not supported. Where the first gradient is a constant, compute it at "
        "jax.lax.stop_gradient of its inputs."
    )


mlir.register_lowering(_guard_p, _lower)
batching.primitive_batchers[_guard_p] = _refuse_vmap
ad.primitive_jvps[_guard_p] = _refuse_second_derivative
