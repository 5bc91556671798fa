"""The suite's checks of the backward find seeded faults in the kernels.

They need the test build of the extension (`make build DELAYS=ON`), which `make test-gpu` makes.
Faults of ordering show only when events meet badly: of those it is said whether one was found.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest

from tests.mutation_driver import Driver, Verdict
from tests.mutation_programs import CHECKS
from tests.mutations import FAULTS, NO_FAULT, SEMANTIC, Fault, table
from tests.process import start_on_gpu

# Its checks run in workers, each with a limit of its own.
pytestmark = [pytest.mark.gpu, pytest.mark.limit(None)]

# A check that is run for the first time compiles its programs; later it takes a few seconds.
FIRST_LIMIT_S = 120
LIMIT_S = 40
# Of a wait in a kernel: a check with one that waits in vain ends well within its limit.
DEADLINE_S = 5


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    start = functools.partial(
        start_on_gpu,
        "-m",
        "tests.mutation_programs",
        JAX_MEGAMOE_EXTENSION="_cuda_delays",
        JAX_MEGAMOE_DEADLINE_S=str(DEADLINE_S),
        # For the worker after one that a fault has ended.
        JAX_COMPILATION_CACHE_DIR=str(tmp_path_factory.mktemp("compiled")),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    made = Driver(
        lambda errors: start(stderr=errors),
        list(CHECKS),
        first_limit_s=FIRST_LIMIT_S,
        limit_s=LIMIT_S,
    )
    with contextlib.closing(made):
        yield made


@pytest.fixture
def verdict_on(driver: Driver, capsys: pytest.CaptureFixture[str]) -> Callable[[Fault], Verdict]:
    """Of checks that pass without a fault. What the driver prints is seen at once, -s or not."""

    def judge(fault: Fault) -> Verdict:
        with capsys.disabled():
            without = driver.verdict(NO_FAULT)
            assert without == Verdict(), f"without a fault: {without}"
            return driver.verdict(fault)

    return judge


def test_without_a_fault_all_pass(verdict_on: Callable[[Fault], Verdict]) -> None:
    assert verdict_on(NO_FAULT) == Verdict()


@pytest.mark.parametrize("fault", SEMANTIC, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault: Fault, verdict_on: Callable[[Fault], Verdict]) -> None:
    """By a check: a process that ends badly says nothing of what the checks see."""
    found = verdict_on(fault)
    assert found.found_by, f"{fault.what}: {found}"


def test_every_fault_is_reported(
    verdict_on: Callable[[Fault], Verdict], capsys: pytest.CaptureFixture[str]
) -> None:
    text = table({fault: verdict_on(fault).text for fault in FAULTS})
    with capsys.disabled():
        print(f"\n{text}")
    assert len(text.splitlines()) == 2 + len(FAULTS)
