"""The custom call of the forward with precision="fp8_block", as it is lowered without a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_megamoe import ClampedSwiGLU, _ffi, quantize_expert_weights
from jax_megamoe.config import Dims, MegaMoEConfig
from jax_megamoe.memory import forward_operands, forward_results

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
    """Of the codes those in the order of the forward alone; its results are those of memory.py."""
    run = functools.partial(forward, keep_gate_up=keep, trace=trace)
    y, counts, *others = jax.eval_shape(run, *types(dtype=dtype))
    assert (y.shape, y.dtype) == ((DIMS.T, DIMS.H), dtype)
    assert (counts.shape, counts.dtype) == ((DIMS.E,), jnp.int32)
    assert len(others) == keep + trace
    lowered = jax.jit(run).trace(*types(dtype=dtype)).lower(lowering_platforms=("cuda",))
    (line,) = (line for line in lowered.as_text().splitlines() if "@jax_megamoe_forward" in line)
    assert "@jax_megamoe_forward_fp8" in line and 'precision = "fp8_block"' in line
    operands, results = line.rsplit(": (", 1)[1].split(") -> ")

    def names(arrays: Any) -> list[str]:
        short = {"float8_e4m3fn": "f8E4M3FN", "bfloat16": "bf16", "float32": "f32"}
        short |= {"int32": "i32", "uint8": "ui8"}
        return [f"tensor<{'x'.join(map(str, a.shape))}x{short[a.dtype.name]}>" for a in arrays]

    assert operands.split(", ") == names(forward_operands(DIMS, precision="fp8_block"))
    want = names(forward_results(DIMS, keep, "fp8_block"))
    found = results.strip("()").split(", ")
    assert found[: len(want)] == want and len(found) == len(want) + trace


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"config": MegaMoEConfig(precision="fp8_block", activation="geglu")}, "'geglu'"),
        (
            {"config": MegaMoEConfig(precision="fp8_block", activation=ClampedSwiGLU())},
            "ClampedSwiGLU",
        ),
        ({"dims": Dims(T=16, K=2, E=8, R=2, H=256, I=128)}, "R = 2"),
        ({"quantized": None}, "no quantised weights"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(
    options: dict[str, Any], named: str
) -> None:
    *tokens, quantized = types()
    how = {"dims": DIMS, "config": CONFIG, "axis_name": None, "quantized": quantized, **options}

    def run(*tokens: Any) -> Any:
        return _ffi.forward_call(*tokens, **how)

    with pytest.raises(ValueError, match=named):
        jax.eval_shape(run, *tokens)


def test_rows_of_codes_have_their_scales_behind_them_in_whole_lines() -> None:
    by_name = {a.name: a for a in forward_results(DIMS, precision="fp8_block")}
    assert by_name["x_codes"].shape == (16, 256 + 128)
    assert by_name["h"].shape == (DIMS.pool_rows, 128 + 128)
    wide = {
        a.name: a
        for a in forward_results(Dims(T=1, K=1, E=1, R=1, H=4224, I=4096), precision="fp8_block")
    }
    assert wide["x_codes"].shape == (1, 4224 + 256) and wide["h"].shape[1] == 4096 + 128
