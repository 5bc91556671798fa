"""The driver of the checks with seeded faults, with a worker that answers what it is told to."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.mutation_driver import Driver, Verdict
from tests.mutations import NO_FAULT, Fault

# Writes what it is asked into a file and answers with what is given for the question.
WORKER = """
import json, os, sys, time
answers = json.loads(sys.argv[1])
if "start" in answers:
    sys.exit(answers["start"])
print("not an answer", flush=True)
for line in sys.stdin:
    with open(sys.argv[2], "a") as log:
        print(os.getpid(), line, end="", file=log)
    answer = answers.get(line.rstrip("\\n"), "")
    if answer.startswith("ends"):
        sys.exit("first line\\n" + answer)
    if answer.startswith("takes"):
        time.sleep(float(answer.split()[1]))
        answer = ""
    print("answer: " + answer, flush=True)
"""
CHECKS = ["small", "of two words", "large"]
A, B = (Fault(number, name, "a kind", "does something") for number, name in ((1, "A"), (2, "B")))
Make = Callable[..., Driver]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "asked"


@pytest.fixture
def make(log: Path) -> Iterator[Make]:
    """Makes a driver of workers with such answers, and closes it."""
    made: list[Driver] = []

    def make(first_limit_s: float = 60, limit_s: float = 60, **answers: str) -> Driver:
        def start(errors: IO[str]) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, "-c", WORKER, json.dumps(answers), str(log)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

        made.append(Driver(start, CHECKS, first_limit_s=first_limit_s, limit_s=limit_s))
        return made[-1]

    yield make
    for driver in made:
        driver.close()


def asked(log: Path) -> list[tuple[int, str]]:
    """Which worker was asked what: the number of the worker, from 0, and the question."""
    lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
    workers = list(dict.fromkeys(worker for worker, _ in lines))
    return [(workers.index(worker), question) for worker, question in lines]


def test_a_fault_that_nothing_finds_sees_all_checks_once(make: Make, log: Path) -> None:
    driver = make()
    assert driver.verdict(NO_FAULT) == driver.verdict(A) == driver.verdict(A) == Verdict()
    assert asked(log) == [(0, f"{number} {check}") for number in (0, 1) for check in CHECKS]


def test_the_first_check_to_fail_is_the_last(make: Make, log: Path) -> None:
    driver = make(**{"1 of two words": "dx: 3 of 8 differ"})
    assert driver.verdict(A) == Verdict(found_by="of two words", error="dx: 3 of 8 differ")
    assert driver.verdict(B) == Verdict()
    assert asked(log)[:3] == [(0, "1 small"), (0, "1 of two words"), (0, "2 small")]


def test_a_worker_that_ends_is_no_finding_and_is_replaced(make: Make, log: Path) -> None:
    driver = make(**{"1 of two words": "ends with an illegal address"})
    found = driver.verdict(A)
    assert (found.found_by, found.ended) == ("", "it ends with 1 in of two words")
    assert found.text == "it ends with 1 in of two words: ends with an illegal address"
    assert driver.verdict(B) == Verdict()
    assert asked(log)[1:3] == [(0, "1 of two words"), (1, "2 small")]


def test_a_worker_that_hangs_is_killed_and_replaced(make: Make, log: Path) -> None:
    driver = make(limit_s=0.5, **{"2 small": "takes 600"})
    assert driver.verdict(A) == Verdict()
    assert driver.verdict(B) == Verdict(ended="it does not end in small")
    assert driver.verdict(NO_FAULT) == Verdict()
    assert asked(log)[3:5] == [(0, "2 small"), (1, "0 small")]


def test_what_a_worker_does_first_may_take_longer(make: Make) -> None:
    """A fresh one compiles again; a check that it knows does not."""
    slow = {f"{number} small": "takes 1.5" for number in (1, 2)}
    driver = make(limit_s=0.5, **slow)
    assert driver.verdict(A) == Verdict()
    assert driver.verdict(B).ended == "it does not end in small"
    driver = make(first_limit_s=0.5, limit_s=60, **{"1 small": "takes 600"})
    assert driver.verdict(A).ended == "it does not end in small"


def test_a_worker_that_does_not_start_says_why(make: Make) -> None:
    driver = make(start="build the extension again")
    want = Verdict(ended="it ends with 1 in small", error="build the extension again")
    assert driver.verdict(A) == driver.verdict(B) == want


def test_each_verdict_is_printed_as_it_comes(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = make(**{"1 of two words": "wrong", "2 small": "ends badly"})
    for fault, line in (
        (NO_FAULT, r"no fault: small \S+ s, of two words \S+ s, large \S+ s, => -\n"),
        (A, r"A: small \S+ s, of two words \S+ s, => of two words\n"),
        (B, r"B: => it ends with 1 in small: ends badly\n"),
    ):
        driver.verdict(fault)
        assert re.fullmatch(line, capsys.readouterr().out)
