"""Runs the checks with one fault after another in a worker: a process that lasts.

So JAX starts and every program is compiled once, not once a fault. A fault may end the worker or
make it hang: that is noted, and a fresh one does what is left.
"""

import contextlib
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, NamedTuple

from tests.mutations import Fault

# Before each line by which a worker answers; what else is printed there is not for the driver.
ANSWER = "answer: "
# For the driver of a GPU to clear up after a killed process.
KILL_LIMIT_S = 60
# Starts a worker, with pipes to its input and from its output; its errors go to the file.
Start = Callable[[IO[str]], subprocess.Popen[str]]


class Verdict(NamedTuple):
    """What came of a fault: nothing, a check that failed, or the end of the worker.

    found_by: the first check that fails. ended: how the worker ended, and during which check.
    error: what the check fails with, or the last that the worker printed as errors. What there is
    none of is "".
    """

    found_by: str = ""
    ended: str = ""
    error: str = ""

    @property
    def text(self) -> str:
        if not self.ended:
            return self.found_by or "-"
        return ": ".join([self.ended, *self.error.splitlines()[-1:]])


class Driver:
    """Asks a worker for one check after another, and prints what comes as it comes.

    A worker reads lines "NUMBER CHECK" and answers each with ANSWER and what the check fails with
    when the kernels have that fault, or nothing when it passes. It may end instead.

    Args:
      checks: their names, in the order in which they are run.
      first_limit_s: how long a check may take that the worker runs for the first time, its start
        included. limit_s: and afterwards.
    """

    def __init__(
        self, start: Start, checks: Sequence[str], *, first_limit_s: float, limit_s: float
    ) -> None:
        self._start, self._checks = start, checks
        self._first_limit_s, self._limit_s = first_limit_s, limit_s
        self._worker: _Worker | None = None
        self._known: set[str] = set()  # the checks that the worker has run
        self._verdicts: dict[Fault, Verdict] = {}

    def verdict(self, fault: Fault) -> Verdict:
        """Runs the checks up to the first that fails, unless that was done before."""
        if fault not in self._verdicts:
            print(f"{fault.name}:", end="", flush=True)
            self._verdicts[fault] = found = self._judge(fault.number)
            print(f" => {found.text}", flush=True)
        return self._verdicts[fault]

    def close(self) -> None:
        """Ends the worker."""
        if self._worker is not None:
            self._end(self._worker)

    def _judge(self, number: int) -> Verdict:
        for check in self._checks:
            start = time.perf_counter()
            if self._worker is None:
                self._worker = _Worker(self._start)
            limit_s = self._limit_s if check in self._known else self._first_limit_s
            try:
                error = self._worker.ask(f"{number} {check}", limit_s)
            except _Ended as ended:
                return Verdict(ended=f"{ended} in {check}", error=self._end(self._worker))
            self._known.add(check)
            print(f" {check} {time.perf_counter() - start:.1f} s,", end="", flush=True)
            if error:
                return Verdict(found_by=check, error=error)
        return Verdict()

    def _end(self, worker: "_Worker") -> str:
        self._worker, self._known = None, set()
        return worker.end()


class _Ended(Exception):
    """The worker gave no answer; says why."""


class _Worker:
    """A process that answers lines, and the thread that reads what it prints."""

    def __init__(self, start: Start) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = start(self._errors)
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, question: str, limit_s: float) -> str:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then no answer comes either
            print(question, file=self._process.stdin, flush=True)
        try:
            answer = self._answers.get(timeout=limit_s)
            if answer is None:
                raise _Ended(f"it ends with {self._process.wait(limit_s)}")
        except (queue.Empty, subprocess.TimeoutExpired):
            raise _Ended("it does not end") from None
        return answer

    def end(self) -> str:
        """Kills the process; returns the last that it printed as errors."""
        self._process.kill()
        self._process.wait(KILL_LIMIT_S)
        self._reader.join()
        self._errors.seek(0)
        last = self._errors.read().strip()[-4000:]
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            with contextlib.suppress(BrokenPipeError):  # a question that was never read
                file.close()
        return last

    def _read(self) -> None:
        """Puts every answer into the queue, and None at the end."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(line.removeprefix(ANSWER).rstrip("\n"))
        self._answers.put(None)
