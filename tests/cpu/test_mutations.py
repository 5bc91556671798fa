"""The checks of the backward find every seeded fault, on the emulated machine.

So each of them is a real one; tests/gpu/test_mutations.py has those of the kernels on a GPU.
"""

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import emulated
from tests.cpu import test_emulated_kernels as suite
from tests.mutations import FAULTS, ORDERING, SEMANTIC, Fault, failing, table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "testing.md"
# The suite's own, by what they show; the first ones find most and are the fastest.
CHECKS: dict[str, Callable[[], None]] = {
    "oracle, half tiles": functools.partial(
        suite.test_gradients_of_the_oracle_are_exact, *suite.CASES[1]
    ),
    "oracle, tokens without a route": functools.partial(
        suite.test_gradients_of_the_oracle_are_exact, *suite.CASES[2]
    ),
    "oracle, experts without rows": functools.partial(
        suite.test_gradients_of_the_oracle_are_exact, *suite.CASES[5]
    ),
    "the formulas in float64": functools.partial(
        suite.test_gradients_are_those_of_the_formulas, *suite.CASES[3]
    ),
    "error of every expert": functools.partial(
        suite.test_error_of_every_expert_is_that_of_an_unfused_path, 0
    ),
    "sums over choices": functools.partial(suite.test_sums_are_float32, "dx"),
    "sums over rows": functools.partial(suite.test_sums_are_float32, "dW"),
    "NaN of one token": suite.test_nan_stays_with_its_token_and_its_experts,
    "frozen experts": suite.test_frozen_experts_change_nothing_else,
}


def first_to_fail(fault: Fault) -> str:
    with emulated.with_fault(fault.number):
        return next(iter(failing(CHECKS)), "")


def test_the_faults_are_five_kinds_of_four() -> None:
    assert len(FAULTS) == 20 and len({fault.name for fault in FAULTS}) == 20
    kinds = Counter(fault.kind for fault in FAULTS)
    assert len(kinds) == 5 and set(kinds.values()) == {4} and ORDERING in kinds


def test_the_docs_have_them_all() -> None:
    text = DOCS.read_text()
    rows = [f"| {fault.kind} | {fault.name} | {fault.what} |" for fault in FAULTS]
    assert [row for row in rows if row not in text] == []


def test_without_a_fault_all_pass() -> None:
    assert list(failing(CHECKS)) == []


@pytest.mark.parametrize("fault", SEMANTIC, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault: Fault) -> None:
    assert first_to_fail(fault), f"no check fails although {fault.what}"


if __name__ == "__main__":
    print(table({fault: first_to_fail(fault) or "-" for fault in FAULTS}))
