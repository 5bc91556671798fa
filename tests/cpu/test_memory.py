"""What a call asks of memory: the report is the call's own arrays, and too much is refused."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import _call_arrays, _ffi, mega_moe, memory, memory_plan, quantize_expert_weights
from jax_megamoe.config import Dims, MegaMoEConfig

DIMS = Dims(T=300, K=3, E=12, R=1, H=128, I=64)
SIZES: dict[str, Any] = {"T": 300, "K": 3, "E": 12, "H": 128, "I": 64}


def types(sizes: dict[str, Any] = SIZES, float_dtype: Any = jnp.bfloat16) -> list[Any]:
    T, K, E, H, I = (sizes[letter] for letter in "TKEHI")
    shapes = ((T, H), (T, K), (T, K), (E, H, I), (E, H, I), (E, I, H))
    dtypes = [float_dtype] * 6
    dtypes[1] = jnp.int32
    return [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, dtypes, strict=True)]


def equation_of(jaxpr: Any, target: str) -> Any:
    (found,) = [e for e in jaxpr.eqns if e.params.get("target_name") == target]
    return found


def quantized_types(sizes: dict[str, Any]) -> Any:
    return jax.eval_shape(quantize_expert_weights, *types(sizes)[3:])


def num_bytes(variables: Any) -> int:
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)


def bias_types(sizes: dict[str, int] = SIZES) -> list[jax.ShapeDtypeStruct]:
    shapes = [(sizes["E"], sizes[letter]) for letter in "IIH"]
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


@pytest.mark.parametrize("expert_bias", [False, True])
@pytest.mark.parametrize("keep_gate_up", [False, True])
@pytest.mark.parametrize("letters", [{}, {"T": 1}, {"E": 7}, {"K": 32}, {"I": 4096}])
def test_report_is_what_the_call_holds(
    letters: dict[str, int], keep_gate_up: bool, expert_bias: bool
) -> None:
    sizes: dict[str, Any] = SIZES | letters

    def forward(*operands: jax.Array) -> Any:
        how: dict[str, Any] = {"config": MegaMoEConfig(), "axis_name": None}
        how["dims"] = Dims(R=1, **sizes)
        return _ffi.forward_call(*operands, keep_gate_up=keep_gate_up, **how)

    operands = types(sizes) + (bias_types(sizes) if expert_bias else [])
    equation = equation_of(jax.make_jaxpr(forward)(*operands).jaxpr, _ffi.FORWARD)
    report = memory_plan(**sizes, expert_bias=expert_bias)
    results = equation.outvars
    if keep_gate_up:
        assert report.gate_up_bytes == num_bytes([results.pop()])
    y, *plan, pool, h, counters = results
    assert report.operands_bytes == num_bytes(equation.invars)
    assert report.y_bytes == num_bytes([y])
    assert report.plan_bytes == num_bytes(plan)
    assert report.pool_bytes == num_bytes([pool])
    assert report.h_bytes == num_bytes([h])
    assert report.counters_bytes == num_bytes([counters])
    assert report.total_bytes == num_bytes([*equation.invars, *results])


@pytest.mark.parametrize("keep_gate_up", [False, True])
@pytest.mark.parametrize("letters", [{}, {"T": 1}, {"E": 7}, {"I": 4096}])
def test_report_of_fp8_is_what_the_call_holds(letters: dict[str, int], keep_gate_up: bool) -> None:
    sizes: dict[str, Any] = {**SIZES, "I": 256, **letters}
    config = MegaMoEConfig(precision="fp8_block")

    def forward(quantized: Any, *tokens: jax.Array) -> Any:
        how: dict[str, Any] = {"config": config, "axis_name": None, "dims": Dims(R=1, **sizes)}
        return _ffi.forward_call(*tokens, quantized=quantized, keep_gate_up=keep_gate_up, **how)

    jaxpr = jax.make_jaxpr(forward)(quantized_types(sizes), *types(sizes)[:3]).jaxpr
    equation = equation_of(jaxpr, _ffi.FORWARD_FP8)
    report = memory_plan(**sizes, precision="fp8_block")
    results = equation.outvars
    if keep_gate_up:
        assert report.gate_up_bytes == num_bytes([results.pop()])
    y, *plan, x_codes, x_pool, h, o, counters = results
    assert report.operands_bytes == num_bytes(equation.invars)
    assert report.y_bytes == num_bytes([y])
    assert report.plan_bytes == num_bytes(plan)
    assert report.pool_bytes == num_bytes([x_codes, x_pool, o])
    assert report.h_bytes == num_bytes([h])
    assert report.counters_bytes == num_bytes([counters])
    assert report.total_bytes == num_bytes([*equation.invars, *results])


@pytest.mark.parametrize("keep_gate_up", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, None])
def test_backward_of_fp8_is_refused_for_what_it_holds(
    set_limit: Any, dtype: Any, keep_gate_up: bool
) -> None:
    dims = dataclasses.replace(DIMS, I=256)
    sizes = {letter: getattr(dims, letter) for letter in "TKEHI"}
    config = MegaMoEConfig(precision="fp8_block", trainable_experts=dtype is not None)
    x, *rest = types(sizes, dtype or jnp.bfloat16)
    kept = _call_arrays.gate_up_array(dims)

    def backward(quantized: Any, gate_up: jax.Array, *operands: jax.Array) -> Any:
        how: dict[str, Any] = {"gate_up": gate_up} if keep_gate_up else {}
        how |= {"dims": dims, "config": config, "axis_name": None, "quantized": quantized}
        return _ffi.backward_call(*operands, **how)

    gate_up = jax.ShapeDtypeStruct(kept.shape, kept.dtype)
    made = jax.make_jaxpr(backward)(quantized_types(sizes), gate_up, x, x, *rest)
    call = equation_of(made.jaxpr, _ffi.BACKWARD_FP8)
    total = num_bytes([*call.invars, *call.outvars])
    workspace = num_bytes(call.outvars[2 if dtype is None else 5 :])
    how = (keep_gate_up, False, "fp8_block")
    set_limit(total)
    memory.check_backward_fits(dims, dtype, *how)
    set_limit(total - 1)
    match = rf"backward of .* needs {total} bytes .*\({workspace} of workspace\)"
    with pytest.raises(MemoryError, match=match):
        memory.check_backward_fits(dims, dtype, *how)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"precision": "float32"}, "precision: was 'float32'; it may be one of 'bf16', 'fp8_bl"),
        ({"expert_bias": True}, "precision: was 'fp8_block' with biases; it may be 'bf16' there"),
        ({"I": 192}, "I: was 192; it may be in 1..2147483647 and a multiple of 128"),
    ],
)
def test_what_the_kernels_of_fp8_do_not_take_has_no_report(
    change: dict[str, Any], match: str
) -> None:
    how: dict[str, Any] = {**SIZES, "I": 256, "precision": "fp8_block", **change}
    with pytest.raises(ValueError, match=f"^{match}"):
        memory_plan(**how)


@pytest.mark.parametrize("expert_bias", [False, True])
@pytest.mark.parametrize("keep_gate_up", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, None])
def test_backward_is_refused_for_what_it_holds(
    set_limit: Any, dtype: Any, keep_gate_up: bool, expert_bias: bool
) -> None:
    """What the call holds is what is compared with the device; dtype None: frozen experts."""
    config = MegaMoEConfig(trainable_experts=dtype is not None)
    x, *rest = types(float_dtype=dtype or jnp.bfloat16)
    rest += bias_types() if expert_bias else []
    x = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)

    kept = _call_arrays.gate_up_array(DIMS)

    def backward(gate_up: jax.Array, *operands: jax.Array) -> Any:
        how: dict[str, Any] = {"gate_up": gate_up} if keep_gate_up else {}
        return _ffi.backward_call(*operands, dims=DIMS, config=config, axis_name=None, **how)

    gate_up = jax.ShapeDtypeStruct(kept.shape, kept.dtype)
    (call,) = [
        e
        for e in jax.make_jaxpr(backward)(gate_up, x, x, *rest).jaxpr.eqns
        if e.params.get("target_name") == _ffi.BACKWARD
    ]
    num_gradients = 2 if dtype is None else 8 if expert_bias else 5
    total = num_bytes([*call.invars, *call.outvars])
    workspace = num_bytes(call.outvars[num_gradients:])
    set_limit(total)
    memory.check_backward_fits(DIMS, dtype, keep_gate_up, expert_bias)
    set_limit(total - 1)
    match = rf"backward of .* needs {total} bytes .*\({workspace} of workspace\)"
    with pytest.raises(MemoryError, match=match):
        memory.check_backward_fits(DIMS, dtype, keep_gate_up, expert_bias)


def test_backward_of_more_bytes_than_64_bits_hold_is_refused() -> None:
    most = 2**31 - 1
    dims = Dims(T=1, K=1, E=512, R=1, H=most, I=most)
    with pytest.raises(ValueError, match="the backward of .* 64 bits hold; the largest array is "):
        memory.check_backward_fits(dims, None)


def test_report_of_a_known_shape() -> None:
    """T K = 131072 routes of 128 experts: 128 last tiles of one row, the rest in whole tiles."""
    report = memory_plan(T=16384, K=8, E=128, H=2048, I=768)
    rows = 128 * (128 + (131072 - 128) // 128)
    assert report.pool_bytes == rows * 2048 * 2
    assert report.h_bytes == rows * 768 * 2
    assert report.operands_bytes == 2 * 16384 * 2048 + 8 * 131072 + 6 * 128 * 2048 * 768
    parts = (report.plan_bytes, report.pool_bytes, report.h_bytes, report.counters_bytes)
    assert report.workspace_bytes == sum(parts)
    assert report.total_bytes == sum(parts) + report.operands_bytes + report.y_bytes


@pytest.mark.parametrize(
    ("dtype", "hidden", "pages"),
    [("float32", 2048, 195), ("float32", 4096, 387), ("bfloat16", 2048, 131)],
)
def test_what_ranks_share_of_a_known_shape(dtype: str, hidden: int, pages: int) -> None:
    """docs/protocol.md: two rows of bf16 and R sums for each token, and little else."""
    sizes: dict[str, Any] = {"T": 16384, "K": 8, "E": 128, "H": hidden, "I": 768}
    sizes["combine_dtype"] = dtype
    report = memory_plan(**sizes, R=2)
    assert report.peer_bytes == pages * (2 << 20)
    sums = 2 * np.dtype(dtype).itemsize
    assert 0 < report.peer_bytes - 16384 * hidden * (2 + 2 + sums) < 7_000_000
    assert memory_plan(**sizes).peer_bytes == 0
    with pytest.raises(ValueError, match="^combine_dtype: was 'fp8'; it may be one of 'float32'"):
        memory_plan(**{**sizes, "combine_dtype": "fp8"})


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0, 8.0])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("tokens", [0, 1, 77, 140_000])
def test_pool_is_bounded(tokens: int, ranks: int, factor: float) -> None:
    report = memory_plan(T=tokens, K=8, E=128, R=ranks, H=64, I=64, pool_factor=factor)
    rows = report.pool_bytes // (2 * 64)
    assert rows * 2 * 64 == report.pool_bytes
    assert rows <= ranks * tokens * 8 + 127 * 128 // ranks
    assert rows <= max(factor * tokens, ranks) * 8 + 127 * 128 // ranks


def test_every_array_over_pool_rows_is_bounded() -> None:
    """docs/protocol.md: 1.25 times the even rows of EP8 take what one rank takes, and a little."""
    sizes: dict[str, Any] = {"T": 16384, "K": 8, "E": 128, "H": 2048, "I": 768}
    one, eight = memory_plan(**sizes), memory_plan(**sizes, R=8, pool_factor=1.25)
    assert eight.workspace_bytes < 1.14 * one.workspace_bytes
    assert eight.gate_up_bytes < 1.13 * one.gate_up_bytes
    assert memory_plan(**sizes, R=8).workspace_bytes == 1_493_250_228
    assert memory_plan(**sizes, R=8, pool_factor=8.0).workspace_bytes == 5_926_348_052


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gradients_that_several_passes_may_add_up_are_float32(dtype: Any) -> None:
    dims = dataclasses.replace(DIMS, R=4)
    for factor, right in ((2.0, jnp.float32), (4.0, dtype)):
        dims = dataclasses.replace(dims, pool_factor=factor)
        gradients = _call_arrays.backward_results(dims, dtype)[2:5]
        assert [g.name for g in gradients] == ["dw_gate", "dw_up", "dw_down"]
        assert all(g.dtype == right for g in gradients)


def test_more_bytes_than_64_bits_hold_are_refused_by_name() -> None:
    most = 2**31 - 64
    with pytest.raises(ValueError, match=rf"64 bits hold; the largest array is w_gate .*{most}"):
        memory_plan(T=1, K=1, E=512, H=most, I=most)


@pytest.mark.parametrize(
    ("letters", "error", "match"),
    [
        ({"K": 33}, ValueError, "K: was 33"),
        ({"E": 513}, ValueError, "E: was 513"),
        ({"R": 3}, ValueError, "R: was 3"),
        ({"T": -1}, ValueError, "T: was -1"),
        ({"H": 0}, ValueError, "H: was 0"),
        ({"I": 2**31}, ValueError, "I: was 2147483648"),
        ({"T": 2**31 - 1, "K": 32}, ValueError, "routes R[*]T[*]K"),
        ({"H": 64.0}, TypeError, "H: was 64.0"),
        ({"T": 1.5}, TypeError, "T: was 1.5"),
        ({"H": 40}, ValueError, "H: was 40.*a multiple of 64"),
        ({"pool_factor": 0.5}, ValueError, "pool_factor: was 0.5"),
        ({"pool_factor": "2"}, TypeError, "pool_factor: was '2'"),
    ],
)
def test_sizes_are_judged(letters: dict[str, Any], error: type[Exception], match: str) -> None:
    # Without the annotations' own check, which is switched on in tests only.
    unchecked = getattr(memory_plan, "__wrapped__", memory_plan)
    with pytest.raises(error, match=match):
        unchecked(**SIZES | letters)


@pytest.fixture
def set_limit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives this process CUDA devices of the given limits, 100 bytes of each in use."""

    def set_limits(*limits: int) -> None:
        stats = [{"bytes_limit": limit, "bytes_in_use": 100} for limit in limits]
        monkeypatch.setattr(memory, "_cuda_memory_stats", lambda: stats)

    return set_limits


