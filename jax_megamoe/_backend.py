"""A pass of the layer by the kernels or by the reference, as the call asks.

backend="auto" chooses when the program is lowered, by the platform that it is lowered for: until
then the pass is one primitive, which remat policies see as they see a custom call.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_megamoe import _ffi, reference
from jax_megamoe._call_arrays import gate_up_array
from jax_megamoe.config import (
    KERNEL_MULTIPLE,
    KERNEL_PRECISIONS,
    Dims,
    MegaMoEConfig,
    lacking_in_fp8,
)
from jax_megamoe.quantization import NUM_ARRAYS, QuantizedExperts, from_arrays

Array = jax.Array


def reason_for_reference(
    config: MegaMoEConfig, *, H: int, I: int, R: int = 1, expert_bias: bool = False
) -> str:
    """Why a call on a GPU of this process runs the reference; "" when it runs the kernels.

    Also "" when it asks for the kernels by name. Values are not checked here; the call does that.

    Args:
      H: hidden size. I: intermediate size of an expert. R: ranks that share the experts.
      expert_bias: the experts have biases.
    """
    if config.backend == "cuda":
        return ""
    refusals = call_refusals(config, H=H, I=I, R=R, expert_bias=expert_bias)
    return next(iter(refusals), "") or _ffi.missing()


def call_refusals(
    config: MegaMoEConfig, *, H: int, I: int, R: int = 1, expert_bias: bool = False
) -> list[str]:
    """What "auto" finds in a call to run the reference for, on any machine; [] for nothing."""
    is_fp8 = config.precision == "fp8_block"
    refusals = {
        'backend="reference" asks for it': config.backend == "reference",
        f"the kernels have no precision {config.precision!r}": (
            config.precision not in KERNEL_PRECISIONS
        ),
        f"the kernels for experts on {R} GPUs are not measured yet, and run by name only": (R > 1),
        f"H = {H} and I = {I} are not both multiples of {KERNEL_MULTIPLE}": (
            H % KERNEL_MULTIPLE or I % KERNEL_MULTIPLE
        ),
    }
    lacking = {"activation": config.activation, "expert_bias": expert_bias}
    of_fp8 = lacking_in_fp8(**lacking) if is_fp8 else []
    return [
        *(why for why, holds in refusals.items() if holds),
        *(f"the kernels of precision 'fp8_block' take no {what}" for what in of_fp8),
    ]


def forward(
    *arrays: Array,
    dims: Dims,
    config: MegaMoEConfig,
    axis_name: str | None,
    quantized: QuantizedExperts | None,
    keep_gate_up: bool,
) -> tuple[Array, ...]:
    """As `reference.forward`, with the sums of the backend that runs."""
    operands = (*arrays, *jax.tree.leaves(quantized))
    if _is_open(dims, config, arrays[3:]):
        x, *_ = arrays
        results = [
            _ffi.result_type(x, (dims.T, dims.H), x.dtype),
            _ffi.result_type(x, (dims.experts_per_rank,), jnp.int32),
        ]
        if keep_gate_up:
            kept = gate_up_array(dims)
            results.append(_ffi.result_type(x, kept.shape, kept.dtype))
        return _bind(_forward_on, operands, results, dims, config, keep_gate_up)
    options = {"dims": dims, "axis_name": axis_name, "keep_gate_up": keep_gate_up}
    return _run(_forward_on, config, operands, **options)


def backward(
    *arrays: Array,
    dims: Dims,
    config: MegaMoEConfig,
    axis_name: str | None,
    quantized: QuantizedExperts | None,
    gate_up: Array | None,
) -> tuple[Array, ...]:
    """As `reference.backward`, the gradients of weights and biases in their dtypes."""
    _, x, _, _, *experts = arrays
    takes_gate_up = gate_up is not None
    kept = () if gate_up is None else (gate_up,)
    operands = (*arrays, *kept, *jax.tree.leaves(quantized))
    if _is_open(dims, config, experts):
        results = [
            _ffi.result_type(x, (dims.T, dims.H), x.dtype),
            _ffi.result_type(x, (dims.T, dims.K), jnp.float32),
        ]
        if config.trainable_experts:
            results += [_ffi.result_type(x, a.shape, a.dtype) for a in experts]
        return _bind(_backward_on, operands, results, dims, config, takes_gate_up)
    options = {"dims": dims, "axis_name": axis_name, "keep_gate_up": takes_gate_up}
    return _run(_backward_on, config, operands, **options)


def _is_open(dims: Dims, config: MegaMoEConfig, experts: Sequence[Array]) -> bool:
    """Whether the platform decides. Then R is 1, and no pass talks to another rank.

    experts: their weights and, if they have any, biases.
    """
    if config.backend != "auto":
        return False
    expert_bias = len(experts) > _ffi.NUM_WEIGHTS
    return not reason_for_reference(config, H=dims.H, I=dims.I, R=dims.R, expert_bias=expert_bias)


def _run(
    run: Callable[..., tuple[Array, ...]],
    config: MegaMoEConfig,
    arrays: Sequence[Array],
    **options: Any,
) -> tuple[Array, ...]:
    """run(backend, *arrays, ...) with the backend of the config, which is not open.

    The kernels outside of any program become one, which their workspace does not leave: it may
    hold NaN where nobody reads it, and jax_debug_nans looks at all that leaves a program.
    """
    options["config"] = config
    backend = "cuda" if config.backend == "cuda" else "reference"
    if backend == "reference" or any(isinstance(a, Tracer) for a in arrays):
        return run(backend, *arrays, **options)
    return _program(run, backend, **options)(*arrays)


@functools.cache
def _program(f: Callable[..., Any], *static: Any, **options: Any) -> Callable[..., Any]:
    """f(*static, *arrays, **options) of the arrays, compiled."""
    compiled = jax.jit(functools.partial(f, *static, **options))

    def run(*arrays: Array) -> Any:
        # With jit disabled by the caller, the rule of the primitive would call itself for ever.
        with jax.disable_jit(False):
            return compiled(*arrays)

    return run


def _forward_on(
    backend: str, *operands: Array, config: MegaMoEConfig, **options: Any
) -> tuple[Array, ...]:
    arrays, quantized = _without_quantized(operands, config)
    run = _ffi.forward_call if backend == "cuda" else reference.forward
    return run(*arrays, config=config, **quantized, **options)


def _backward_on(
    backend: str, *operands: Array, config: MegaMoEConfig, keep_gate_up: bool, **options: Any
) -> tuple[Array, ...]:
    """keep_gate_up: what the forward has kept is the last of the arrays."""
    arrays, quantized = _without_quantized(operands, config)
    gate_up = arrays[-1] if keep_gate_up else None
    arrays = arrays[:-1] if keep_gate_up else arrays
    run = _ffi.backward_call if backend == "cuda" else reference.backward
    dx, dw, *d_experts = run(*arrays, gate_up=gate_up, config=config, **quantized, **options)
    experts = arrays[4:] if d_experts else ()
    return dx, dw, *(d.astype(a.dtype) for d, a in zip(d_experts, experts, strict=True))


def _without_quantized(
    operands: tuple[Array, ...], config: MegaMoEConfig
) -> tuple[tuple[Array, ...], dict[str, QuantizedExperts]]:
    """The operands before the quantised weights, and these as an argument, where there are any."""
    if config.precision != "fp8_block":
        return operands, {}
    return operands[:-NUM_ARRAYS], {"quantized": from_arrays(operands[-NUM_ARRAYS:])}


_pass_p = Primitive("mega_moe_pass")
_pass_p.multiple_results = True


def _bind(
    run: Callable[..., Any],
    arrays: Sequence[Array],
    results: Sequence[Any],
    dims: Dims,
    config: MegaMoEConfig,
    keep_gate_up: bool,
) -> tuple[Array, ...]:
    """run(backend, *arrays, ...) with the backend of the platform; `results` are its types."""
    params = {"run": run, "dims": dims, "config": config, "keep_gate_up": keep_gate_up}
    params["results"] = tuple(results)
    return tuple(_pass_p.bind(*arrays, **params))


@_pass_p.def_abstract_eval
def _abstract_eval(*_: Any, results: tuple[Any, ...], **__: Any) -> list[Any]:
    return list(results)


@_pass_p.def_impl
def _impl(*arrays: Array, **params: Any) -> list[Array]:
    return _program(_pass_p.bind, **params)(*arrays)


def _lower(
    backend: str, ctx: Any, *arrays: Any, run: Any, results: Sequence[Any], **options: Any
) -> Any:
    f = functools.partial(run, backend, axis_name=None, **options)
    return mlir.lower_fun(f, multiple_results=True)(ctx, *arrays)


mlir.register_lowering(_pass_p, functools.partial(_lower, "reference"))
mlir.register_lowering(_pass_p, functools.partial(_lower, "cuda"), platform="cuda")
