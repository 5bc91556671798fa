"""The custom calls with precision="fp8_block", as they are lowered without a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_megamoe import ClampedSwiGLU, _ffi, quantize_expert_weights
from jax_megamoe._call_arrays import (
    backward_operands,
    backward_results,
    forward_operands,
    forward_results,
)
from jax_megamoe.config import Dims, MegaMoEConfig
from tests.lowering import lower_for_cuda

DIMS = Dims(T=16, K=2, E=8, R=1, H=256, I=128)
CONFIG = MegaMoEConfig(precision="fp8_block")


def types(dims: Dims = DIMS, dtype: Any = jnp.bfloat16) -> list[Any]:
    """x, expert_idx, expert_weight and the quantised weights."""
    x, ids, weight, *weights = forward_operands(dims)
    tokens = [
        jax.ShapeDtypeStruct(a.shape, d)
        for a, d in ((x, dtype), (ids, jnp.int32), (weight, jnp.float32))
    ]
    of_weights = [jax.ShapeDtypeStruct(w.shape, jnp.float32) for w in weights]
    return [*tokens, jax.eval_shape(quantize_expert_weights, *of_weights)]


def forward(*operands: Any, **options: Any) -> tuple[jax.Array, ...]:
    *tokens, quantized = operands
    how: dict[str, Any] = {"dims": DIMS, "config": CONFIG, "axis_name": None, **options}
    return _ffi.forward_call(*tokens, quantized=quantized, **how)


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_it_lowers_to_one_call_with_codes_and_scales(dtype: Any, keep: bool, trace: bool) -> None:
    """Of the codes those in the order of the forward alone; its results are the arrays that it
    is said to have."""
    run = functools.partial(forward, keep_gate_up=keep, trace=trace)
    y, counts, *others = jax.eval_shape(run, *types(dtype=dtype))
    assert (y.shape, y.dtype) == ((DIMS.T, DIMS.H), dtype)
    assert (counts.shape, counts.dtype) == ((DIMS.E,), jnp.int32)
    assert len(others) == keep + trace
    operands, results = one_call("forward_fp8", lower_for_cuda(jax.jit(run), *types(dtype=dtype)))
    assert operands == names(forward_operands(DIMS, precision="fp8_block"))
    want = names(forward_results(DIMS, keep, "fp8_block"))
    assert results[: len(want)] == want and len(results) == len(want) + trace


def one_call(name: str, text: str) -> tuple[list[str], list[str]]:
    """The types of the operands and of the results of the only call of a program."""
    (line,) = (line for line in text.splitlines() if "@jax_megamoe_" in line)
    assert f"@jax_megamoe_{name}(" in line and 'precision = "fp8_block"' in line
    operands, results = line.rsplit(": (", 1)[1].split(") -> ")
    return operands.split(", "), results.strip("()").split(", ")


def names(arrays: Any) -> list[str]:
    short = {"float8_e4m3fn": "f8E4M3FN", "bfloat16": "bf16", "float32": "f32"}
    short |= {"int32": "i32", "uint8": "ui8"}
    return [f"tensor<{'x'.join(map(str, a.shape))}x{short[a.dtype.name]}>" for a in arrays]


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, None])
def test_the_backward_lowers_to_one_call_with_both_orders_of_codes(
    dtype: Any, keep: bool, trace: bool
) -> None:
    """But for w_down, of which it reads one; of the weights only the dtype. None: frozen."""
    config = MegaMoEConfig(precision="fp8_block", trainable_experts=dtype is not None)
    dy, *_, gate_up = (
        jax.ShapeDtypeStruct(a.shape, a.dtype) for a in backward_operands(DIMS, keep_gate_up=True)
    )
    x, ids, weight, quantized = types()
    weights = [jax.ShapeDtypeStruct(a.shape, dtype or jnp.float32) for a in forward_operands(DIMS)]

    def backward(dy: Any, gate_up: Any, quantized: Any, *arrays: Any) -> Any:
        how: dict[str, Any] = {"dims": DIMS, "config": config, "axis_name": None, "trace": trace}
        kept = gate_up if keep else None
        return _ffi.backward_call(dy, *arrays, quantized=quantized, gate_up=kept, **how)

    arguments = (dy, gate_up, quantized, x, ids, weight, *weights[3:])
    dx, dw, *others = jax.eval_shape(backward, *arguments)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    assert len(others) == (0 if dtype is None else 3) + trace
    assert [a.dtype for a in others[: len(others) - trace]] == [dtype] * (len(others) - trace)
    operands, results = one_call("backward_fp8", lower_for_cuda(jax.jit(backward), *arguments))
    assert operands == names(backward_operands(DIMS, keep, False, "fp8_block"))
    want = names(backward_results(DIMS, dtype, keep, False, "fp8_block"))
    assert results[: len(want)] == want and len(results) == len(want) + trace


def test_the_backward_reads_the_codes_that_it_is_said_to_read() -> None:
    """By name: shapes alone do not tell w_gate from w_up, nor the orders of a square matrix."""
    x, ids, weight, quantized = types()
    weights = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in forward_operands(DIMS)[3:]]
    given = (quantized, x, x, ids, weight, *weights)

    def backward(quantized: Any, *arrays: Any) -> Any:
        how: dict[str, Any] = {"dims": DIMS, "config": CONFIG, "axis_name": None}
        return _ffi.backward_call(*arrays, quantized=quantized, **how)

    closed = jax.make_jaxpr(backward)(*given)
    (call,) = [e for e in closed.eqns if e.params.get("target_name") == _ffi.BACKWARD_FP8]
    places = {id(v): i for i, v in enumerate(closed.jaxpr.invars)}
    leaves = [f"{m}.{f}" for m in quantized._fields for f in quantized.w_gate._fields]
    leaves += ["dy", "x", "expert_idx", "expert_weight"]
    found = [leaves[places[id(v)]] for v in call.invars]
    assert found == ["dy", "x", "expert_idx", "expert_weight", *leaves[:7], leaves[8]]
    assert leaves[7] == "w_down.transposed"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"config": MegaMoEConfig(precision="fp8_block", activation="geglu")}, "'geglu'"),
        (
            {"config": MegaMoEConfig(precision="fp8_block", activation=ClampedSwiGLU())},
            "ClampedSwiGLU",
        ),
        ({"quantized": None}, "no quantised weights"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(
    options: dict[str, Any], named: str
) -> None:
    x, ids, weight, quantized = types()
    how = {"dims": DIMS, "config": CONFIG, "axis_name": None, "quantized": quantized, **options}

    def run(call: Any, *arrays: Any) -> Any:
        return call(*arrays, **how)

    weights = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in forward_operands(how["dims"])[3:]]
    for call, tokens in ((_ffi.forward_call, (x,)), (_ffi.backward_call, (x, x))):
        with pytest.raises(ValueError, match=named):
            jax.eval_shape(functools.partial(run, call), *tokens, ids, weight, *weights)


def test_rows_of_codes_have_their_scales_behind_them_in_whole_lines() -> None:
    by_name = {a.name: a for a in forward_results(DIMS, precision="fp8_block")}
    assert by_name["x_codes"].shape == (16, 256 + 128)
    assert by_name["h"].shape == (DIMS.pool_rows, 128 + 128)
    wide = {
        a.name: a
        for a in forward_results(Dims(T=1, K=1, E=1, R=1, H=4224, I=4096), precision="fp8_block")
    }
    assert wide["x_codes"].shape == (1, 4224 + 256) and wide["h"].shape[1] == 4096 + 128
