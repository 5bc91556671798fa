"""Both kernels on an emulated machine: right, and the same in every order of events.

The sources are those of the GPU build but for cuda/ptx, so what fails here fails there. Sizes are
small: half tiles and whole ones, odd and even numbers of tiles, more than one column tile.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import _ffi
from jax_megamoe.config import Dims
from tests import cases, compare, emulated
from tests.backward import errors_by_expert, sums_that_need_float32, unfused_bf16, with_gate
from tests.cases import BF16, F32, Results, normal_of, oracle_of

# T, K, E, H, I and the routing.
CASES = (
    ((5, 8, 16, 64, 64), "distinct"),
    ((150, 2, 4, 128, 192), "skewed"),
    ((300, 3, 6, 320, 64), "invalid"),
    ((200, 2, 8, 64, 128), "duplicates"),
    ((130, 2, 2, 576, 256), "one_expert"),
    ((40, 2, 4, 64, 64), "nothing"),
    ((6, 1, 2, 4160, 64), "distinct"),
    ((6, 4, 4, 1088, 64), "distinct"),
    ((140, 2, 3, 64, 320), "distinct"),
    ((20, 2, 4, 64, 384), "distinct"),
)
IDS = [f"{size}-{routing}" for size, routing in CASES]
# What the kernels round, besides the weights' gradients.
ROUNDINGS = ("inputs", "h", "o", "y", "g", "u", "dg", "du", "w h", "dx rows", "dx")


@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_y_of_the_oracle_is_exact(size: tuple[int, ...], routing: str) -> None:
    batch = oracle_of(size, routing)
    compare.assert_exact(emulated.forward(batch), cases.oracle_results(batch).y, "y")


@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_gradients_of_the_oracle_are_exact(size: tuple[int, ...], routing: str) -> None:
    batch = oracle_of(size, routing)
    right = cases.oracle_results(batch)
    for dtype in (BF16, F32):
        found = emulated.backward(batch, weight_dtype=dtype)
        assert [a.dtype for a in found] == [BF16, F32, *[dtype] * 3]
        compare.assert_results_exact(Results(right.y, *found), right)


def test_an_expert_of_more_than_a_group_of_tiles() -> None:
    """2,400 rows, 19 tiles: its first rows go through all steps before its last ones begin."""
    batch = oracle_of((1200, 2, 2, 64, 64), "one_expert")
    right = cases.oracle_results(batch)
    compare.assert_exact(emulated.forward(batch), right.y, "y")
    found = emulated.backward(batch, multiprocessors=2)
    compare.assert_results_exact(Results(right.y, *found), right)


@pytest.mark.parametrize("of", ["dx", "dW"])
def test_sums_are_float32(of: str) -> None:
    batch = sums_that_need_float32()[of]
    right = cases.oracle_results(batch)
    found = emulated.backward(batch, weight_dtype=F32)
    compare.assert_results_exact(Results(right.y, *found), right)


# float32 sums of another order, and silu within 3.6e-4: some round the other way.
ERROR_BOUND = 6e-3


@pytest.mark.parametrize(("size", "routing"), CASES[:4], ids=IDS[:4])
def test_gradients_are_those_of_the_formulas(size: tuple[int, ...], routing: str) -> None:
    batch = normal_of(size, routing)
    right = cases.dense(batch, ROUNDINGS)
    found = emulated.backward(batch, weight_dtype=F32)
    compare.assert_within(Results(right.y, *found), right, ERROR_BOUND)


@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_every_order_gives_the_same_bits_and_the_right_values(
    size: tuple[int, ...], routing: str
) -> None:
    batch = normal_of(size, routing)
    y = emulated.forward(batch, launches=_ffi.UNFUSED)
    gradients = emulated.backward(batch, weight_dtype=F32, launches=_ffi.BACKWARD_UNFUSED)
    once = Results(y, *gradients)
    compare.assert_within(once, cases.dense(batch, ROUNDINGS), ERROR_BOUND)
    for seed, multiprocessors in ((1, 2), (2, 4), (3, 6)):
        how: dict[str, Any] = {"seed": seed, "multiprocessors": multiprocessors}
        again = emulated.forward(batch, **how), *emulated.backward(batch, weight_dtype=F32, **how)
        compare.assert_results_bitwise(Results(*again), once)


@pytest.mark.parametrize("gate", [0, -6])
def test_error_of_every_expert_is_that_of_an_unfused_path(gate: int) -> None:
    """For negative gates too, whose silu and silu' are small."""
    batch = with_gate(normal_of((256, 1, 2, 128, 64), "distinct"), gate)
    right, expert = cases.dense(batch), batch.expert_idx[:, 0]
    ours = errors_by_expert(emulated.backward(batch), right, expert)
    theirs = errors_by_expert(unfused_bf16(*map(jnp.asarray, batch)), right, expert)
    assert (ours <= 1.05 * theirs).all(), f"{ours} against {theirs}"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("size", "routing"), CASES[:5], ids=IDS[:5])
