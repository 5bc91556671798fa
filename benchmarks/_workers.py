"""Processes beside this one that measure together, one a GPU, in the same rounds as all else.

They import a module that this process need not be able to import, with a function
`make(rank, num_ranks, rendezvous, *how) -> Timed`; rendezvous is the path of a file, not there yet,
by which they may find each other. They hold several such runs, told apart by their `how`. Every
request has one answer of each process: the seconds that it took, or the text of an error.
"""

import contextlib
import dataclasses
import importlib
import multiprocessing
import pathlib
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NoReturn

from _timing import Timed

# A request may compile, on a machine that compiles for others too.
ANSWER_SECONDS = 150.0
END_SECONDS = 5.0
How = tuple[Any, ...]
# Only to import; what to make, in place of what was made before; calls of one of those.
Request = None | list[How] | tuple[How, int]


def serve(connection: Connection, module: str, rank: int, num_ranks: int, rendezvous: str) -> None:
    """The program of one process: answers requests until the other end is closed."""
    made: dict[How, Timed] = {}

    def handle(request: Request) -> float:
        if isinstance(request, tuple):
            how, calls = request
            return made[how].seconds(calls)
        make = importlib.import_module(module).make
        if request is not None:
            made.clear()
            made.update({how: make(rank, num_ranks, rendezvous, *how) for how in request})
        return 0.0

    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer: float | str = handle(request)
        except Exception as error:
            traceback.print_exc()
            answer = f"rank {rank}: {type(error).__name__}: {error}"
        connection.send(answer)


class Workers:
    """The processes, to be closed at the end.

    One that fails ends all: the others may wait for it for ever. The next `begin` starts them anew.
    """

    def __init__(self, module: str, num_ranks: int) -> None:
        self._module = module
        self._num_ranks = num_ranks
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        self._num_awaited = 0
        self._start()

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    def begin(self, hows: list[How]) -> None:
        """Lets all make what they run from now on, beside what this process does meanwhile."""
        if not self._processes:
            self._start()
        self._ask(hows)

    def finish(self, how: How) -> "WorkersRun":
        """Waits for what `begin` began, and returns that of one of its `hows`.

        Raises:
          RuntimeError: one of them failed, has ended, or did not answer in time.
        """
        self._answers()
        return WorkersRun(self, how)

    def seconds(self, how: How, calls: int) -> float:
        """As `Timed.seconds`, of the slowest process; raises as `finish`."""
        self._ask((how, calls))
        return max(self._answers())

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(END_SECONDS)
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        self._folder.cleanup()

    def _start(self) -> None:
        # Not forked: JAX has threads. The file is one of this start, not left from another.
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = str(pathlib.Path(self._folder.name, "rendezvous"))
        for rank in range(self._num_ranks):
            ours, theirs = context.Pipe()
            arguments = (theirs, self._module, rank, self._num_ranks, rendezvous)
            process = context.Process(target=serve, args=arguments)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._num_awaited = 0
        self._ask(None)

    def _ask(self, request: Request) -> None:
        self._num_awaited += 1
        for connection in self._connections:
            # One that has ended is found by its answer, which does not come.
            with contextlib.suppress(OSError):
                connection.send(request)

    def _answers(self) -> list[float]:
        """Those to the last request, one a rank; the answers before it said that all went well.

        Zeros when all have been given.
        """
        if not self._processes:
            raise RuntimeError("the processes have ended, after another failure")
        awaited = dict.fromkeys(self._connections, self._num_awaited) if self._num_awaited else {}
        seconds = [0.0] * self._num_ranks
        deadline = time.monotonic() + ANSWER_SECONDS
        while awaited:
            ready = wait(list(awaited), deadline - time.monotonic())
            if not ready:
                late = [self._connections.index(c) for c in awaited]
                self._fail(f"ranks {late} did not answer within {ANSWER_SECONDS:.0f} s")
            for connection in self._connections:
                if connection not in ready:
                    continue
                rank = self._connections.index(connection)
                try:
                    answer = connection.recv()
                except (EOFError, OSError):
                    self._fail(f"the process of rank {rank} ended")
                if isinstance(answer, str):
                    self._fail(answer)
                seconds[rank] = answer
                awaited[connection] -= 1
                if not awaited[connection]:
                    del awaited[connection]
        self._num_awaited = 0
        return seconds

    def _fail(self, why: str) -> NoReturn:
        self.close()
        raise RuntimeError(why)


@dataclasses.dataclass(frozen=True)
class WorkersRun:
    """A `Timed`: what all processes made of one `how`."""

    workers: Workers
    how: How

    @property
    def num_devices(self) -> int:
        return self.workers.num_ranks

    def seconds(self, calls: int) -> float:
        return self.workers.seconds(self.how, calls)
