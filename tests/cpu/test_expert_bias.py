"""Experts with biases: exact with the oracle, the same bits for any number of ranks."""

from typing import Any

import numpy as np
import pytest

from jax_megamoe import ClampedSwiGLU
from tests import cases, compare, gated, layer
from tests.cases import BF16, F32, ROUTINGS
from tests.gated import Biases

T, K, E = 32, 4, 16
# Activations that answer 32 u, or 32 (u + 1), to g = 32 exactly, with slope 1, and what h is of
# u = 1 over 32.
EXACT: dict[Any, int] = {"swiglu": 1, "geglu": 1, ClampedSwiGLU(alpha=8.0, limit=64.0): 2}


def biased_oracle(
    routing: str, dtype: Any, activation: Any
) -> tuple[cases.Batch, Biases, cases.Results, Biases]:
    """Half of g and u of the tagged experts from their biases, twice the tag from the last one."""
    ids = ROUTINGS[routing](tokens=T, choices=K, experts=E)
    whole = cases.oracle(ids, 0.5, num_experts=E, dtype=dtype)
    batch = whole._replace(w_gate=whole.w_gate / 2, w_up=whole.w_up / 2)
    biases = gated.no_biases(batch.w_gate)
    biases.b_gate[:, 0], biases.b_up[:, 0] = 16, 0.5
    tags = np.arange(1, E + 1)
    biases.b_down[:] = 2 * tags[:, None]
    m, plain = EXACT[activation], cases.oracle_results(whole)
    right = cases.Results(
        y=(m + 2) * plain.y,
        dx=plain.dx * (m + 1) / 4,
        dw=(m + 2) * plain.dw,
        dw_gate=m * plain.dw_gate,
        dw_up=plain.dw_up,
        dw_down=m * plain.dw_down,
    )
    gradients = gated.no_biases(batch.w_gate)
    gradients.b_gate[:, 0], gradients.b_up[:, 0] = right.dw_gate[:, 0, 0], right.dw_up[:, 0, 0]
    gradients.b_down[:, 0] = plain.dw_down[:, 0, 0] / 32
    batch = batch._replace(w_gate=batch.w_gate.astype(dtype), w_up=batch.w_up.astype(dtype))
    return batch, Biases(*(b.astype(F32) for b in biases)), right, gradients


def assert_biases_exact(found: Biases, right: Biases) -> None:
    for name, a, b in zip(Biases._fields, found, right, strict=True):
        compare.assert_exact(a, b, name)


def assert_biases_bitwise(found: Biases, other: Biases) -> None:
    for name, a, b in zip(Biases._fields, found, other, strict=True):
        compare.assert_bitwise(a, b, name)


@pytest.mark.parametrize("routing", ["invalid", "skewed", "nothing"])
@pytest.mark.parametrize("num_ranks", [None, 4])
@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_oracle_is_exact(
    precision: str, activation: Any, num_ranks: int | None, routing: str
) -> None:
    dtype = {"bf16": BF16, "float32": F32}[precision]
    batch, biases, right, right_biases = biased_oracle(routing, dtype, activation)
    how = {"precision": precision, "activation": activation}
    found, found_biases = layer.run_biased(batch, biases, num_ranks, **how)
    compare.assert_results_exact(found, right)
    assert_biases_exact(found_biases, right_biases)


@pytest.mark.parametrize("activation", ["swiglu", ClampedSwiGLU()])
@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_the_number_of_ranks_changes_no_bit(precision: str, activation: Any) -> None:
    """More than 128 rows of one expert, some of them of every rank."""
    ids = ROUTINGS["skewed"](tokens=256, choices=2, experts=8)
    batch = cases.normal(ids, num_experts=8)
    biases = gated.normal_biases(batch.w_gate)
    how = {"precision": precision, "activation": activation}
    alone, alone_biases = layer.run_biased(batch, biases, **how)
    for num_ranks in (2, 8):
        found, found_biases = layer.run_biased(batch, biases, num_ranks, **how)
        compare.assert_results_bitwise(found, alone)
        assert_biases_bitwise(found_biases, alone_biases)


