"""Who watches another process learns that it has ended, however it ended, and takes no other for
it. The processes are real ones."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests import emulated

# Far above what it takes, and below what a group may take to raise.
LIMIT_S = 5.0
# In which what must not happen would.
QUIET_S = 0.4


class Card(NamedTuple):
    """The fields of cuda/host/process.h."""

    identity: int
    pid: int
    start: int
    pid_space: int
    network: int


class Process:
    """One that runs tests/emulator/watch.cc."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [emulated.program("watch")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.card = Card(*map(int, self.ask("card").removeprefix("card ").split()))

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(line.strip())

    def tell(self, *words: object) -> None:
        assert self.popen.stdin is not None
        print(*words, file=self.popen.stdin, flush=True)

    def ask(self, *words: object) -> str:
        self.tell(*words)
        return self.hear()

    def hear(self, limit_s: float = LIMIT_S) -> str:
        return self._lines.get(timeout=limit_s)

    def assert_quiet(self) -> None:
        with pytest.raises(queue.Empty):
            self.hear(QUIET_S)

    def kill(self) -> None:
        self.popen.kill()

    def leave(self) -> int:
        """Ends it as programs end; its exit status."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        return self.popen.wait(LIMIT_S)

    def close(self) -> None:
        """Ends it, and the children that it has forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._reader.join()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def processes(count: int) -> Iterator[list[Process]]:
    with contextlib.ExitStack() as stack:
        started = [Process() for _ in range(count)]
        for process in started:
            stack.callback(process.close)
        yield started


def ended(process: Process) -> list[str]:
    return [f"{word} {process.card.identity}" for word in ("ended", "again")]


# By a pidfd, or by a socket where pid namespaces differ.
HOW = ["watch", "far"]


def begin(how: str, watcher: Process, *others: Process) -> None:
    for process in others:
        if how == "far":
            assert process.ask("lifeline") == "opened"
        watcher.tell(how, *process.card)
    watcher.assert_quiet()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("way", ["kill", "leave"])
def test_an_end_is_told_soon_and_only_of_who_has_ended(how: str, way: str) -> None:
    with processes(3) as (watcher, stays, goes):
        begin(how, watcher, stays, goes)
        start = time.monotonic()
        getattr(goes, way)()
        assert [watcher.hear(), watcher.hear()] == ended(goes)
        assert time.monotonic() - start < 2
        watcher.assert_quiet()
        stays.kill()
        assert [watcher.hear(), watcher.hear()] == ended(stays)


@pytest.mark.parametrize("how", HOW)
def test_a_process_that_has_stopped_has_not_ended(how: str) -> None:
    with processes(2) as (watcher, other):
        begin(how, watcher, other)
        other.popen.send_signal(signal.SIGSTOP)
        watcher.assert_quiet()
        other.kill()
        assert [watcher.hear(), watcher.hear()] == ended(other)


def test_one_that_has_ended_before_is_told_of_at_once() -> None:
    with processes(2) as (watcher, other):
        other.kill()
        other.popen.wait()
        watcher.tell("watch", *other.card)
        assert watcher.hear().endswith(f" {other.card.identity}")


def test_a_pid_that_is_anothers_by_now_is_an_end() -> None:
    """The process with the pid runs, and has started at another time."""
    with processes(2) as (watcher, other):
        watcher.tell("watch", *other.card._replace(start=other.card.start - 1))
        assert watcher.hear().endswith(f" {other.card.identity}")
        watcher.tell("watch", *other.card)
        other.kill()
        assert watcher.hear().endswith(f" {other.card.identity}")


def test_a_lifeline_may_come_later() -> None:
    """Who has none yet has not ended."""
    with processes(2) as (watcher, late):
        watcher.tell("far", *late.card)
        watcher.assert_quiet()
        assert late.ask("lifeline") == "opened"
        watcher.assert_quiet()
        late.kill()
        assert [watcher.hear(), watcher.hear()] == ended(late)


def test_a_lifeline_of_another_user_is_none() -> None:
    with processes(2) as (watcher, other):
        assert watcher.ask("reach", other.card.identity, os.geteuid()) == "not reached"
        other.ask("lifeline")
        assert watcher.ask("reach", other.card.identity, os.geteuid()) == "reached"
        assert watcher.ask("reach", other.card.identity, os.geteuid() + 1) == "not reached"


def test_forked_children_do_not_hide_the_end_from_a_pidfd() -> None:
    with processes(2) as (watcher, other):
        begin("watch", watcher, other)
        assert other.ask("fork").startswith("forked ")
        other.kill()
        assert [watcher.hear(), watcher.hear()] == ended(other)


def test_who_shares_no_namespace_is_not_watched() -> None:
    with processes(2) as (watcher, other):
        card = other.card._replace(network=other.card.network + 1)
        assert watcher.ask("far", *card) == (
            "why it shares neither a pid nor a network namespace with this one"
        )


def test_each_watches_all_others() -> None:
    with processes(4) as group:
        for watcher in group:
            begin("watch", watcher, *(p for p in group if p is not watcher))
        for _ in range(len(group) - 1):
            goes, *group = group
            goes.kill()
            for watcher in group:
                assert [watcher.hear(), watcher.hear()] == ended(goes)


@pytest.mark.parametrize("how", HOW)
def test_who_watches_leaves_as_any_process(how: str) -> None:
    """While it watches, and while it is told of an end."""
    with processes(3) as (watcher, other, goes):
        begin(how, watcher, other, goes)
        goes.kill()
        assert watcher.leave() == 0


def test_nothing_is_told_after_a_stop() -> None:
    with processes(2) as (watcher, other):
        begin("watch", watcher, other)
        watcher.tell("stop")
        watcher.assert_quiet()
        other.kill()
        watcher.assert_quiet()
        assert watcher.leave() == 0


def test_nothing_runs_beside_a_process_that_watches_nobody() -> None:
    with processes(2) as (watcher, other):

        def threads() -> int:
            return len(os.listdir(f"/proc/{watcher.card.pid}/task"))

        assert threads() == 1
        begin("watch", watcher, other)
        begin("watch", watcher, other)
        assert threads() == 2
