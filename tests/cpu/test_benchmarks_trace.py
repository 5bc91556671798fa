"""The trace of a pass: how it is decoded, and that its kinds are those of the kernels."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_trace = importlib.import_module("_trace")


def trace_of(*records: tuple[int, int, int, int], capacity: int = 8) -> np.ndarray:
    words = np.zeros((1 + capacity, 4), np.uint32)
    words[0, 0] = len(records)
    words[1 : 1 + len(records)] = np.reshape(records[:capacity], (-1, 4)) % 2**32
    return words.view(np.int32)


def test_trace_is_ordered_and_survives_the_wrap_of_its_clock() -> None:
    wrap = 2**32
    trace = _trace.decode(
        trace_of((wrap + 5, wrap + 9, 1, 4), (wrap - 10, wrap + 2, 0, 2), (wrap, wrap + 4, 0, 18))
    )
    assert trace.start_ns.tolist() == [0, 10, 15] and trace.end_ns.tolist() == [12, 14, 19]
    assert trace.multiprocessor.tolist() == [0, 0, 1]
    assert trace.kind.tolist() == ["gate_up", "wait for gate_up", "down"]
    lines = {line["kind"]: line for line in _trace.summary(trace)}
    assert list(lines) == ["gate_up", "down", "wait for gate_up"]
    assert lines["gate_up"]["num_records"] == 1 and lines["down"]["last_end_us"] == 0.0
    assert set(_trace.COLOURS) == set(_trace.KINDS.values())
    assert {name for kinds in _trace.PANELS.values() for name in kinds} == set(_trace.COLOURS)


def test_a_trace_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="counts 0 records"):
        _trace.decode(trace_of())
    with pytest.raises(ValueError, match="counts 3 records; it may hold 1 to 2"):
        _trace.decode(trace_of(*[(0, 1, 0, 1)] * 3, capacity=2))
    with pytest.raises(ValueError, match=r"unknown kinds \[3\]"):
        _trace.decode(trace_of((0, 1, 0, 3)))


def test_trace_kinds_are_those_of_the_kernel() -> None:
    """The names and bits of cuda/shared/part.h and trace.h."""
    header = (ROOT / "cuda" / "shared" / "part.h").read_text()
    parts = {int(bit): name for name, bit in re.findall(r"k(\w+) = (\d+),", header)}
    names = {bit: name for bit, name in _trace.KINDS.items() if not bit & _trace.WAIT}
    assert {bit: name.replace("_", "") for bit, name in names.items()} == {
        bit: name.lower() for bit, name in parts.items()
    }
    wait = f"kTraceWait = {_trace.WAIT};"
    assert wait in (ROOT / "cuda" / "shared" / "trace.h").read_text()
