"""Activations and biases on one GPU: as precise as an unfused path, and the same every time."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_megamoe import ClampedSwiGLU
from tests import activation_programs, cases, compare, emulated, layer, races
from tests.activation_programs import CLAMPED, NAMES, UNFUSED, assert_same, results
from tests.backward import bias_errors_by_expert, errors_by_expert, unfused_bf16_of
from tests.cases import BF16, F32, Batch, Results
from tests.emulated import Call
from tests.forward import SIZES, poison_free_memory, random_batch
from tests.gated import UNITS, Biases, biases_behind_limits, no_biases, normal_biases

pytestmark = pytest.mark.gpu

SAVES = ("none", "gate_up")
NUM_RUNS = 120


@functools.lru_cache(maxsize=1)
def one_expert_a_token(activation: Any) -> tuple[Batch, Biases, Results, Biases, list[np.ndarray]]:
    """A batch with biases, its right values, and each expert's errors of the unfused path."""
    batch = random_batch((4096, 1, 16, 512, 256), "distinct")
    biases = normal_biases(batch.w_gate)
    if isinstance(activation, ClampedSwiGLU):
        biases = biases_behind_limits(batch.w_gate, activation.limit)
    right, d_biases = cases.dense_of(batch, UNITS[activation], biases)
    arrays = jax.device_put((*batch[:-1], *biases, batch.dy))
    *found, db_gate, db_up, db_down = unfused_bf16_of(activation, *arrays)
    errors = errors_by_expert(found, right, batch.expert_idx[:, 0])
    of_biases = bias_errors_by_expert((db_gate, db_up, db_down), d_biases)
    return batch, biases, right, d_biases, [errors, of_biases]


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("activation", ["swiglu", "geglu", ClampedSwiGLU()], ids=str)
def test_error_of_every_expert_is_that_of_an_unfused_path(activation: Any, save: str) -> None:
    """Of each gradient, and of y as a whole within the bf16 that it is rounded to."""
    batch, biases, right, d_biases, theirs = one_expert_a_token(activation)
    y, *found = results(batch, biases, activation, save=save)
    compare.assert_within(Results(y, *found[:5]), right, 1.5e-2)
    ours = [
        errors_by_expert(found[:5], right, batch.expert_idx[:, 0]),
        bias_errors_by_expert(found[5:], d_biases),
    ]
    for own, other in zip(ours, theirs, strict=True):
        worst = np.unravel_index(np.argmax(own / other), own.shape)
        assert own[worst] <= 1.05 * other[worst], f"{worst}: {own[worst]} against {other[worst]}"


@pytest.mark.parametrize("activation", UNITS, ids=str)
def test_without_biases(activation: Any) -> None:
    """Against what rounds where the kernels do: limits decide over g and u as they are rounded."""
    batch = random_batch(SIZES[3], "distinct")
    right, _ = cases.dense_of(batch, UNITS[activation], no_biases(batch.w_gate), cases.ROUNDINGS)
    found = results(batch, None, activation)
    compare.assert_within(Results(*found), right, 1.5e-2)
    assert_same(results(batch, None, activation, save="gate_up"), found)
    assert_same(results(batch, None, activation, launches=UNFUSED), found)


@pytest.mark.parametrize("weight_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("routing", ["distinct", "invalid", "skewed", "one_expert", "nothing"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fused_equals_its_parts_and_itself(
    size: tuple[int, ...], routing: str, weight_dtype: np.dtype
) -> None:
    batch = random_batch(size, routing)
    biases = normal_biases(batch.w_gate)
    run = functools.partial(results, batch, biases, CLAMPED, weight_dtype=weight_dtype)
    want = run()
    assert [a.dtype for a in want] == [BF16, BF16, F32, *[weight_dtype] * 3, *[F32] * 3]
    assert all(np.isfinite(np.asarray(a).astype(F32)).all() for a in want)
    for name, a in zip(NAMES[3:], want[3:], strict=True):
        assert not np.any(np.asarray(a)[cases.counts(batch) == 0]), name
    for save in SAVES:
        assert_same(run(save=save, launches=UNFUSED), want)
        for _ in range(10):
            assert_same(run(save=save), want)


