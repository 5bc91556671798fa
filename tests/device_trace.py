"""What a profile of a step says of host and device between two kernels.

A step that synchronises between two layers makes the device wait for the host: a copy to the host
starts, or a wait of the host ends, after the first layer's kernel has begun and before the last
layer's kernel does.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

COPY_TO_HOST = re.compile(r"Memcpy ?D(to|2)H", re.IGNORECASE)
# The driver's and the runtime's calls that wait: cuStreamSynchronize, cuMemcpyDtoH_v2 and so on.
WAIT = re.compile(r"^cu(da)?(\w+Synchronize|MemcpyDtoH(_v2)?|Memcpy)(_ptsz|_ptds)?$")


class Event(NamedTuple):
    name: str
    start_ns: float
    end_ns: float


class Trace(NamedTuple):
    on_device: list[Event]
    on_host: list[Event]


def record(run: Callable[[], Any], folder: Path) -> Trace:
    """The events of `run`, which must wait for its own work; AssertionError for no trace."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        run()
    files = list(folder.rglob("*.xplane.pb"))
    assert len(files) == 1, f"the profiler wrote {files}"
    return read(jax.profiler.ProfileData.from_file(str(files[0])).planes)


def read(planes: Iterable[Any]) -> Trace:
    """Sorts the profile's planes; on a device only its streams are what it did."""
    trace = Trace([], [])
    for plane in planes:
        is_device = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            if is_device and not line.name.startswith("Stream"):
                continue
            events = trace.on_device if is_device else trace.on_host
            events += [Event(e.name, e.start_ns, e.start_ns + e.duration_ns) for e in line.events]
    return trace


def synchronisations(trace: Trace, kernel: str, count: int) -> list[Event]:
    """Copies to the host and waits of the host between the first and the last of the kernels.

    Args:
      kernel: part of the kernel's name. count: how many of them the trace must hold.
    """
    kernels = sorted(e.start_ns for e in trace.on_device if kernel in e.name)
    names = sorted({e.name for e in trace.on_device})
    assert len(kernels) == count, f"{len(kernels)} of {count} kernels in the trace: {names}"
    first, last = kernels[0], kernels[-1]
    copies = [e for e in trace.on_device if COPY_TO_HOST.search(e.name)]
    waits = [e for e in trace.on_host if WAIT.search(e.name)]
    return [e for e in copies if first <= e.start_ns < last] + [
        e for e in waits if first < e.end_ns <= last
    ]
