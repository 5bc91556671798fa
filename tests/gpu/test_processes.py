"""Experts over two processes with a GPU each: the bits of one process, and how it ends when one of
them does not go on."""

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import processes, rank_programs
from tests.processes import ORDERS, Ended
from tests.rank_programs import DIFFERENCES, STALL_S, Raised

pytestmark = [pytest.mark.multi_gpu(2), pytest.mark.limit(400)]

# After the end of a process, whatever the deadline of the waits.
RAISE_LIMIT_S = 10
DEADLINE_S = 20
# With the compilation of a call.
REFUSE_LIMIT_S = 30


@pytest.mark.parametrize("visible", ORDERS)
def test_two_processes_have_the_bits_of_one(
    visible: Sequence[Sequence[int]], tmp_path: Path
) -> None:
    pair = processes.run_pair(
        "tests.rank_programs", "bits", str(tmp_path), "cuda", visible=visible, timeout_s=200
    )
    assert [process.code for process in pair] == [0, 0], pair
    rank_programs.assert_bits(tmp_path, "cuda")


def train(*arguments: str, until: Sequence[int] = (0, 1)) -> list[Ended]:
    return processes.run_pair(
        "tests.rank_programs", "train", *arguments, until=until, timeout_s=180
    )


def raised(process: Ended) -> Raised:
    """By a process that an error has ended, and no limit of the test."""
    assert process.code not in (0, -9) and len(process.said) > 1, process
    return Raised(**json.loads(process.said[-1]))


def test_steps_end_as_they_should() -> None:
    pair = train("none", "forward")
    assert [process.code for process in pair] == [0, 0], pair
    assert all("jax_megamoe:" not in process.errors for process in pair), pair


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_who_is_killed_is_named_by_the_other_one_soon(where: str) -> None:
    """And the next start works."""
    survivor, killed = train("kill", where)
    error = raised(survivor)
    pid, at_s = killed.said
    assert killed.code == -9
    assert re.search(
        rf"rank 0 was told to stop waiting for rank 1 \(pid {pid} on .*\) after \d+ ms: phase "
        rf"peer_inputs, expert -1, block \d+, .*, epoch \d+; the process of rank 1 \(pid {pid} on ",
        error.text,
    )
    assert error.at_s - float(at_s) < RAISE_LIMIT_S
    assert [process.code for process in train("none", where)] == [0, 0]


@pytest.mark.parametrize("turn", range(5))
def test_who_is_killed_at_any_moment_is_named_too(turn: int) -> None:
    survivor, killed = train("kill_later", "forward")
    error = raised(survivor)
    pid, at_s = killed.said
    assert re.search(rf"the process of rank 1 \(pid {pid} on [^)]*\) has ended", error.text)
    assert error.at_s - float(at_s) < RAISE_LIMIT_S


def test_who_is_interrupted_is_named_too() -> None:
    survivor, interrupted = train("interrupt", "forward")
    error = raised(survivor)
    pid, at_s = interrupted.said
    assert interrupted.code == -signal.SIGINT
    assert re.search(rf"the process of rank 1 \(pid {pid} on [^)]*\) has ended", error.text)
    assert error.at_s - float(at_s) < RAISE_LIMIT_S


@pytest.mark.parametrize("turn", range(20))
def test_a_start_right_behind_a_kill_works(turn: int) -> None:
    """The one that was left is killed too, and both start again in that second."""
    where = ("forward", "backward")[turn % 2]
    _, killed = train("kill", where, until=(1,))
    assert killed.code == -signal.SIGKILL
    assert [process.code for process in train("none", where)] == [0, 0]


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_what_differs_is_refused_by_both(kind: str) -> None:
    """In the same words, before either launches anything."""
    pair = processes.run_pair("tests.rank_programs", "differ", kind)
    errors = [raised(process) for process in pair]
    assert errors[0].text == errors[1].text
    assert "INVALID_ARGUMENT" in errors[0].text
    assert re.search("rank 0 (has configuration|asks for a workspace)", errors[0].text)
    for process, error in zip(pair, errors, strict=True):
        assert error.at_s - float(process.said[1]) < REFUSE_LIMIT_S


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_who_stalls_is_waited_for_to_the_deadline(where: str) -> None:
    """Of one wait, whatever is enqueued behind it."""
    survivor, stalled = train("stall", where, str(DEADLINE_S), until=(0,))
    error = raised(survivor)
    pid, at_s = stalled.said[:2]
    assert re.search(
        rf"rank 0 gave up waiting for rank 1 \(pid {pid} on .*\) after {DEADLINE_S}\d{{3}} ms: "
        r"phase peer_inputs, expert -1, block \d+, .*, epoch \d+",
        error.text,
    )
    assert DEADLINE_S - 1 < error.at_s - float(at_s) < DEADLINE_S + RAISE_LIMIT_S < STALL_S


def test_who_is_late_is_waited_for() -> None:
    """The other one says on standard error that it waits, and ends as it should."""
    waited, late = train("late", "forward")
    assert [process.code for process in (waited, late)] == [0, 0], (waited, late)
    assert "a call has failed" not in waited.errors + late.errors


def test_who_leaves_ends_only_calls_that_come_later() -> None:
    """At once, and by name; nothing has failed until then."""
    survivor, left = train("leave", "forward")
    error = raised(survivor)
    assert left.code == 0
    assert re.search(
        rf"the process of rank 1 \(pid {left.said[0]} on [^)]*\) has ended; the processes of its "
        "expert group have to start again",
        error.text,
    )
    assert error.at_s - float(survivor.said[1]) < 2
    assert "jax_megamoe: a call has failed" not in survivor.errors
