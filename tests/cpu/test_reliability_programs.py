"""The programs of the scorecard by the reference backend, at small sizes: on a GPU only the backend
and the sizes differ."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe.config import SAVES
from tests import compare, drift, emulated, layer, nan_cases, process, routing_fuzz, transform_cases
from tests.cases import Batch, Results
from tests.forward_programs import counted
from tests.mutations import SEMANTIC, Fault
from tests.reliability_programs import judged, judged_refusals
from tests.routing_fuzz import KINDS, SHAPES

# Of few experts, whose reference is compiled soon.
FUZZED = {1: (0, 4), 2: (5,)}


def test_shapes_of_the_fuzz_are_as_wide_as_they_should() -> None:
    tokens, choices, experts = (
        {getattr(shape, name) for shape in SHAPES} for name in ("T", "K", "E")
    )
    assert {0, 1, 127, 128, 129, 4097} <= tokens and max(tokens) == 4097
    assert {1, 32} <= choices <= set(range(1, 33))
    assert {1, 255, 256} <= experts <= set(range(1, 257))
    assert len(SHAPES) == 40 == len({shape.number for shape in SHAPES})


def test_routings_of_the_fuzz_are_of_every_kind() -> None:
    shape = SHAPES[7].of_ranks(2)
    drawn = [routing_fuzz.ids_of(np.random.default_rng(seed), shape, 2) for seed in range(100)]
    valid = [(ids >= 0) & (ids < shape.E) for ids in drawn]
    nothing = [v for v in valid if not v.any()]
    everything = [ids for ids, v in zip(drawn, valid, strict=True) if v.all()]
    assert 2 < len(nothing) < 20 and 20 < len(everything) < 60
    repeated = [len(set(row)) < shape.K for ids in everything for row in ids.tolist()]
    assert any(repeated) and not all(repeated)
    one_expert = [ids for ids in everything if np.all(ids == ids[0, 0])]
    owners = [set((ids * 2 // shape.E).ravel().tolist()) for ids in everything]
    assert one_expert and {0} in owners and {1} in owners and {0, 1} in owners
    halves = [v.reshape(2, -1).any(axis=1).tolist() for v in valid]
    assert [True, False] in halves and [False, True] in halves
    assert len(KINDS) == 5


@pytest.mark.parametrize("ranks", FUZZED)
def test_fuzzed_routings_are_right(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    for number in FUZZED[ranks]:
        faults = routing_fuzz.faults_of(
            SHAPES[number], backend="reference", ranks=ranks, routings=6
        )
        assert faults == []
        assert f"seeds {10_000 * number} to {10_000 * number + 5}" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [12, 33])
def test_fuzzed_routings_are_right_on_the_emulated_machine(number: int, ranks: int) -> None:
    shape = SHAPES[number]
    assert routing_fuzz.faults_of(shape, backend="emulated", ranks=ranks, routings=3) == []


def test_fuzzed_routings_in_fp8_are_right_on_the_emulated_machine() -> None:
    how: dict[str, Any] = {"backend": "emulated", "precision": "fp8_block"}
    assert routing_fuzz.faults_of(SHAPES[33], routings=2, **how) == []


@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
@pytest.mark.parametrize("of_oracle", [True, False])
@pytest.mark.parametrize("wrong", Results._fields)
def test_the_fuzz_finds_what_is_wrong(
    wrong: str, of_oracle: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number that is 100 too large, of the oracle's results or of those of random data."""
    run = layer.run

    def spoilt(batch: Batch, num_ranks: int | None = None, **how: str) -> Results:
        found = run(batch, num_ranks, **how)
        is_oracle = bool(np.all(batch.x[:, 1:] == 0))
        if "save" not in how or is_oracle != of_oracle:  # what it is held against
            return found
        array = getattr(found, wrong).copy()
        array[(-1,) * array.ndim] += 100
        return found._replace(**{wrong: array})

    monkeypatch.setattr(layer, "run", spoilt)
    how: dict[str, Any] = {"backend": "reference", "precision": precision}
    (fault,) = routing_fuzz.faults_of(SHAPES[4], seeds=[40_002], **how)
    assert fault.startswith("seed 40002 of Shape(number=4,") and f": {wrong}: " in fault


@pytest.mark.parametrize("fault", SEMANTIC, ids=lambda fault: fault.name)
def test_the_fuzz_finds_seeded_faults(fault: Fault) -> None:
    """With three routings of one shape, or three of another one."""
    with emulated.with_fault(fault.number):
        faults = routing_fuzz.faults_of(SHAPES[20], backend="emulated", routings=3)
        faults = faults or routing_fuzz.faults_of(SHAPES[3], backend="emulated", routings=3)
    assert faults, f"no routing is wrong although {fault.what}"