def test_a_call_that_has_failed_ends(size: tuple[int, ...], routing: str, seed: int) -> None:
    """Its waits come back early or, for the parts without the one before, always in vain."""
    batch = normal_of(size, routing)
    how: dict[str, Any] = {"seed": seed, "failed_ranks": (0,)}
    for parts in (_ffi.FUSED, *((part,) for part in _ffi.UNFUSED)):
        assert emulated.forward(batch, launches=parts, **how).shape == batch.x.shape
    for parts in (_ffi.BACKWARD_FUSED, *((part,) for part in _ffi.BACKWARD_UNFUSED)):
        assert emulated.backward(batch, launches=parts, **how)[0].shape == batch.x.shape


@pytest.mark.parametrize(("size", "routing"), CASES[:5], ids=IDS[:5])
def test_a_call_that_has_failed_ends_with_what_is_kept_too(
    size: tuple[int, ...], routing: str
) -> None:
    batch = normal_of(size, routing)
    for forwards, backwards in ((_ffi.FUSED, _ffi.BACKWARD_FUSED), ((2,), (32,))):
        y, gate_up = emulated.forward_keeping(batch, launches=forwards, failed_ranks=(0,))
        found = emulated.backward(batch, gate_up=gate_up, launches=backwards, failed_ranks=(0,))
        assert y.shape == found[0].shape == batch.x.shape


def test_frozen_experts_change_nothing_else() -> None:
    batch = normal_of(*CASES[2])
    dx, dw = emulated.backward(batch, trainable=False)
    want_dx, want_dw, *_ = emulated.backward(batch)
    compare.assert_bitwise(dx, want_dx, "dx")
    compare.assert_bitwise(dw, want_dw, "dw")


def test_nan_stays_with_its_token_and_its_experts() -> None:
    batch = normal_of(*CASES[1])
    clean = emulated.backward(batch, weight_dtype=F32)
    dy = batch.dy.copy()
    dy[0] = np.nan
    dx, dw, *weights = emulated.backward(batch._replace(dy=dy), weight_dtype=F32)
    assert np.isnan(dx[0].astype(F32)).all() and np.isnan(dw[0]).all()
    compare.assert_bitwise(dx[1:], clean[0][1:], "dx")
    compare.assert_bitwise(dw[1:], clean[1][1:], "dw")
    others = np.setdiff1d(np.arange(batch.num_experts), batch.expert_idx[0])
    for a, b in zip(weights, clean[2:], strict=True):
        compare.assert_bitwise(a[others], b[others])
        assert np.isnan(a[batch.expert_idx[0]]).any(axis=(1, 2)).all()


@pytest.mark.parametrize("intermediate", [64, 256, 384])
def test_dw_of_an_infinite_dy_is_infinite(intermediate: int) -> None:
    """With all factors positive; columns of a tile behind I add nothing, not inf * 0."""
    batch = normal_of((1, 1, 1, 64, intermediate), "one_expert")
    positive = {f: abs(getattr(batch, f)) for f in ("x", "dy", "w_gate", "w_up", "w_down")}
    positive["dy"][0, 0] = np.inf
    batch = batch._replace(**positive)
    _, kept = emulated.forward_keeping(batch)
    for gate_up in (None, kept):
        _, dw, *_ = emulated.backward(batch, gate_up=gate_up)
        assert dw[0, 0] == np.inf


def test_weights_that_are_not_finite_do_not_come_back_through_pads() -> None:
    """dWd = (w h)^T dy reads no Wd, and an expert's pads are 0 whatever its weights hold."""
    batch = normal_of(*CASES[1])
    w_down = batch.w_down.copy()
    w_down[0, :, 0] = np.inf
    want = emulated.backward(batch)[4]
    compare.assert_bitwise(emulated.backward(batch._replace(w_down=w_down))[4], want, "dw_down")


