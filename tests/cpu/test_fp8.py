"""precision="fp8_block": the oracle exactly, known faults, the recipe's roundings and its error."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import mega_moe, quantize_expert_weights
from jax_megamoe.quantization import dequantize
from tests import cases, compare, fp8, layer
from tests.cases import BF16, F32, ROUTINGS
from tests.gated import UNITS, Biases, biases_behind_limits, no_biases, normal_biases

RANKS = (None, 1, 2, 4, 8)
T, K, E, H, I = 32, 4, 16, 128, 128
run = functools.partial(layer.run, precision="fp8_block")


def normal(ids: np.ndarray, num_experts: int = E, **how: Any) -> cases.Batch:
    return cases.normal(ids, num_experts=num_experts, **{"hidden": H, "intermediate": I, **how})


# The oracle. Its tags have at most 4 significant bits up to 16, so that codes hold them.


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_oracle_is_exact(dtype: np.dtype, num_ranks: int | None, routing: str) -> None:
    ids = ROUTINGS[routing](tokens=T, choices=K, experts=E)
    batch = cases.oracle(ids, 0.5, num_experts=E, hidden=H, intermediate=I, dtype=dtype)
    compare.assert_results_exact(run(batch, num_ranks), cases.oracle_results(batch))


def test_tags_that_codes_do_not_hold_would_be_seen() -> None:
    batch = cases.oracle(np.zeros((1, 1), np.int32), 1.0, num_experts=1, hidden=H, intermediate=I)
    batch = batch._replace(w_down=batch.w_down * F32.type(17))
    assert run(batch).y[0, 0] == 16


@pytest.mark.parametrize("counts", [range(129), range(129, 258)], ids=["to 128", "from 129"])
def test_every_number_of_rows_of_an_expert(counts: range) -> None:
    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[:, None]
    batch = fp8.two_column_oracle(ids, num_experts=len(counts), hidden=H, intermediate=I)
    np.testing.assert_array_equal(cases.counts(batch), counts)
    found = run(batch)
    for right in (cases.dense(batch), fp8.two_column_results(batch)):
        compare.assert_results_exact(found, right)
    tag = 1.0 + batch.expert_idx
    np.testing.assert_array_equal(found.y, np.broadcast_to(tag / 2, found.y.shape))
    np.testing.assert_array_equal(found.dw, tag)


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("routing", ["invalid", "one_expert"])
def test_neither_ranks_nor_what_is_kept_change_a_bit(routing: str, save: str) -> None:
    """With several tiles of an expert, and data that neither bf16 nor FP8 holds."""
    ids = ROUTINGS[routing](tokens=128, choices=3, experts=8)
    batch = normal(ids, 8, hidden=256)
    batch = batch._replace(x=batch.x * F32.type(1 / 3), w_up=batch.w_up * F32.type(1 / 3))
    alone = run(batch)
    for num_ranks in RANKS:
        compare.assert_results_bitwise(run(batch, num_ranks, save=save), alone)
    assert routing == "nothing" or np.any(alone.dx)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_without_check_vma(num_ranks: int) -> None:
    batch = normal(ROUTINGS["invalid"](tokens=T, choices=K, experts=E))
    compare.assert_results_bitwise(run(batch, num_ranks, check_vma=False), run(batch))


# Known faults of systems like this one.


def test_a_rank_with_one_expert_equals_one_with_an_idle_second() -> None:
    ids = np.random.default_rng(0).integers(0, 2, (200, 1)).astype(np.int32)
    two = normal(ids, 2)
    weights = {
        name: np.repeat(getattr(two, name), 2, axis=0) for name in ("w_gate", "w_up", "w_down")
    }
    for w in weights.values():
        w[1::2] = np.random.default_rng(1).standard_normal(w[1::2].shape)
    four = two._replace(expert_idx=2 * ids, **weights)
    found, right = run(four, 2), run(two, 2)
    assert all(np.isfinite(a).all() for a in right)
    for name, a, b in zip(cases.Results._fields, found, right, strict=True):
        is_weight = name.startswith("dw_")
        compare.assert_bitwise(a[::2] if is_weight else a, b, name)
        assert not is_weight or not np.any(a[1::2]), name


# Tokens of their own kind, by the expert that gets them, which no other token goes to.
SPECIAL = {
    "zero": (8, lambda x: 0 * x),
    "first block zero": (9, lambda x: np.where(np.arange(x.size) < 128, 0, 1)),
    "1e-30": (10, lambda x: 1e-30 * np.ones_like(x)),
    "1e4": (11, lambda x: 1e4 * np.ones_like(x)),
    "3e38": (12, lambda x: 3e38 * np.ones_like(x)),
    "zero expert": (13, lambda x: x),
    "zero dy": (14, lambda x: x),
}


@pytest.mark.parametrize("num_ranks", [None, 4])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_zeros_and_extremes_reach_nobody_else(dtype: np.dtype, num_ranks: int | None) -> None:
    ids = np.arange(2 * T, dtype=np.int32)[:, None] % 8
    place = {name: 5 * i + 3 for i, name in enumerate(SPECIAL)}
    for name, (expert, _) in SPECIAL.items():
        ids[place[name]] = expert
    batch = cases.oracle(ids, 0.5, num_experts=E, hidden=2 * H, intermediate=I, dtype=dtype)
    right = cases.oracle_results(batch)
    for name, (_, change) in SPECIAL.items():
        batch.x[place[name]] = change(batch.x[place[name]].astype(np.float64)).astype(dtype)
    for w in (batch.w_gate, batch.w_up, batch.w_down):
        w[SPECIAL["zero expert"][0]] = 0
    batch.dy[place["zero dy"]] = 0
    found = run(batch, num_ranks)

    usual = np.setdiff1d(np.arange(2 * T), list(place.values()))
    for name in ("y", "dx", "dw"):
        compare.assert_exact(getattr(found, name)[usual], getattr(right, name)[usual], name)
    for name in ("dw_gate", "dw_up", "dw_down"):
        compare.assert_exact(getattr(found, name)[:8], getattr(right, name)[:8], name)
    for name, zeros in {
        "zero": ("y", "dx", "dw", "dw_gate", "dw_up", "dw_down"),
        "first block zero": ("y", "dw"),
        "zero expert": ("y", "dx", "dw", "dw_gate", "dw_up", "dw_down"),
        "zero dy": ("dx", "dw", "dw_gate", "dw_up", "dw_down"),
    }.items():
        for result in zeros:
            at = SPECIAL[name][0] if result.startswith("dw_") else place[name]
            assert not np.any(getattr(found, result)[at]), (name, result)
    compare.assert_exact(found.y[place["zero dy"]], right.y[place["zero dy"]])
    for result in found:
        overflowing = SPECIAL["3e38"][0] if result.ndim == 3 else place["3e38"]
        assert np.isfinite(np.delete(result, overflowing, axis=0).astype(F32)).all()
    # x itself is off by at most 2^-4, and so are g and u; h once more.
    x = float(batch.x[place["1e4"], 0])
    y = found.y[place["1e4"]].astype(np.float64) / (0.5 * 12 * x * x)
    assert np.all(np.abs(y - 1) < (1 + 2.0**-4) ** 3 - 1), y


# Where it rounds.


def _twin_data(activation: Any) -> tuple[cases.Batch, Biases]:
    """x and dy that bf16 does not hold, biases that nothing rounds, weights that bf16 holds."""
    batch = normal(ROUTINGS["duplicates"](tokens=64, choices=3, experts=8), 8, hidden=256)
    third = F32.type(1 / 3)
    batch = batch._replace(x=batch.x * third, dy=batch.dy * third)
    limit = getattr(activation, "limit", None)
    if limit is None:
        return batch, normal_biases(batch.w_gate)
    return batch, biases_behind_limits(batch.w_gate, limit)


@functools.cache
def _found(activation: Any) -> tuple[cases.Results, Biases]:
    batch, biases = _twin_data(activation)
    return layer.run_biased(batch, biases, precision="fp8_block", activation=activation)


def _error_of_twin(activation: Any, rounded: Any, operands: Any) -> dict[str, float]:
    """The relative root mean square deviation of float64 with those roundings, by results."""
    batch, biases = _twin_data(activation)
    how = {"rounded": rounded, "operand": fp8.operand(operands)}
    right, d_biases = cases.dense_of(batch, UNITS[activation], biases, **how)
    found, d_found = _found(activation)
    errors = {
        name: float(np.sqrt(np.mean(e**2)))
        for name, e in compare.errors(found, right)._asdict().items()
    }
    for name, a, b in zip(Biases._fields, d_found, d_biases, strict=True):
        errors[name] = float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))
    return errors


@pytest.mark.parametrize("activation", UNITS)
def test_it_rounds_where_the_recipe_says(activation: Any) -> None:
    """What is left is float32 sums that fall on the other side of a rounding, now and then."""
    errors = _error_of_twin(activation, fp8.FP8_ROUNDINGS, fp8.OPERANDS)
    assert all(error < 2e-4 for error in errors.values()), errors


@pytest.mark.parametrize("left_out", fp8.OPERANDS)
def test_a_quantised_operand_less_would_be_seen(left_out: str) -> None:
    operands = [name for name in fp8.OPERANDS if name != left_out]
    errors = _error_of_twin("swiglu", fp8.FP8_ROUNDINGS, operands)
    assert any(error > 1e-2 for error in errors.values()), errors


@pytest.mark.parametrize("change", cases.ROUNDINGS)
def test_a_rounding_to_bf16_more_or_less_would_be_seen(change: str) -> None:
    """h is rounded by its groups alone."""
    errors = _error_of_twin("swiglu", {*fp8.FP8_ROUNDINGS} ^ {change}, fp8.OPERANDS)
    assert any(error > 1e-3 for error in errors.values()), errors


# How far that is from the layer without roundings.

# A code has 4 significant bits: it is off by at most 2^-4 of what it stands for, and by an error
# that is spread evenly over a step 2^-4 / sqrt(3) in the root mean square.
OF_A_CODE = 2.0**-4 / 3**0.5


@functools.cache
def _errors() -> cases.Results:
    batch = normal(ROUTINGS["distinct"](tokens=512, choices=4, experts=8), 8, hidden=256)
    return compare.errors(run(batch), cases.dense(batch))


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        # x and Wg, x and Wu, h, Wd.
        ("y", 6),
        # dy and Wd for dh; x, Wg, x, Wu for g and u; dg and Wg, or du and Wu.
        ("dx", 8),
        ("dw", 6),
        ("dw_gate", 6),
        ("dw_up", 6),
        # g and u alone.
        ("dw_down", 4),
    ],
)
def test_the_error_is_that_of_the_codes(name: str, codes: int) -> None:
    """Independent errors add up as squares. Not all codes reach all of a result, and the activation
    is not linear: half as much again is room for it. For weights, expert by expert.
    """
    errors = getattr(_errors(), name)
    if not name.startswith("dw_"):
        errors = np.sqrt(np.mean(errors**2))
    assert np.all(errors <= 1.5 * codes**0.5 * OF_A_CODE), errors
    assert np.all(errors >= OF_A_CODE / 2), errors


# The weights: quantised by the call or by the caller.


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("num_ranks", [None, 2])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_who_quantises_changes_no_bit(dtype: np.dtype, num_ranks: int | None, save: str) -> None:
    ids = ROUTINGS["invalid"](tokens=T, choices=K, experts=E)
    batch = normal(ids, weight_dtype=dtype)
    found = fp8.run_with(fp8.quantize(batch), batch, num_ranks, save=save)
    compare.assert_results_bitwise(found, run(batch))
    assert [a.dtype for a in found[3:]] == [dtype] * 3


@pytest.mark.parametrize("save", ["none", "gate_up"])
def test_given_weights_are_those_that_are_multiplied(save: str) -> None:
    """Stale ones, too: the results are those of the weights that they were made of."""
    ids = ROUTINGS["duplicates"](tokens=T, choices=K, experts=E)
    batch, other = normal(ids), normal(ids, seed=1)
    others = other._replace(x=batch.x, dy=batch.dy, expert_weight=batch.expert_weight)
    found = fp8.run_with(fp8.quantize(others), batch, save=save)
    compare.assert_results_bitwise(found, run(others))
    for a, b in zip(found, run(batch), strict=True):
        assert np.mean(a != b) > 0.5


def test_gradients_pass_straight_through_to_the_weights() -> None:
    """Whole, in the dtype of the weights, and whatever the codes hide of them."""
    batch = normal(ROUTINGS["distinct"](tokens=T, choices=K, experts=E))
    of_codes = {
        name: np.asarray(dequantize(matrix))
        for name, matrix in fp8.quantize(batch)._asdict().items()
    }
    right = run(batch._replace(**of_codes))
    # Less than half a step of any code.
    between = {name: w * F32.type(1 - 2.0**-6) for name, w in of_codes.items()}
    compare.assert_results_bitwise(run(batch._replace(**between)), right)
    bf16 = {name: w.astype(BF16) for name, w in of_codes.items()}
    compare.assert_results_exact(run(batch._replace(**bf16)), right)
    assert all(np.mean(a != 0) > 0.9 for a in right)


def test_what_differentiates_through_the_quantiser_gets_the_same() -> None:
    batch = normal(ROUTINGS["distinct"](tokens=T, choices=K, experts=E))
    x, ids, w, *weights, dy = map(jnp.asarray, batch)

    def loss(weights: Any) -> Any:
        given = quantize_expert_weights(*weights)
        how = {"precision": "fp8_block", "quantized_experts": given}
        return jnp.sum(mega_moe(x, ids, w, *weights, **how) * dy)  # type: ignore[operator]

    for a, b in zip(jax.jit(jax.grad(loss))(weights), run(batch)[3:], strict=True):
        compare.assert_bitwise(a, b)


def test_frozen_experts() -> None:
    batch = normal(ROUTINGS["invalid"](tokens=T, choices=K, experts=E))
    found, right = run(batch, trainable_experts=False), run(batch)
    for name in ("y", "dx", "dw"):
        compare.assert_bitwise(getattr(found, name), getattr(right, name), name)
    assert not any(np.any(a) for a in found[3:])


@pytest.mark.parametrize("num_ranks", [None, 4])
def test_biases_of_zeros_change_nothing(num_ranks: int | None) -> None:
    batch = normal(ROUTINGS["invalid"](tokens=T, choices=K, experts=E))
    zeros = Biases(*(b.astype(F32) for b in no_biases(batch.w_gate)))
    found, _ = layer.run_biased(batch, zeros, num_ranks, precision="fp8_block")
    compare.assert_results_exact(found, run(batch))


def test_rounded_sums_of_ranks() -> None:
    """Half of each sum on each of two ranks: rounded, and others than in float32."""
    batch = normal(ROUTINGS["distinct"](tokens=T, choices=K, experts=E))
    found, right = run(batch, 2, combine_dtype="bfloat16"), run(batch, 2)
    assert 0 < np.mean(found.y != right.y) < 0.6
    compare.assert_results_bitwise(found._replace(y=right.y, dx=right.dx), right)