# One expert with m rows: no tile full, one, one more row, and the same of half tiles.
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257])
def test_every_number_of_rows(rows: int) -> None:
    ids = np.full((300, 1), -1, np.int32)
    ids[:rows] = 2
    batch = random_batch((300, 1, 4, 192, 128), "nothing")._replace(expert_idx=ids)
    biases = normal_biases(batch.w_gate)
    _, right = cases.dense_of(batch, UNITS[CLAMPED], biases, cases.ROUNDINGS)
    *_, db_gate, db_up, db_down = results(batch, biases, CLAMPED)
    for name, a, b in zip(Biases._fields, (db_gate, db_up, db_down), right, strict=True):
        a = np.asarray(a)
        assert np.linalg.norm(a - b) <= 1.5e-2 * np.linalg.norm(b), name
        assert not np.any(a[[0, 1, 3]]), name


@pytest.mark.parametrize("save", SAVES)
def test_frozen_experts_change_nothing_else(save: str) -> None:
    batch = random_batch(SIZES[5], "invalid")
    run = functools.partial(results, batch, normal_biases(batch.w_gate), CLAMPED, save=save)
    assert_same(run(trainable=False), run()[:3])


@pytest.mark.parametrize("save", SAVES)
def test_poisoned_memory_reaches_nothing(save: str) -> None:
    batch = random_batch(SIZES[5], "invalid")
    run = functools.partial(results, batch, normal_biases(batch.w_gate), CLAMPED, save=save)
    clean = run()
    for _ in range(3):
        poison_free_memory()
        assert_same(run(), clean)


def test_delays_change_no_bit(tmp_path: Path) -> None:
    """In the test build, which fills all results with NaN before a call."""
    found = races.delayed_runs(activation_programs, tmp_path, NUM_RUNS)
    assert all(found.values()), found


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_one_gpu_have_the_bits_of_one(ranks: int) -> None:
    batch = random_batch((776, 3, 8, 256, 192), "invalid")
    how: dict[str, Any] = {"activation": CLAMPED, "biases": normal_biases(batch.w_gate)}
    calls = [Call(batch, **how), Call(batch, is_backward=True, float_gradients=True, **how)]
    run = functools.partial(emulated.run, calls, one_gpu=True)
    right = run(ranks=1, multiprocessors=132)
    for seed in range(3):
        many = {"multiprocessors": 128 // ranks, "pool_factor": float(ranks), "seed": seed}
        found = run(ranks=ranks, **many)
        for of_call, want in zip(found, right, strict=True):
            for i, (a, b) in enumerate(zip(of_call, want, strict=True)):
                compare.assert_bitwise(a, b, f"result {i}")


@pytest.mark.parametrize("save", SAVES)
def test_auto_is_the_kernels(save: str) -> None:
    """Of the op, with its gradients in the dtypes of its arguments."""
    batch = random_batch(SIZES[3], "distinct")
    biases = normal_biases(batch.w_gate)
    auto, own = (
        layer.run_biased(batch, biases, backend=backend, save=save, activation=ClampedSwiGLU())
        for backend in ("auto", "cuda")
    )
    compare.assert_results_bitwise(auto[0], own[0])
    reference = layer.run_biased(batch, biases, backend="reference", activation=ClampedSwiGLU())
    compare.assert_within(own[0], reference[0], 1.5e-2)
    for name, a, b, c in zip(Biases._fields, own[1], auto[1], reference[1], strict=True):
        compare.assert_bitwise(a, b, name)
        assert np.linalg.norm(a - c) <= 1.5e-2 * np.linalg.norm(c), name
