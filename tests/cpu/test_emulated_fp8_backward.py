"""The backward with precision="fp8_block" on an emulated machine: its kernels, as they are.

Sizes have half tiles and whole ones, column tiles that end behind H and behind I, with and without
a second half, and numbers of K-blocks around those of which a warp loads the scales at once.
"""

from typing import Any

import numpy as np
import pytest

from jax_megamoe import _ffi
from tests import cases, compare, emulated, fp8
from tests.backward import NAMES, assert_same, assert_whole_trace
from tests.cases import BF16, F32, ROUTINGS, Batch, Results, normal_of, oracle_of

# T, K, E, H, I and the routing.
CASES = (
    ((5, 8, 16, 128, 128), "distinct"),
    ((150, 2, 4, 128, 256), "skewed"),
    ((300, 3, 6, 384, 128), "invalid"),
    ((200, 2, 8, 128, 128), "duplicates"),
    ((130, 2, 2, 640, 256), "one_expert"),
    ((40, 2, 4, 128, 128), "nothing"),
    ((140, 2, 3, 256, 384), "distinct"),
    ((6, 1, 2, 4224, 128), "distinct"),
    ((6, 1, 2, 128, 2176), "distinct"),
    ((70, 1, 2, 128, 640), "distinct"),
)
IDS = [f"{size}-{routing}" for size, routing in CASES]
# Orders of events, numbers of blocks, and launches of one part each.
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"launches": _ffi.BACKWARD_UNFUSED},
    {"seed": 1, "multiprocessors": 2},
    {"seed": 2, "multiprocessors": 4},
    {"seed": 3, "multiprocessors": 6},
)


def gradients(batch: Batch, **how: Any) -> list[np.ndarray]:
    return emulated.backward_fp8(batch, fp8.quantized_weights(batch), **how)


def kept_gradients(batch: Batch, **how: Any) -> list[np.ndarray]:
    """Of g and u that the forward keeps."""
    weights = fp8.quantized_weights(batch)
    _, _, gate_up = emulated.forward_fp8(batch, weights, keep=True)
    return emulated.backward_fp8(batch, weights, gate_up=gate_up, **how)


def assert_exact(found: list[np.ndarray], right: Results) -> None:
    for name, a in zip(NAMES, found, strict=True):
        compare.assert_exact(a, getattr(right, name), name)


def errors(found: list[np.ndarray], right: Results) -> dict[str, float]:
    """The root mean square of the relative errors of tokens, slots or experts, by gradient."""
    of_groups = compare.errors(Results(right.y, *found), right)._asdict()
    return {name: float(np.sqrt(np.mean(of_groups[name] ** 2))) for name in NAMES}


def beyond(off: dict[str, float]) -> list[str]:
    """The gradients whose errors are more than those of float32 sums in another order, which change
    few bf16: dx has codes of dg and du besides, each of which changes by a sixteenth."""
    return [name for name, error in off.items() if error > (1e-3 if name == "dx" else 1e-4)]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_gradients_of_the_oracle_are_exact(
    size: tuple[int, ...], routing: str, dtype: np.dtype
) -> None:
    batch = oracle_of(size, routing)
    right = cases.oracle_results(batch)
    for run in (gradients, kept_gradients):
        found = run(batch, weight_dtype=dtype)
        assert [a.dtype for a in found] == [BF16, F32, *[dtype] * 3]
        assert_exact(found, right)


def test_tags_of_more_experts_than_a_code_tells_apart() -> None:
    ids = ROUTINGS["distinct"](tokens=60, choices=4, experts=40)
    how: dict[str, Any] = {"hidden": 128, "intermediate": 128, "dtype": BF16}
    batch = fp8.two_column_oracle(ids, num_experts=40, **how)
    right = fp8.two_column_results(batch)
    for run in (gradients, kept_gradients):
        assert_exact(run(batch, weight_dtype=F32), right)


@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_gradients_are_those_of_the_recipe_in_every_order(
    size: tuple[int, ...], routing: str
) -> None:
    batch = fp8.with_scales(normal_of(size, routing))
    found = gradients(batch, weight_dtype=F32)
    off = errors(found, fp8.recipe(batch))
    assert not beyond(off), off
    for how in SCHEDULES:
        assert_same(gradients(batch, weight_dtype=F32, **how), found)
        assert_same(kept_gradients(batch, weight_dtype=F32, **how), found)


@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_gradients_of_weights_are_those_of_bf16_with_the_same_operands(
    size: tuple[int, ...], routing: str
) -> None:
    """Integers, which codes hold: all but dx, whose dg and du they do not hold."""
    batch = fp8.integers(normal_of(size, routing))
    right = emulated.backward(batch, weight_dtype=F32)
    for run in (gradients, kept_gradients):
        found = run(batch, weight_dtype=F32)
        for name, a, b in list(zip(NAMES, found, right, strict=True))[1:]:
            compare.assert_bitwise(a, b, name)


@pytest.mark.parametrize("left_out", ["x", "dy", "dg", "du", "w_gate", "w_up", "w_down"])
def test_a_quantised_operand_less_would_be_seen(left_out: str) -> None:
    batch = fp8.with_scales(normal_of(*CASES[6]))
    operands = [name for name in fp8.OPERANDS if name != left_out]
    off = errors(gradients(batch, weight_dtype=F32), fp8.recipe(batch, operands=operands))
    assert any(error > 1e-2 for error in off.values()), off