@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_what_is_kept_changes_no_bit(size: tuple[int, ...], routing: str) -> None:
    """Of y and of the gradients; and every element of it is written, pads and the rest with 0."""
    batch = normal_of(size, routing)
    y, right = emulated.forward(batch), emulated.backward(batch, weight_dtype=F32)
    for seed, fused in ((1, True), (2, True), (3, False)):
        forwards, backwards = (
            (_ffi.FUSED, _ffi.BACKWARD_FUSED) if fused else (_ffi.UNFUSED, _ffi.BACKWARD_UNFUSED)
        )
        found_y, gate_up = emulated.forward_keeping(batch, seed=seed, launches=forwards)
        found = emulated.backward(
            batch, weight_dtype=F32, gate_up=gate_up, seed=seed, launches=backwards
        )
        compare.assert_results_bitwise(Results(found_y, *found), Results(y, *right))
        assert np.isfinite(gate_up.astype(F32)).all()
        # The emulator fills memory with NaN.
        rows = np.count_nonzero((batch.expert_idx >= 0) & (batch.expert_idx < size[2]))
        assert np.count_nonzero(gate_up) == rows * 2 * size[4]


def test_experts_that_end_at_every_border() -> None:
    """Of a tile, of its half and of an instruction's rows; with more choices than experts."""
    rows = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129)
    ids = np.full((20, 32), -1, np.int32)
    ids.ravel()[: sum(rows)] = np.repeat(np.arange(len(rows)), rows)
    ids = np.random.default_rng(0).permuted(ids.ravel()).reshape(ids.shape)
    batch = cases.normal(ids, num_experts=len(rows), hidden=64, intermediate=192, dtype=BF16)
    y, gate_up = emulated.forward_keeping(batch)
    found = emulated.backward(batch, weight_dtype=F32, gate_up=gate_up)
    compare.assert_within(Results(y, *found), cases.dense(batch, ROUNDINGS), ERROR_BOUND)
    assert np.isfinite(gate_up.astype(F32)).all()
    assert np.count_nonzero(gate_up) == sum(rows) * 2 * 192
    right = emulated.forward(batch), *emulated.backward(batch, weight_dtype=F32)
    compare.assert_results_bitwise(Results(y, *found), Results(*right))


# As many blocks as the tree can have, and fewer, down to one; of one expert and of more.
@pytest.mark.parametrize(
    ("experts", "ranks"),
    [(16, 1), (8, 1), (12, 1), (4, 1), (6, 1), (7, 1), (1, 1), (16, 2), (8, 4), (12, 4), (6, 2)],
)
def test_the_sign_of_zero_is_that_of_the_tree(experts: int, ranks: int) -> None:
    """Products that are rounded to -0, with and without blocks that have no route."""
    rng = np.random.default_rng(0)
    hidden, choices = 64, np.arange(8)
    dims = Dims(T=128, K=8, E=experts, R=1, H=hidden, I=64)
    of_block = dims.experts_per_block
    every_block = choices % dims.num_blocks * of_block + rng.integers(0, of_block, (32, 8))
    some_blocks = rng.integers(0, experts, (32, 8))
    few_routes = np.where(rng.random((32, 8)) < 0.3, some_blocks, -1)
    two_of_one = every_block[:, :1] // of_block * of_block + choices % of_block
    two_of_one = np.where(choices < 2, two_of_one, -1)
    ids = np.concatenate([every_block, some_blocks, few_routes, two_of_one]).astype(np.int32)
    batch = cases.oracle(ids, 0, num_experts=experts, hidden=hidden, intermediate=64, dtype=BF16)
    # h is 1 and o is Wd: the least bf16, or what a weight of 2^-60 brings below the least float32.
    o = rng.choice([2.0**-133, -(2.0**-133), -(2.0**-100)], (experts, hidden))
    o[:, ::2] = -(2.0**-100)
    w_up, w_down = batch.w_up / 32, np.zeros(batch.w_down.shape)
    w_down[:, 0] = o
    weights = rng.choice([2.0**-16, 2.0**-16 + 2.0**-39, 2.0**-17, 2.0**-60], ids.shape)
    weights[::2] = 2.0**-60
    batch = batch._replace(w_up=w_up, w_down=w_down.astype(BF16), expert_weight=weights.astype(F32))
    blocks = np.zeros((dims.num_blocks, len(ids), hidden), F32)
    for t, k in np.ndindex(ids.shape):
        if ids[t, k] >= 0:
            block = blocks[ids[t, k] // of_block, t]
            block[:] = weights[t, k] * o[ids[t, k]] + block.astype(np.float64)
    while len(blocks) > 1:
        blocks = blocks[::2] + blocks[1::2]
    right = blocks[0].astype(BF16)
    zeros, negative = right == 0, np.signbit(right.astype(F32))
    assert (zeros & negative).any() and (zeros & ~negative).any() and not zeros.all()
    compare.assert_bitwise(emulated.forward(batch, ranks=ranks), right, "y")