def trace(**options: Any) -> None:
    jax.eval_shape(lambda *a: mega_moe(*a, **options), *types())


def test_what_fits_nowhere_is_refused_while_tracing(set_limit: Any) -> None:
    report = memory_plan(**SIZES)
    set_limit(report.total_bytes)
    trace(backend="cuda")
    set_limit(report.total_bytes - 1, 5000)
    numbers = rf"needs {report.total_bytes} bytes .*\({report.workspace_bytes} of workspace\)"
    limits = rf"take {report.total_bytes - 1} bytes .* {report.total_bytes - 101} are free"
    with pytest.raises(MemoryError, match=rf"{numbers}.*{limits}.*XLA_PYTHON_CLIENT_MEM_FRACTION"):
        trace(backend="cuda")
    trace(backend="reference")
    set_limit(5000, report.total_bytes)
    trace(backend="cuda")


def test_a_forward_that_keeps_more_is_refused_for_it(set_limit: Any) -> None:
    report = memory_plan(**SIZES)
    total = report.total_bytes + report.gate_up_bytes
    set_limit(total)
    memory.check_fits(DIMS, keep_gate_up=True)
    set_limit(total - 1)
    memory.check_fits(DIMS)
    with pytest.raises(MemoryError, match=f"needs {total} bytes"):
        memory.check_fits(DIMS, keep_gate_up=True)


def test_message_says_what_the_fraction_is(set_limit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(200)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    for value, text in (("", "0.75, the default"), (".25", ".25")):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", value)
        with pytest.raises(MemoryError, match=rf"\(now {text}\)"):
            memory.check_fits(DIMS)


def test_without_a_device_or_a_limit_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory._cuda_memory_stats() == []
    memory.check_fits(DIMS)
    monkeypatch.setattr(memory, "_cuda_memory_stats", lambda: [{}, {"bytes_in_use": 5}])
    memory.check_fits(DIMS)