def test_experts_that_end_at_every_border() -> None:
    """Of a tile and of its half; with more choices than experts."""
    rows = (0, 1, 8, 9, 63, 64, 65, 127, 128, 129)
    ids = np.full((20, 32), -1, np.int32)
    ids.ravel()[: sum(rows)] = np.repeat(np.arange(len(rows)), rows)
    ids = np.random.default_rng(0).permuted(ids.ravel()).reshape(ids.shape)
    batch = cases.normal(ids, num_experts=len(rows), hidden=128, intermediate=256, dtype=BF16)
    found = gradients(batch, weight_dtype=F32)
    off = errors(found, fp8.recipe(batch))
    assert not beyond(off), off
    assert_same(kept_gradients(batch, weight_dtype=F32), found)


def test_bf16_gradients_are_the_float32_ones_rounded() -> None:
    batch = normal_of(*CASES[2])
    sums = gradients(batch, weight_dtype=F32)
    assert_same(gradients(batch), [*sums[:2], *(a.astype(BF16) for a in sums[2:])])


@pytest.mark.parametrize("run", [gradients, kept_gradients])
def test_frozen_experts_change_nothing_else(run: Any) -> None:
    batch = normal_of(*CASES[2])
    assert_same(run(batch, trainable=False), run(batch)[:2])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["x", "dy"])
def test_what_is_not_finite_stays_with_its_token_and_its_experts(name: str, value: float) -> None:
    """In one of two groups of a row, and in the last row of its tile."""
    batch = normal_of(*CASES[6])
    clean = gradients(batch, weight_dtype=F32)
    spoilt = getattr(batch, name).copy()
    spoilt[-1, 200] = value
    for run in (gradients, kept_gradients):
        dx, dw, *weights = run(batch._replace(**{name: spoilt}), weight_dtype=F32)
        assert np.isnan(dx[-1].astype(F32)).all() and np.isnan(dw[-1]).all()
        compare.assert_bitwise(dx[:-1], clean[0][:-1], "dx")
        compare.assert_bitwise(dw[:-1], clean[1][:-1], "dw")
        others = np.setdiff1d(np.arange(batch.num_experts), batch.expert_idx[-1])
        for gradient, a, b in zip(NAMES[2:], weights, clean[2:], strict=True):
            compare.assert_bitwise(a[others], b[others], gradient)
            assert (~np.isfinite(a[batch.expert_idx[-1]])).any(axis=(1, 2)).all(), gradient


def test_zeros_stay_zeros() -> None:
    """Of a token, of one of its groups and of an expert's gate, whose scales are 1."""
    batch = normal_of((150, 1, 4, 256, 256), "distinct")
    dy, w_gate = batch.dy.copy(), batch.w_gate.copy()
    dy[0], dy[1, :128], w_gate[1] = 0, 0, 0
    dx, dw, _, dw_up, dw_down = gradients(batch._replace(dy=dy, w_gate=w_gate), weight_dtype=F32)
    assert not np.any(dx[0]) and not np.any(dw[0])
    assert np.any(dx[1]) and np.isfinite(dx[1].astype(F32)).all()
    assert not np.any(dw_up[1]) and not np.any(dw_down[1])
    assert not np.any(dw[batch.expert_idx == 1])
    assert all(np.isfinite(a.astype(F32)).all() for a in (dx, dw, dw_up, dw_down))


def test_weights_that_are_not_finite_do_not_come_back_through_pads() -> None:
    """dWd = (w h)^T dy reads no Wd, and an expert's pads are 0 whatever its weights hold."""
    batch = normal_of(*CASES[1])
    w_down = batch.w_down.copy()
    w_down[0, :, 0] = np.inf
    clean = gradients(batch)
    found = gradients(batch._replace(w_down=w_down))
    compare.assert_bitwise(found[4], clean[4], "dw_down")
    for name, a, b in zip(NAMES[2:4], found[2:4], clean[2:4], strict=True):
        compare.assert_bitwise(a[1:], b[1:], name)
    away = ~(batch.expert_idx == 0).any(axis=1)
    compare.assert_bitwise(found[0][away], clean[0][away], "dx")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keep", [False, True])
def test_a_call_that_has_failed_ends(keep: bool, seed: int) -> None:
    """Its waits come back early or, for the parts without the one before, always in vain."""
    batch = normal_of(*CASES[1])
    how: dict[str, Any] = {"seed": seed, "failed_ranks": (0,)}
    if keep:
        _, _, how["gate_up"] = emulated.forward_fp8(batch, fp8.quantized_weights(batch), keep=True)
    for parts in (_ffi.BACKWARD_FUSED, *((part,) for part in _ffi.BACKWARD_UNFUSED)):
        assert gradients(batch, launches=parts, **how)[0].shape == batch.x.shape


@pytest.mark.parametrize("run", [gradients, kept_gradients])
def test_a_trace_records_every_item_and_changes_nothing(run: Any) -> None:
    batch = normal_of(*CASES[6])
    *found, records = run(batch, trace=True)
    assert_same(found, run(batch))
    assert_whole_trace(records, batch)
