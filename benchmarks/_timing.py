"""How a sustained rate is measured: segments of load and of timed calls, in alternating order.

A GPU at its power limit lowers its clock within 100 ms of load, so a few timed calls on an idle one
show a rate that it cannot hold. Here every implementation first runs alone for `load_seconds`, then
its queued calls are timed as a whole over `timed_seconds`; the rounds alternate the order, so that
none always follows the same one.
"""

import contextlib
import ctypes
import dataclasses
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from _record import sm_clocks


class Timed(Protocol):
    """What is measured: something that runs `calls` queued calls when it is told to."""

    @property
    def num_devices(self) -> int:
        """On so many GPUs, the first ones."""
        ...

    def seconds(self, calls: int) -> float:
        """Time of `calls` calls, from idle devices until the last result is there."""
        ...


@dataclasses.dataclass(frozen=True)
class Run:
    """call: enqueues one call and returns its results; wait: until those are there."""

    call: Callable[[], Any]
    wait: Callable[[Any], object]
    num_devices: int = 1

    def seconds(self, calls: int) -> float:
        """As `Timed` says. Only the latest results are kept: memory does not grow with `calls`."""
        start = time.perf_counter()
        results = None
        for _ in range(calls):
            results = self.call()
        self.wait(results)
        return time.perf_counter() - start


@dataclasses.dataclass(frozen=True)
class Method:
    """One for all implementations of a run."""

    load_seconds: float = 0.3
    timed_seconds: float = 0.5
    rounds: int = 3


@dataclasses.dataclass(frozen=True)
class Figures:
    """Over the rounds: the median time of a call, largest less smallest, median clock if known."""

    ms: float
    ms_spread: float
    clock_mhz: int | None


def nvml_clocks(num_devices: int) -> Callable[[], tuple[int, ...]]:
    """A function that reads the SM clocks of the first GPUs, in MHz, in some 0.1 ms each."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    devices = [ctypes.c_void_p() for _ in range(num_devices)]
    mhz = ctypes.c_uint()

    def check(status: int) -> None:
        if status:
            raise OSError(f"NVML answered {status}")

    def read_one(device: ctypes.c_void_p) -> int:
        sm_clock = 1  # NVML_CLOCK_SM
        check(nvml.nvmlDeviceGetClockInfo(device, sm_clock, ctypes.byref(mhz)))
        return mhz.value

    def read() -> tuple[int, ...]:
        return tuple(map(read_one, devices))

    check(nvml.nvmlInit_v2())
    for i, device in enumerate(devices):
        check(nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(device)))
    read()
    return read


class Clock:
    """Samples clocks in a thread of its own, so that timed calls do not wait for it."""

    PERIOD_SECONDS = 0.02

    def __init__(self, read: Callable[[], tuple[int, ...]]) -> None:
        self._read = read
        self._samples: list[tuple[float, tuple[int, ...]]] = []
        threading.Thread(target=self._sample, daemon=True).start()

    @staticmethod
    def of_gpus(num_devices: int = 1) -> "Clock":
        """The SM clocks of the first GPUs; by nvidia-smi, a few times a second, if NVML fails."""
        try:
            return Clock(nvml_clocks(num_devices))
        except OSError as error:
            print(f"clocks come from nvidia-smi: {error}", file=sys.stderr)
            return Clock(lambda: tuple(sm_clocks(num_devices)))

    def median_mhz(self, start: float, end: float, num_devices: int = 1) -> int | None:
        """Of the samples between two times of time.perf_counter; None when there is none.

        Of several GPUs, the first `num_devices`, it is the lowest one's.
        """
        inside = [mhz[:num_devices] for at, mhz in self._samples if start <= at <= end]
        return int(np.median(inside, axis=0).min()) if inside else None

    def _sample(self) -> None:
        while True:
            mhz = self._read()
            self._samples.append((time.perf_counter(), mhz))
            time.sleep(self.PERIOD_SECONDS)


def load(run: Timed, seconds: float) -> float:
    """Runs it for at least `seconds`; returns the time of a call in the last batch of calls."""
    calls, spent = 1, 0.0
    while True:
        elapsed = run.seconds(calls)
        spent += elapsed
        if spent >= seconds:
            return elapsed / calls
        calls = max(1, math.ceil(seconds / 3 * calls / elapsed))


def segment(run: Timed, method: Method, clock: Clock | None) -> tuple[float, int | None]:
    """Milliseconds a call, and the clock over the timed calls."""
    each = load(run, method.load_seconds)
    while True:
        calls = max(1, math.ceil(1.1 * method.timed_seconds / each))
        start = time.perf_counter()
        elapsed = run.seconds(calls)
        if elapsed >= method.timed_seconds:
            end = start + elapsed
            mhz = clock.median_mhz(start, end, run.num_devices) if clock else None
            return elapsed / calls * 1e3, mhz
        each = elapsed / calls


def measure(
    runs: Mapping[str, Timed], method: Method, clock: Clock | None
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Measures all runs in alternating rounds.

    Returns:
      The figures of each run, or the text of the error that ended it.
    """
    samples: dict[str, list[tuple[float, int | None]]] = {name: [] for name in runs}
    errors: dict[str, str] = {}
    for turn in range(method.rounds):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            if name not in errors:
                with caught(name, errors):
                    samples[name].append(segment(runs[name], method, clock))
    return {n: _figures(s) for n, s in samples.items() if n not in errors}, errors


@contextlib.contextmanager
def caught(name: str, errors: dict[str, str]) -> Iterator[None]:
    """Keeps the text of an exception as the result of `name`, and shows all of it on stderr."""
    try:
        yield
    except Exception as error:
        print(f"{name} failed:", file=sys.stderr)
        traceback.print_exc()
        errors[name] = f"{type(error).__name__}: {error}"[:500]


def _figures(samples: list[tuple[float, int | None]]) -> Figures:
    times = [ms for ms, _ in samples]
    clocks = [mhz for _, mhz in samples if mhz is not None]
    return Figures(
        ms=float(np.median(times)),
        ms_spread=max(times) - min(times),
        clock_mhz=int(np.median(clocks)) if clocks else None,
    )
