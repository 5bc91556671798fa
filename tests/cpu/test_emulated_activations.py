"""The kernels of any activation and of biases on an emulated machine, in both passes.

What they share with those of SwiGLU is tested with these. Sizes have half tiles of each step,
columns that end inside a tile, and experts without rows.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import ClampedSwiGLU, _ffi
from tests import cases, compare, emulated
from tests.backward import bias_errors_by_expert, errors_by_expert, unfused_bf16_of
from tests.cases import BF16, F32, Batch, Results, normal_of
from tests.gated import UNITS, Biases, no_biases, normal_biases

# T, K, E, H, I and the routing.
CASES = (
    ((150, 2, 4, 128, 192), "skewed"),
    ((140, 2, 3, 64, 320), "distinct"),
    ((100, 3, 6, 320, 64), "invalid"),
    ((130, 2, 2, 576, 256), "one_expert"),
    ((20, 2, 4, 64, 64), "nothing"),
)
IDS = [f"{size}-{routing}" for size, routing in CASES]
# A good part of what is random normal lies behind this limit.
CLAMPED = ClampedSwiGLU(alpha=1.5, limit=0.75)
# As in test_emulated_kernels.py: what the kernels round, and how far float32 sums of another order
# come; 1e-5 for what they do not round.
ROUNDINGS = ("inputs", "h", "o", "y", "g", "u", "dg", "du", "w h", "dx rows", "dx")
ERROR_BOUND = 6e-3
Found = tuple[Results, Biases]


def of_call(y: np.ndarray, gradients: list[np.ndarray]) -> Found:
    return Results(y, *gradients[:5]), Biases(*gradients[5:] or [None] * 3)


def computed(batch: Batch, **how: Any) -> Found:
    """g and u computed again, weight gradients in float32."""
    y = emulated.forward(batch, **how)
    return of_call(y, emulated.backward(batch, weight_dtype=F32, **how))


def kept(batch: Batch, **how: Any) -> Found:
    y, gate_up = emulated.forward_keeping(batch, **how)
    gradients = emulated.backward(batch, weight_dtype=F32, gate_up=gate_up, **how)
    return of_call(y, gradients)


def unfused(batch: Batch, **how: Any) -> Found:
    y = emulated.forward(batch, launches=_ffi.UNFUSED, **how)
    launches = _ffi.BACKWARD_UNFUSED
    return of_call(y, emulated.backward(batch, weight_dtype=F32, launches=launches, **how))


def assert_same(found: Found, right: Found) -> None:
    compare.assert_results_bitwise(found[0], right[0])
    for name, a, b in zip(Biases._fields, found[1], right[1], strict=True):
        if b is not None:
            compare.assert_bitwise(a, b, name)


def assert_right(found: Found, batch: Batch, activation: Any, biases: Biases | None) -> None:
    added = no_biases(batch.w_gate) if biases is None else biases
    right, d_biases = cases.dense_of(batch, UNITS[activation], added, ROUNDINGS)
    compare.assert_within(found[0], right, ERROR_BOUND)
    if biases is None:
        return
    for name, a, b in zip(Biases._fields, found[1], d_biases, strict=True):
        assert a.dtype == F32
        assert np.linalg.norm(a - b) <= ERROR_BOUND * np.linalg.norm(b), name
        # An expert without rows.
        assert not np.any(a[cases.counts(batch) == 0]), name


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", UNITS, ids=str)
def test_activations(activation: Any, biased: bool) -> None:
    """Right, and the same bits where parts run one after another and where g and u are kept."""
    batch = normal_of(*CASES[0])
    biases = normal_biases(batch.w_gate) if biased else None
    how: dict[str, Any] = {"activation": activation, "biases": biases}
    found = computed(batch, **how)
    assert_right(found, batch, activation, biases)
    assert_same(kept(batch, **how), found)
    assert_same(unfused(batch, **how), found)


@pytest.mark.parametrize(("size", "routing"), CASES[1:], ids=IDS[1:])
def test_sizes(size: tuple[int, ...], routing: str) -> None:
    """In several orders of events."""
    batch = normal_of(size, routing)
    biases = normal_biases(batch.w_gate)
    how: dict[str, Any] = {"activation": CLAMPED, "biases": biases}
    found = computed(batch, **how)
    assert_right(found, batch, CLAMPED, biases)
    assert_same(computed(batch, seed=1, multiprocessors=2, **how), found)
    assert_same(kept(batch, seed=2, multiprocessors=6, **how), found)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("ranks", "case"), [(2, 0), (4, 4)])
def test_every_bit_is_that_of_one_rank(ranks: int, case: int, biased: bool) -> None:
    batch = normal_of(*CASES[case])
    batch = normal_of((152, 2, 4, 128, 192), "skewed") if case == 0 else batch
    how: dict[str, Any] = {"activation": CLAMPED}
    how["biases"] = normal_biases(batch.w_gate) if biased else None
    right = computed(batch, **how)
    how |= {"ranks": ranks, "pool_factor": float(ranks)}
    assert_same(computed(batch, **how), right)
    assert_same(kept(batch, **how), right)


def test_several_passes() -> None:
    """Gradients of weights and biases are added up over them, the others have the same bits."""
    ids = np.random.default_rng(0).integers(2, 4, (120, 3)).astype(np.int32)
    how: dict[str, Any] = {"num_experts": 8, "hidden": 64, "intermediate": 128, "dtype": BF16}
    batch = cases.normal(ids, **how)
    biases = normal_biases(batch.w_gate)
    how = {"activation": CLAMPED, "biases": biases}
    right, d_biases = computed(batch, **how)
    for run in (computed, kept):
        found, found_biases = run(batch, ranks=4, pool_factor=1.0, multiprocessors=2, **how)
        for name in ("y", "dx", "dw"):
            compare.assert_bitwise(getattr(found, name), getattr(right, name), name)
        compare.assert_within(found, right, 1e-6)
        for name, a, b in zip(Biases._fields, found_biases, d_biases, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)
            assert not np.any(a[cases.counts(batch) == 0]), name


def test_biases_of_zero_are_none() -> None:
    """SwiGLU by the general kernels: the bits of y that its own have."""
    batch = normal_of(*CASES[0])
    zeros = Biases(*(b.astype(F32) for b in no_biases(batch.w_gate)))
    y, own = emulated.forward(batch), emulated.backward(batch, weight_dtype=F32)
    compare.assert_bitwise(emulated.forward(batch, biases=zeros), y, "y")
    found = emulated.backward(batch, weight_dtype=F32, biases=zeros)
    compare.assert_within(Results(y, *found[:5]), Results(y, *(a.astype(F32) for a in own)), 1e-3)


def test_frozen_experts_change_nothing_else() -> None:
    batch = normal_of(*CASES[0])
    how: dict[str, Any] = {"activation": CLAMPED, "biases": normal_biases(batch.w_gate)}
    dx, dw = emulated.backward(batch, trainable=False, **how)
    want_dx, want_dw, *_ = emulated.backward(batch, **how)
    compare.assert_bitwise(dx, want_dx, "dx")
    compare.assert_bitwise(dw, want_dw, "dw")


def test_nan_stays_with_its_token_and_its_experts() -> None:
    """Limits do not make numbers of it."""
    batch = normal_of(*CASES[0])
    how: dict[str, Any] = {"activation": CLAMPED, "biases": normal_biases(batch.w_gate)}
    clean, clean_biases = computed(batch, **how)
    x = batch.x.copy()
    x[0] = np.nan
    (y, dx, dw, *_), d_biases = computed(batch._replace(x=x), **how)
    assert np.isnan(y[0].astype(F32)).all() and np.isnan(dx[0].astype(F32)).all()
    assert np.isnan(dw[0]).all()
    compare.assert_bitwise(y[1:], clean.y[1:], "y")
    compare.assert_bitwise(dx[1:], clean.dx[1:], "dx")
    others = np.setdiff1d(np.arange(batch.num_experts), batch.expert_idx[0])
    for name, a, b in zip(Biases._fields, d_biases, clean_biases, strict=True):
        compare.assert_bitwise(a[others], b[others], name)
    assert np.isnan(d_biases.b_gate[batch.expert_idx[0]]).any(axis=1).all()


def test_gates_that_are_large() -> None:
    """g^3 is infinite in float32, and neither h nor a gradient is."""
    batch = normal_of(*CASES[4])
    batch = normal_of((20, 2, 4, 64, 64), "distinct")
    biases = Biases(*(b.astype(F32) for b in no_biases(batch.w_gate)))
    biases.b_gate[:, ::2] = 1e20
    biases.b_gate[:, 1::2] = -1e20
    batch = batch._replace(w_down=(batch.w_down.astype(F32) * 2.0**-70).astype(BF16))
    for activation in ("geglu", ClampedSwiGLU()):
        results, d_biases = computed(batch, activation=activation, biases=biases)
        for a in (*results, *d_biases):
            assert np.isfinite(a.astype(F32)).all()
        assert np.any(results.dx) and np.any(d_biases.b_up)


@pytest.mark.parametrize("activation", ["geglu", ClampedSwiGLU()], ids=str)
def test_error_of_every_expert_is_that_of_an_unfused_path(activation: Any) -> None:
    batch = normal_of((256, 1, 2, 128, 64), "distinct")
    biases = normal_biases(batch.w_gate)
    right, d_biases = cases.dense_of(batch, UNITS[activation], biases)
    expert = batch.expert_idx[:, 0]
    (_, *ours), own_biases = computed(batch, activation=activation, biases=biases)
    arrays = (*batch[:-1], *biases, batch.dy)
    theirs = unfused_bf16_of(activation, *map(jnp.asarray, arrays))
    own = errors_by_expert(ours, right, expert)
    other = errors_by_expert(theirs[:5], right, expert)
    assert (own <= 1.05 * other).all(), f"{own} against {other}"
    own, other = (bias_errors_by_expert(b, d_biases) for b in (own_biases, theirs[5:]))
    assert (own <= 1.05 * other).all(), f"{own} against {other}"
