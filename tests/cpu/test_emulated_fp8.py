"""The forward with precision="fp8_block" on an emulated machine: its kernels, as they are.

Sizes have half tiles and whole ones, column tiles that end behind H, and numbers of K-blocks around
those of which a warp loads the scales at once.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jax_megamoe import _ffi
from tests import cases, compare, emulated, fp8
from tests.cases import BF16, F32, Batch, normal_of, oracle_of

# T, K, E, H, I and the routing.
CASES = (
    ((5, 8, 16, 128, 128), "distinct"),
    ((150, 2, 4, 128, 256), "skewed"),
    ((300, 3, 6, 384, 128), "invalid"),
    ((200, 2, 8, 128, 128), "duplicates"),
    ((130, 2, 2, 640, 256), "one_expert"),
    ((40, 2, 4, 128, 128), "nothing"),
    ((6, 1, 2, 2176, 128), "distinct"),
    ((6, 1, 2, 4224, 128), "distinct"),
    ((6, 1, 2, 128, 2176), "distinct"),
    ((140, 2, 3, 256, 384), "distinct"),
)
IDS = [f"{size}-{routing}" for size, routing in CASES]
# Orders of events, numbers of blocks, and launches of one part each.
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"launches": _ffi.UNFUSED},
    {"seed": 1, "multiprocessors": 2},
    {"seed": 2, "multiprocessors": 4},
    {"seed": 3, "multiprocessors": 6},
)


def forward(batch: Batch, **how: Any) -> np.ndarray:
    return emulated.forward_fp8(batch, fp8.quantized_weights(batch), **how)[0]


def forward_keeping(batch: Batch, **how: Any) -> tuple[np.ndarray, np.ndarray]:
    y, _, gate_up = emulated.forward_fp8(batch, fp8.quantized_weights(batch), keep=True, **how)
    return y, gate_up


def error(found: np.ndarray, right: np.ndarray) -> float:
    """The root mean square of the deviation over that of what is right."""
    found = found.astype(np.float64)
    return float(np.sqrt(np.mean((found - right) ** 2) / np.mean(right**2)))


@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_y_of_the_oracle_is_exact(size: tuple[int, ...], routing: str) -> None:
    batch = oracle_of(size, routing)
    compare.assert_exact(forward(batch), cases.oracle_results(batch).y, "y")


@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_y_is_that_of_the_recipe_in_every_order(size: tuple[int, ...], routing: str) -> None:
    """Float32 sums of another order change few codes of h, each by a sixteenth, and few bf16. With
    another silu, within 3.6e-4, more codes change, and it shows."""
    batch = fp8.with_scales(normal_of(size, routing))
    y = forward(batch)
    if routing == "nothing":
        assert not np.any(y)
    else:
        assert error(y, fp8.recipe(batch, fp8.swiglu_of_kernels).y) < 1e-4
        assert 2e-4 < error(y, fp8.recipe(batch).y) < 1e-2
    for how in SCHEDULES:
        compare.assert_bitwise(forward(batch, **how), y, "y")
        found, _ = forward_keeping(batch, **how)
        compare.assert_bitwise(found, y, "y, g and u kept")


def test_experts_that_end_at_every_border() -> None:
    """Of a tile and of its half; with more choices than experts."""
    rows = (0, 1, 8, 9, 63, 64, 65, 127, 128, 129)
    ids = np.full((20, 32), -1, np.int32)
    ids.ravel()[: sum(rows)] = np.repeat(np.arange(len(rows)), rows)
    ids = np.random.default_rng(0).permuted(ids.ravel()).reshape(ids.shape)
    batch = cases.normal(ids, num_experts=len(rows), hidden=128, intermediate=256, dtype=BF16)
    y, gate_up = forward_keeping(batch)
    assert error(y, fp8.recipe(batch, fp8.swiglu_of_kernels).y) < 1e-4
    assert np.isfinite(gate_up.astype(F32)).all()
    assert np.count_nonzero(gate_up) == sum(rows) * 2 * 256


def dequantised(batch: Batch) -> Batch:
    """What the codes of x and of the weights stand for: bf16 holds it."""
    weights = zip(fp8.INPUTS[1:], fp8.weights_of(batch), strict=True)
    right = {name: np.stack([*map(fp8.rounded_blocks, w)]) for name, w in weights}
    right["x"] = fp8.rounded_rows(batch.x)
    return batch._replace(**{name: a.astype(BF16) for name, a in right.items()})


@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_g_and_u_are_those_of_bf16_with_the_same_operands(
    size: tuple[int, ...], routing: str
) -> None:
    """All of what is kept, in the places in which the bf16 kernels keep it."""
    batch = fp8.integers(normal_of(size, routing))
    _, right = emulated.forward_keeping(batch)
    for how in SCHEDULES[1:]:
        compare.assert_bitwise(forward_keeping(batch, **how)[1], right, "gate_up")
    # Sums that are rounded: some bf16 fall on the other side.
    batch = fp8.with_scales(normal_of(size, routing))
    _, right = emulated.forward_keeping(dequantised(batch))
    _, found = forward_keeping(batch)
    assert np.mean(found != right) < 1e-2
    assert np.all(np.abs(found.astype(F32) - right) <= 2.0**-7 * np.abs(right.astype(F32)) + 1e-5)
    assert np.array_equal(found == 0, right == 0)


def groups() -> np.ndarray:
    """Rows of one group each, in bf16: every scale, what lies beside its borders, and the rest."""
    rng = np.random.default_rng(0)
    some = rng.uniform(-1, 1, (len(fp8.SCALES), 128)) * 448 * fp8.SCALES[:, None]
    largest, above = some.copy(), some.copy()
    largest[:, 17] = 448 * fp8.SCALES
    above[:, 17] = 450 * fp8.SCALES
    least = np.tile(2.0 ** -np.arange(118, 134), (3, 8)) * np.array([[1], [-1], [0]])
    special = np.tile(some[100], (5, 1))
    special[0, 3], special[1, 3], special[2, 3], special[3, 3:5] = np.nan, np.inf, -np.inf, 0
    special[4] = -0.0
    # All codes and what lies between them, ties too.
    codes = np.arange(0, 449, 0.5).reshape(-1, 1) * np.ones(128)
    codes[:, 0] = 448
    odd = np.concatenate([codes * 2.0**-9, -codes * 2.0**-3, codes])
    odd[:, 0] = 448
    rows = np.concatenate([largest, above, least, special, odd])
    # bf16 holds no more than this; infinity and NaN stay.
    most = float(ml_dtypes.finfo(BF16).max)
    return np.where(np.isfinite(rows), np.clip(rows, -most, most), rows).astype(BF16)


@pytest.mark.parametrize("hidden", [128, 384, 4224])
def test_x_is_quantised_bit_by_bit(hidden: int) -> None:
    """In rows of several groups, of which some share 16 bytes of scales."""
    x = groups()
    x = np.resize(x, (-(-len(x) * 128 // hidden), hidden))
    ids = np.full((len(x), 1), -1, np.int32)
    batch = normal_of((len(x), 1, 1, hidden, 128), ids)._replace(x=x)
    _, found = emulated.forward_fp8(batch, fp8.quantized_weights(batch))
    codes, scales = fp8.quantized_rows(x.astype(F32))
    compare.assert_bitwise(found[:, :hidden].view(fp8.E4M3), codes, "codes")
    num_groups = hidden // 128
    found_scales = np.ascontiguousarray(found[:, hidden : hidden + 4 * num_groups]).view(F32)
    compare.assert_bitwise(found_scales, scales, "scales")


def test_zeros_and_what_is_not_finite_stay_where_they_are() -> None:
    """A group of zeros has the scale 1; with NaN or infinity in a group its token is NaN, no
    other."""
    size, routing = CASES[2]
    batch = normal_of(size, routing)
    clean = forward(batch)
    x = batch.x.copy()
    x[0], x[1, :128] = 0, 0
    x[2, 5], x[3, 200] = np.nan, -np.inf
    y = forward(batch._replace(x=x))
    is_routed = ((batch.expert_idx >= 0) & (batch.expert_idx < size[2])).any(axis=1)
    assert is_routed[:4].all() and not np.any(y[0])
    assert np.any(y[1]) and np.isfinite(y[1].astype(F32)).all()
    assert np.isnan(y[2:4].astype(F32)).all()
    compare.assert_bitwise(y[4:], clean[4:], "y of the others")


def test_h_that_is_not_finite_and_h_of_zeros() -> None:
    """An expert whose gate overflows gives NaN to its tokens, one without weights zeros."""
    batch = normal_of((150, 1, 4, 128, 256), "distinct")
    w_gate, w_up = batch.w_gate.copy(), batch.w_up.copy()
    w_gate[0], w_up[0] = np.abs(w_gate[0]) * 1e30, np.abs(w_up[0]) * 1e30
    w_gate[1] = 0
    y = forward(batch._replace(x=np.abs(batch.x), w_gate=w_gate, w_up=w_up)).astype(F32)
    expert = batch.expert_idx[:, 0]
    assert np.isnan(y[expert == 0]).all() and not np.any(y[expert == 1])
    assert np.isfinite(y[expert > 1]).all() and np.any(y[expert > 1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keep", [False, True])
def test_a_call_that_has_failed_ends(keep: bool, seed: int) -> None:
    batch = normal_of(*CASES[1])
    for parts in (_ffi.FUSED, *((part,) for part in _ffi.UNFUSED)):
        how: dict[str, Any] = {"launches": parts, "seed": seed, "failed_ranks": (0,)}
        y, *_ = emulated.forward_fp8(batch, fp8.quantized_weights(batch), keep=keep, **how)
        assert y.shape == batch.x.shape


def test_a_trace_records_every_item_and_changes_nothing() -> None:
    batch = normal_of(*CASES[1])
    y, _, records = emulated.forward_fp8(batch, fp8.quantized_weights(batch), trace=True)
    compare.assert_bitwise(y, forward(batch), "y")
    count, *_ = records[0]
    start, end, _, kind = records.view(np.uint32)[1 : 1 + count].T
    assert count < len(records) and np.all(end - start < 2**31) and np.any(end > start)
    num_tiles = int(np.sum(-(-cases.counts(batch) // 128)))
    for part, columns in ((2, 2), (4, 1)):  # gate_up and down: kGateUp and kDown
        assert np.sum(kind == part) == num_tiles * columns
