"""The suite's checks of the backward find seeded faults in the kernels.

They need the test build of the extension (MEGAMOE_FAULTS), which `make test-gpu` makes. Faults of
ordering show only when events meet badly: of those it is said whether one was found.
"""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.forward_programs import counted
from tests.mutation_programs import CHECKS
from tests.mutations import FAULTS, SEMANTIC, Fault, table
from tests.process import run_on_gpu

pytestmark = pytest.mark.gpu

TIMEOUT_S = 150
# Processes at a time; most of what one does is to start.
NUM_PROCESSES = 8


def failing_checks(number: int, cache: Path) -> list[str]:
    """Of a process whose kernels have the fault; what ends it is named as a check of its own.

    cache: of compiled programs, which are the same for every fault.
    """
    try:
        result = run_on_gpu(
            "-m",
            "tests.mutation_programs",
            str(number),
            timeout_s=TIMEOUT_S,
            JAX_MEGAMOE_EXTENSION="_cuda_delays",
            JAX_COMPILATION_CACHE_DIR=str(cache),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
    except subprocess.TimeoutExpired:
        return ["it does not end"]
    if result.returncode != 0:
        assert number != 0, result.stderr
        return [f"it ends with {result.returncode}: {result.stderr.strip().splitlines()[-1]}"]
    return counted(result.stdout)["failing"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """The checks that fail, by the number of the fault; 0: no fault."""
    cache = tmp_path_factory.mktemp("compiled")
    without = failing_checks(0, cache)  # first, so that the others find what it has compiled
    numbers = [fault.number for fault in FAULTS]
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        of_faults = pool.map(lambda number: failing_checks(number, cache), numbers)
        return {0: without, **dict(zip(numbers, of_faults, strict=True))}


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
