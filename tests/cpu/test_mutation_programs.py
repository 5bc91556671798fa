"""The worker of the checks with seeded faults, with the reference in place of the kernels."""

import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_megamoe import _ffi, reference
from tests import mutation_programs
from tests.backward import launched
from tests.mutation_driver import ANSWER
from tests.mutation_programs import CHECKS
from tests.mutations import FAULTS

# Not the three that take seconds on any machine.
QUICK = [
    name
    for name in CHECKS
    if name not in ("error of every expert", "frozen experts", "error with many choices")
]


@pytest.fixture
def reference_as_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def call(
        dy: Any, x: Any, ids: Any, w: Any, w_gate: Any, *weights: Any, launches: Any, **how: Any
    ) -> Any:
        del how["deadline_s"], how["trace"]
        dx, dw, *sums = reference.backward(dy, x, ids, w, w_gate, *weights, **how)
        return dx, dw.astype(jnp.float32), *(a.astype(w_gate.dtype) for a in sums)

    monkeypatch.setattr(_ffi, "backward_call", call)
    programs: Any = launched
    programs.clear_cache()
    yield
    programs.clear_cache()


@pytest.mark.usefixtures("reference_as_kernels")
def test_checks_pass_on_right_values_and_compile_once(caplog: pytest.LogCaptureFixture) -> None:
    def compiled() -> int:
        caplog.clear()
        with jax.log_compiles():
            for name in QUICK:
                CHECKS[name]()
        return caplog.text.count("Finished XLA compilation")

    assert compiled() > 0
    assert compiled() == 0


def fails(*errors: Exception) -> Callable[[], None]:
    """Raises one of them at each call, then nothing."""
    left = list(errors)

    def check() -> None:
        if left:
            raise left.pop(0)

    return check


LATE = jax.errors.JaxRuntimeError("ABORTED: of the call before")


def test_the_error_that_a_wait_left_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation_programs, "weight_of_zero", fails(LATE))
    mutation_programs.settle()


@pytest.mark.parametrize("errors", [[LATE, LATE], [AssertionError()], [LATE, AssertionError()]])
def test_a_device_that_is_not_right_afterwards_ends_the_worker(
    errors: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation_programs, "weight_of_zero", fails(*errors))
    with pytest.raises(type(errors[-1])):
        mutation_programs.settle()


def test_each_line_is_answered_and_leaves_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults: list[int] = []
    module = SimpleNamespace(fault_names=lambda: [f.name for f in FAULTS], set_fault=faults.append)
    checks = {
        "a check": fails(AssertionError("dx:\n 3 differ")),
        "another": fails(AssertionError()),
    }
    monkeypatch.setattr(_ffi, "extension", lambda: (module, ""))
    monkeypatch.setattr(mutation_programs, "CHECKS", checks)
    monkeypatch.setattr(mutation_programs, "weight_of_zero", lambda: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("7 a check\n8 a check\n9 another\n"))
    mutation_programs.main()
    answers = ["dx: 3 differ", "", "AssertionError"]
    assert capsys.readouterr().out == "".join(f"{ANSWER}{answer}\n" for answer in answers)
    assert faults == [7, 0, 8, 0, 9, 0]
