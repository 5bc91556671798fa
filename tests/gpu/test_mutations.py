"""The suite's checks of the backward find seeded faults in the kernels.

They need the test build of the extension (MEGAMOE_FAULTS), which `make test-gpu` makes. Faults of
ordering show only when events meet badly: of those it is said whether one was found.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.forward_programs import counted
from tests.mutation_programs import CHECKS
from tests.mutations import FAULTS, SEMANTIC, Fault, table
from tests.process import run_on_gpu

pytestmark = pytest.mark.gpu

TIMEOUT_S = 150
# Processes at a time; most of what one does is to start and to compile.
NUM_PROCESSES = 8


def failing_checks(number: int) -> list[str]:
    """Of a process whose kernels have the fault; what ends it is named as a check of its own."""
    try:
        result = run_on_gpu(
            "-m",
            "tests.mutation_programs",
            str(number),
            timeout_s=TIMEOUT_S,
            JAX_MEGAMOE_EXTENSION="_cuda_delays",
        )
    except subprocess.TimeoutExpired:
        return ["it does not end"]
    if result.returncode != 0:
        assert number != 0, result.stderr
        return [f"it ends with {result.returncode}: {result.stderr.strip().splitlines()[-1]}"]
    return counted(result.stdout)["failing"]


@pytest.fixture(scope="module")
def found() -> dict[int, list[str]]:
    """The checks that fail, by the number of the fault; 0: no fault."""
    numbers = [0, *(fault.number for fault in FAULTS)]
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        return dict(zip(numbers, pool.map(failing_checks, numbers), strict=True))


def test_without_a_fault_all_pass(found: dict[int, list[str]]) -> None:
    assert found[0] == []


@pytest.mark.parametrize("fault", SEMANTIC, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault: Fault, found: dict[int, list[str]]) -> None:
    """By a check: a process that ends badly says nothing of what the checks see."""
    assert set(found[fault.number]) & set(CHECKS), f"{fault.what}: {found[fault.number]}"


def test_every_fault_is_reported(
    found: dict[int, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    text = table({fault: ", ".join(found[fault.number]) or "-" for fault in FAULTS})
    with capsys.disabled():
        print(f"\n{text}")
    assert len(text.splitlines()) == 2 + len(FAULTS)
