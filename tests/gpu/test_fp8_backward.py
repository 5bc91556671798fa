"""The backward with precision="fp8_block" on one GPU: exact, as precise as the recipe, and the same
every time; and the op whose gradient it is."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import _ffi, quantize_expert_weights
from tests import backward, cases, compare, fp8, fp8_backward, fp8_programs, layer, races
from tests.backward import (
    NAMES,
    assert_same,
    assert_whole_trace,
    errors_by_expert,
    num_values_that_differ,
    with_gate,
)
from tests.cases import BF16, F32, ROUTINGS, Batch, Results
from tests.forward import dims_of, poison_free_memory, random_batch
from tests.fp8_backward import KINDS, SIZES, Call, gradients, launched, oracle_and_results

pytestmark = pytest.mark.gpu

NUM_RUNS = 120  # with delays
BY_KIND = pytest.mark.parametrize("kind", KINDS, ids=["bf16-none", "float32-gate_up"])
FP8: dict[str, Any] = {"precision": "fp8_block", "backend": "cuda"}


def assert_exact(found: Any, right: Results) -> None:
    for name, a in zip(NAMES, found, strict=True):
        compare.assert_exact(a, getattr(right, name), name)


def relative_error(found: Any, right: np.ndarray) -> float:
    deviation = np.asarray(found, np.float64) - right
    return float(np.linalg.norm(deviation) / np.linalg.norm(right))


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_oracle_is_exact(size: tuple[int, ...], routing: str) -> None:
    batch, right = oracle_and_results(size, routing)
    for weight_dtype, keep in KINDS:
        found = gradients(batch, (weight_dtype, keep))
        assert [a.dtype for a in found] == [BF16, F32, *[weight_dtype] * 3]
        assert_exact(found, right)


@pytest.mark.parametrize("counts", [range(129), range(129, 258)], ids=["to 128", "from 129"])
def test_every_number_of_rows_of_an_expert(counts: range) -> None:
    """Bitwise the same from g and u that are kept, in parts and at once."""
    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[:, None]
    batch, right = oracle_and_results((len(ids), 1, len(counts), 128, 128), ids)
    np.testing.assert_array_equal(cases.counts(batch), counts)
    found = gradients(batch)
    assert_exact(found, right)
    assert_same(gradients(batch, launches=_ffi.BACKWARD_UNFUSED), found)
    assert_same(gradients(batch, (BF16, True)), found)


@pytest.mark.parametrize("gate", [0, 4, -4, -6])
def test_error_of_every_expert_is_that_of_the_recipe(gate: int) -> None:
    """One expert a token, so that a token's error is its expert's; y comes with the gradients.

    The first column of w_gate is the gate's. That of dx is then a hundred times the others, and the
    error of an expert's dx that of 128 numbers, which the few codes on the other side of a rounding
    change by 2 %: it is judged over all experts, the other columns by expert.
    """
    batch = with_gate(random_batch((2048, 1, 16, 256, 256), "distinct"), gate)
    right, expert = cases.dense(batch), batch.expert_idx[:, 0]
    rounded = fp8.recipe(batch)
    y = np.asarray(fp8_programs.forward(batch)[0], np.float64)
    for e in range(batch.num_experts):
        rows = expert == e
        error = relative_error(y[rows], right.y[rows])
        assert error <= 1.02 * relative_error(rounded.y[rows], right.y[rows]), f"y of expert {e}"

    def without_first(dx: Any, *others: Any) -> tuple[Any, ...]:
        return np.asarray(dx)[:, 1:], *others

    of_others = right._replace(dx=right.dx[:, 1:])
    theirs = errors_by_expert(without_first(*rounded[1:]), of_others, expert)
    for kind in KINDS:
        found = gradients(batch, kind)
        ours = errors_by_expert(without_first(*found), of_others, expert)
        worst = np.unravel_index(np.argmax(ours / theirs), ours.shape)
        assert ours[worst] <= 1.02 * theirs[worst], (
            f"{NAMES[worst[0]]} of expert {worst[1]}: {ours[worst]} against {theirs[worst]}"
        )
        first = relative_error(np.asarray(found[0])[:, 0], right.dx[:, 0])
        assert first <= 1.02 * relative_error(rounded.dx[:, 0], right.dx[:, 0])


@pytest.mark.parametrize("size", (*SIZES[2:5], *SIZES[7:]), ids=str)
def test_gradients_are_those_of_the_recipe(size: tuple[int, ...]) -> None:
    """But for sums of products with fewer bits than a float32, and bf16 and codes of dg and du that
    fall on the other side of a rounding because of them."""
    batch = fp8.with_scales(random_batch(size, "invalid"))
    right = fp8.recipe(batch)
    found = gradients(batch, KINDS[1])
    errors = {n: relative_error(a, getattr(right, n)) for n, a in zip(NAMES, found, strict=True)}
    assert all(error < 2e-2 for error in errors.values()), errors


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gradients_of_weights_are_those_of_the_bf16_kernels(size: tuple[int, ...]) -> None:
    """On integers, which codes hold: all but dx, whose dg and du they do not hold."""
    batch = fp8.integers(random_batch(size, "duplicates"))
    right = backward.launched(*backward.operands(batch, F32), dims=dims_of(batch))
    found = gradients(batch, KINDS[1])
    for name, a, b in list(zip(NAMES, found, right, strict=True))[1:]:
        compare.assert_bitwise(a, b, name)


@BY_KIND
@pytest.mark.parametrize("routing", ["distinct", "invalid", "skewed"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fused_equals_its_parts_and_itself(
    size: tuple[int, ...], routing: str, kind: tuple[np.dtype, bool]
) -> None:
    call = Call(fp8.with_scales(random_batch(size, routing)), *kind)
    once = call.gradients(launches=_ffi.BACKWARD_UNFUSED)
    assert_same(call.gradients(), once)
    for _ in range(10):
        assert num_values_that_differ(call.gradients(), once) == 0


@pytest.mark.parametrize("size", SIZES[3:7], ids=str)
def test_what_is_kept_changes_no_bit_and_bf16_is_float32_rounded(size: tuple[int, ...]) -> None:
    batch = fp8.with_scales(random_batch(size, "duplicates"))
    sums = gradients(batch, (F32, False))
    assert_same(gradients(batch, (F32, True)), sums)
    assert_same(gradients(batch), [*sums[:2], *(a.astype(BF16) for a in sums[2:])])
    assert all(np.any(a.astype(BF16).astype(F32) != a) for a in sums[2:])


@BY_KIND
def test_frozen_experts_change_nothing_else(kind: tuple[np.dtype, bool]) -> None:
    batch = random_batch(SIZES[5], "invalid")
    assert_same(gradients(batch, kind, trainable=False), gradients(batch, kind)[:2])


@BY_KIND
def test_poisoned_memory_reaches_nothing(kind: tuple[np.dtype, bool]) -> None:
    call = Call(random_batch(SIZES[5], "invalid"), *kind)
    clean = call.gradients()
    assert all(np.isfinite(np.asarray(a).astype(F32)).all() for a in clean)
    for _ in range(2):
        poison_free_memory()
        assert_same(call.gradients(), clean)


def test_delays_change_no_bit(tmp_path: Path) -> None:
    """In the test build, which fills all results with NaN before a call."""
    found = races.delayed_runs(fp8_backward, tmp_path, NUM_RUNS)
    assert all(found.values()), found


@BY_KIND
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["x", "dy"])
def test_what_is_not_finite_stays_with_its_token_and_its_experts(
    name: str, value: float, kind: tuple[np.dtype, bool]
) -> None:
    batch = random_batch(SIZES[3], "distinct")
    dx, dw, *weights = gradients(batch, kind)
    spoilt = getattr(batch, name).copy()
    spoilt[-1, 200] = value
    found_dx, found_dw, *found = gradients(batch._replace(**{name: spoilt}), kind)
    assert np.isnan(found_dx[-1].astype(F32)).all() and np.isnan(found_dw[-1]).all()
    compare.assert_bitwise(found_dx[:-1], dx[:-1], "dx")
    compare.assert_bitwise(found_dw[:-1], dw[:-1], "dw")
    others = np.setdiff1d(np.arange(batch.num_experts), batch.expert_idx[-1])
    for gradient, a, b in zip(NAMES[2:], found, weights, strict=True):
        compare.assert_bitwise(a[others], b[others], gradient)
        of_token = a[batch.expert_idx[-1]].astype(F32)
        assert (~np.isfinite(of_token)).any(axis=(1, 2)).all(), gradient


def test_weights_of_one_expert_reach_no_other() -> None:
    """Nor do they come back through pads; dWd = (w h)^T dy reads no Wd at all."""
    batch = random_batch(SIZES[3], "distinct")
    clean = gradients(batch)
    w_down = batch.w_down.copy()
    w_down[2, :, 0] = np.inf
    found = gradients(batch._replace(w_down=w_down))
    compare.assert_bitwise(found[4], clean[4], "dw_down")
    others = np.arange(batch.num_experts) != 2
    away = ~(batch.expert_idx == 2).any(axis=1)
    for name, a, b in zip(NAMES, found, clean, strict=True):
        same = others if name.startswith("dw_") else away
        compare.assert_bitwise(a[same], b[same], name)


@BY_KIND
def test_a_trace_records_every_item_and_changes_nothing(kind: tuple[np.dtype, bool]) -> None:
    batch = random_batch(SIZES[5], "distinct")
    *found, records = gradients(batch, kind, trace=True)
    assert_same(found, gradients(batch, kind))
    assert_whole_trace(records, batch)


# One part without the one before it: its input never comes.
@pytest.mark.parametrize(
    ("part", "phase"),
    [(32, "dispatch"), (64, "dgrad_down"), (128, "dgrad_down"), (8, "dgrad_gate_up")],
)
def test_a_wait_gives_up_and_names_its_phase(part: int, phase: str) -> None:
    call = Call(random_batch((2048, 8, 16, 512, 512), "distinct"))
    expected = jax.block_until_ready(call.gradients())
    jax.block_until_ready(call.gradients(launches=(part,), deadline_s=0.2))
    message = rf"ABORTED.*gave up waiting for rank 0 after \d+ ms: phase {phase}, .*block \d+"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call.gradients())
    assert_same(call.gradients(), expected)


@pytest.mark.parametrize("matrix", ["w_gate", "w_down"])
def test_weights_of_another_shape_are_refused_before_any_launch(matrix: str) -> None:
    call = Call(random_batch(SIZES[3], "distinct"))
    right = getattr(call.quantized, matrix)
    wrong = call.quantized._replace(**{matrix: right._replace(scales=right.scales[:, 1:])})
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*{matrix}.scales is"):
        options = (("dims", call.dims),)
        jax.block_until_ready(launched(wrong, None, *call.arrays, options=options))


# The op.


def cast(batch: Batch, dtype: np.dtype) -> Batch:
    return Batch(*(a if a.dtype == np.int32 else a.astype(dtype) for a in batch))


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_the_gradient_of_the_op(dtype: np.dtype, save: str) -> None:
    """`jax.vjp` of mega_moe gives the call's gradients in the dtypes of the arguments, whoever
    quantises, and is about what the reference gives."""
    batch = random_batch(SIZES[3], "distinct")
    given = cast(batch, dtype)
    found = layer.run(given, **FP8, save=save)
    assert all(a.dtype == dtype for a in found)
    of_call = [a.astype(BF16) for a in gradients(batch)]
    assert_same([a.astype(BF16) for a in found[1:]], of_call)
    by_caller = fp8.run_with(fp8.quantize(given), given, backend="cuda", save=save)
    compare.assert_results_bitwise(by_caller, found)
    reference = fp8.run_with(fp8.quantize(given), given, backend="reference")
    for name, a, b in zip(Results._fields, found, reference, strict=True):
        assert relative_error(a, np.asarray(b, np.float64)) < 3e-2, name


@pytest.mark.parametrize("save", ["none", "gate_up"])
def test_auto_is_the_kernels(save: str) -> None:
    batch = random_batch(SIZES[3], "distinct")
    auto = layer.compiled(save=save, precision="fp8_block")
    text = auto.trace(*batch).lower().as_text()
    for name in ("forward_fp8", "backward_fp8"):
        assert text.count(f"@jax_megamoe_{name}") == 1
    compare.assert_results_bitwise(auto(*batch), layer.run(batch, **FP8))


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_inside_scan_and_remat(policy: str, save: str) -> None:
    """Gradients of a stack of residual layers, which share weights that are quantised once."""
    batch = random_batch(SIZES[3], "distinct")
    x, ids, w, *weights, dy = map(jnp.asarray, batch)

    def stack(wrap: Any, scanned: bool) -> Any:
        def run(x: Any, w: Any, *weights: Any) -> Any:
            quantized = quantize_expert_weights(*map(jax.lax.stop_gradient, weights))
            op = layer.bind(**FP8, save=save, quantized_experts=quantized)
            block = wrap(lambda x, *arrays: x + op(x, ids, *arrays))
            if scanned:
                return jax.lax.scan(lambda x, _: (block(x, w, *weights), None), x, length=3)[0]
            for _ in range(3):
                x = block(x, w, *weights)
            return x

        return jax.jit(lambda *primals: jax.vjp(run, *primals)[1](dy))

    saved = functools.partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
    for scanned in (False, True):
        want = stack(lambda f: f, scanned)(x, w, *weights)
        assert all(np.any(a) for a in want)
        assert_same(stack(saved, scanned)(x, w, *weights), want)


def test_calls_of_both_precisions_do_not_disturb_each_other() -> None:
    small, large = random_batch(SIZES[2], "distinct"), random_batch(SIZES[5], "distinct")
    runs = [layer.compiled(**FP8), layer.compiled(backend="cuda")]
    want = [[run(*batch) for run in runs] for batch in (small, large)]

    @jax.jit
    def both(small: Any, large: Any) -> Any:
        return [[run(*batch) for run in runs] for batch in (small, large)]

    for of_batch, right in zip(both(small, large), want, strict=True):
        for a, b in zip(of_batch, right, strict=True):
            compare.assert_results_bitwise(a, b)