def test_every_class_of_bad_input_has_a_text_of_its_own() -> None:
    found = judged_refusals()
    assert found["classes"] >= 50 and found["alike"] == 0


@pytest.mark.parametrize(
    ("num_ranks", "backend", "precision"),
    [
        *((1, "reference", "bf16"), (2, "reference", "bf16"), (1, "reference", "fp8_block")),
        (1, "emulated", "bf16"),
    ],
)
def test_what_is_not_finite_stays_where_it_belongs(
    num_ranks: int, backend: str, precision: str
) -> None:
    size = nan_cases.SMALL_SIZES[precision]
    checks = nan_cases.checks(size, num_ranks, backend=backend, precision=precision)
    assert judged(checks) == {"cases": 12, "wrong": 0}


def test_what_is_not_finite_is_found_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over all experts' rows would carry it."""
    run = layer.run

    def spread(batch: Batch, *args: None, **how: str) -> Results:
        found = run(batch, *args, **how)
        with np.errstate(invalid="ignore"):
            return found._replace(dw_up=found.dw_up + 0 * found.dw_up.sum(axis=0))

    monkeypatch.setattr(layer, "run", spread)
    found = judged(nan_cases.checks(nan_cases.SMALL_SIZES["bf16"], backend="reference"))
    assert found == {"cases": 12, "wrong": 10}  # dw_up does not depend on w_up


def test_what_is_not_finite_is_found_in_a_group_beside_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the same expert's weights, or of the same token's y."""
    run = layer.run

    def spread(batch: Batch, *args: None, **how: str) -> Results:
        found = run(batch, *args, **how)
        with np.errstate(invalid="ignore"):
            dw_gate = found.dw_gate + 0 * found.dw_gate.sum(axis=2, keepdims=True)
            return found._replace(dw_gate=dw_gate, y=found.y + 0 * found.y[:, ::-1])

    monkeypatch.setattr(layer, "run", spread)
    how: dict[str, Any] = {"backend": "reference", "precision": "fp8_block"}
    found = judged(nan_cases.checks(nan_cases.SMALL_SIZES["fp8_block"], **how))
    # Values of the weights.
    assert found == {"cases": 12, "wrong": 6}


CHECKS = transform_cases.checks("reference")


@pytest.mark.parametrize("name", ["scan of remat, save=gate_up"])
def test_transformed_programs_have_the_bits_of_plain_ones(name: str) -> None:
    """And the calls; the others' bits are those of test_transforms and of the scorecard."""
    assert len(CHECKS) == 24
    CHECKS[name]()


@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("name", transform_cases.CASES)
def test_transformed_programs_call_the_kernels_as_often_as_they_should(
    name: str, save: str, precision: str
) -> None:
    transform_cases.judge_lowered(name, save, precision)


def test_a_call_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = transform_cases.CASES["remat, nothing saved"]
    monkeypatch.setitem(transform_cases.CASES, "twice", case._replace(forward=(1, 1)))
    with pytest.raises(AssertionError, match="twice with none: {'forward': 2, 'backward': 1}"):
        transform_cases.judge_lowered("twice", "none")


def test_models_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "MODELS", ((16, 2, 4, 64, 64),))
    monkeypatch.setattr(drift, "LOOK_EVERY", 2)
    found = drift.measure("reference", 1, 2, 3)
    assert found == {"layers": 1, "cycles": 2, "steps": 4, "drift_mib": 0}


def test_growth_is_seen() -> None:
    kept = []

    def keep() -> None:
        kept.append(jnp.zeros(1000, np.float32))

    assert drift.largest_growth(keep, 4) == 3 * 4000


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (("fuzz", "reference", "1", "0", "1", "3"), {"routings": 3, "shapes": 1, "wrong": 0}),
        (
            ("repeats", "reference", "2", "1", "fp8_block"),
            {"processes": 2, "runs": 4, "different": 0},
        ),
        (("pairs", "reference", "0", "1"), {"pairs": 1}),
        (("stress_ranks", "reference", "8", "4"), {"iterations": 4, "different": 0}),
    ],
)
def test_programs_say_what_they_did(arguments: tuple[str, ...], right: dict[str, int]) -> None:
    result = process.run_module("tests.reliability_programs", *arguments)
    assert result.returncode == 0, result.stderr
    assert counted(result.stdout) == right


def test_a_check_that_fails_is_counted() -> None:
    def fails() -> None:
        compare.assert_exact(1, 2)

    checks: dict[str, Callable[[], None]] = {"good": lambda: None, "bad": fails}
    assert judged(checks) == {"cases": 2, "wrong": 1}