def test_without_check_vma() -> None:
    batch, biases, right, right_biases = biased_oracle("invalid", BF16, "geglu")
    how = {"activation": "geglu", "check_vma": False}
    found, found_biases = layer.run_biased(batch, biases, 4, **how)
    compare.assert_results_exact(found, right)
    assert_biases_exact(found_biases, right_biases)


def test_biases_of_zero_change_nothing() -> None:
    batch = cases.normal(ROUTINGS["invalid"](tokens=T, choices=K, experts=E), num_experts=E)
    zeros = Biases(*(b.astype(BF16) for b in gated.no_biases(batch.w_gate)))
    found, _ = layer.run_biased(batch, zeros)
    compare.assert_results_exact(found, layer.run(batch))


@pytest.mark.parametrize(("weights", "biases"), [(F32, BF16), (BF16, F32), (BF16, BF16)])
@pytest.mark.parametrize("num_ranks", [None, 2])
def test_gradients_have_the_dtypes_of_their_arrays(
    num_ranks: int | None, weights: np.dtype, biases: np.dtype
) -> None:
    """Summed in float32 and rounded once: 300 rows of weight 1/512 are no bf16 sum."""
    ids = np.full((300, 1), 1, np.int32)
    batch = cases.oracle(ids, 1 / 512, num_experts=2, dtype=BF16, weight_dtype=weights)
    drawn = gated.normal_biases(batch.w_gate, dtype=biases)
    found, gradients = layer.run_biased(batch, drawn, num_ranks)
    assert {a.dtype for a in found[3:]} == {weights} and {a.dtype for a in gradients} == {biases}
    compare.assert_exact(gradients.b_down[1, 0], 300 / 512)


def test_frozen_experts_get_zeros_and_leave_the_rest() -> None:
    batch = cases.normal(ROUTINGS["invalid"](tokens=T, choices=K, experts=E), num_experts=E)
    biases = gated.normal_biases(batch.w_gate)
    found, gradients = layer.run_biased(batch, biases, trainable_experts=False)
    right, _ = layer.run_biased(batch, biases)
    for name in ("y", "dx", "dw"):
        compare.assert_bitwise(getattr(found, name), getattr(right, name), name)
    assert not any(np.any(a) for a in (*found[3:], *gradients))


@pytest.mark.parametrize("num_ranks", [None, 4])
@pytest.mark.parametrize("array", Biases._fields)
def test_nan_in_a_bias_reaches_its_expert_alone(array: str, num_ranks: int | None) -> None:
    """Expert 4 has one row, beside pads; expert 6 has none."""
    ids = ROUTINGS["distinct"](tokens=T, choices=2, experts=4)
    ids[3] = [4, 5]
    batch = cases.normal(ids, num_experts=8)
    clean = gated.normal_biases(batch.w_gate)
    poisoned = Biases(*(b.copy() for b in clean))
    getattr(poisoned, array)[[4, 6], 3] = np.nan
    how = {"precision": "float32", "activation": ClampedSwiGLU()}
    right, right_biases = layer.run_biased(batch, clean, num_ranks, **how)
    found, found_biases = layer.run_biased(batch, poisoned, num_ranks, **how)
    assert (
        np.isnan(found.y[3]).any() and np.isnan(found.dw[3, 0]) and found.dw[3, 1] == right.dw[3, 1]
    )
    for name, a, b in zip(cases.Results._fields, found, right, strict=True):
        free = np.setdiff1d(np.arange(len(a)), 4 if name.startswith("dw_") else 3)
        compare.assert_bitwise(a[free], b[free], name)
    for name, a, b in zip(Biases._fields, found_biases, right_biases, strict=True):
        free = np.setdiff1d(np.arange(8), 4)
        compare.assert_bitwise(a[free], b[free], name)
