"""The trace of a pass: how it is decoded, and that its kinds are those of the kernels."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_shapes, _trace, _trace_picture, timeline = map(
    importlib.import_module, "_shapes _trace _trace_picture timeline".split()
)


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
    colours, panels = _trace_picture.COLOURS, _trace_picture.PANELS
    assert set(colours) == set(_trace.KINDS.values())
    assert {name for kinds in panels.values() for name in kinds} == set(colours)


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
    others = _trace.WAIT | _trace.OF_PEER | _trace.SHARE
    names = {bit: name for bit, name in _trace.KINDS.items() if not bit & others}
    assert {bit: name.replace("_", "") for bit, name in names.items()} == {
        bit: name.lower() for bit, name in parts.items()
    }
    header = (ROOT / "cuda" / "shared" / "trace.h").read_text()
    found = dict(re.findall(r"constexpr uint32_t kTrace(\w+) = (\d+);", header))
    of_trace = {"Wait": _trace.WAIT, "OfPeer": _trace.OF_PEER, "Share": _trace.SHARE}
    assert found == {name: str(bit) for name, bit in of_trace.items()}


def of_two_ranks() -> np.ndarray:
    """Records of two GPUs whose clocks are 10^6 apart. Rank 1 comes to the call 400 ns after rank
    0, which waits for it; products from 600 to 1000, rows from the peer at their beginning, sums to
    it at their end, the last 100 ns of them behind the products."""
    share, wait = _trace.SHARE, _trace.SHARE | _trace.WAIT
    pull, push, products = _trace.OF_PEER | 1, _trace.OF_PEER | 8, 2
    ranks = []
    for clock, begins in ((5, 0), (10**6, 400)):
        times = (
            (begins, begins + 50, share),
            (begins + 50, 450, wait),
            (500, 700, pull),
            (600, 1000, products),
            (900, 1100, push),
        )
        ranks.append(trace_of(*((clock + a, clock + b, 0, kind) for a, b, kind in times)))
    return np.concatenate(ranks)


def test_ranks_come_to_one_time_axis() -> None:
    first, second = _trace.decode_ranks(of_two_ranks(), 2)
    assert first.start_ns.tolist() == [0, 50, 500, 600, 900]
    assert second.start_ns.tolist() == [400, 450, 500, 600, 900]
    assert second.end_ns.tolist() == [450, 450, 700, 1000, 1100]
    assert [_trace.overlap(t) for t in (first, second)] == [
        {_trace.PULL: 0.5, _trace.PUSH: 0.5}
    ] * 2
    (alone,) = _trace.decode_ranks(trace_of((7, 9, 1, 4)), 1)
    assert alone.start_ns.tolist() == [0] and _trace.overlap(alone) == {}
    without_wait = np.concatenate([trace_of((7, 9, 1, 4))] * 2)
    with pytest.raises(ValueError, match="rank 0 has no wait for inputs"):
        _trace.decode_ranks(without_wait, 2)


def test_bytes_flow_while_their_records_last() -> None:
    traces = _trace.decode_ranks(of_two_ranks(), 2)
    found = _trace.bytes_over_time(traces[0], _trace.PULL, 600.0, 11, 1100)
    np.testing.assert_allclose(found, [0, 0, 0, 0, 0, 300, 300, 0, 0, 0, 0])
    rank_bytes = {_trace.PULL: 600.0, _trace.PUSH: 1200.0}
    rates = _trace_picture.flows([*traces[:1], shifted_pushes(traces[1])], rank_bytes)
    moved = rates * 1100 / _trace_picture.NUM_BINS
    np.testing.assert_allclose(moved.sum(1), 1800)
    # What rank 1 sends between 700 and 900 comes to rank 0.
    inside = np.arange(1, 1 + _trace_picture.NUM_BINS) * 1100 <= 900 * _trace_picture.NUM_BINS
    assert moved[0, inside].sum() > 1780 and moved[1, inside].sum() == pytest.approx(600)


def shifted_pushes(trace: Any) -> Any:
    """The trace with what goes to the peer 200 ns earlier."""
    by = np.where(trace.kind == _trace.PUSH, -200, 0)
    return dataclasses.replace(trace, start_ns=trace.start_ns + by, end_ns=trace.end_ns + by)


@pytest.mark.parametrize("pass_name", timeline.PASSES)
@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_calls_of_a_timeline_end_in_the_records_of_each_rank(
    pass_name: str, save: str, ranks: int
) -> None:
    """What the program would call on GPUs, by its types."""
    shape = _shapes.Shape("tiny", T=96, K=2, E=4, H=64, I=64, R=ranks)
    mesh = timeline.expert_mesh(2) if ranks > 1 else None
    keep = save == "gate_up"
    arrays = _shapes.inputs(shape, "bf16")
    forward = timeline.kernel(shape, mesh, "forward", keep, trace=False)
    results = jax.eval_shape(forward, *arrays)
    if pass_name == "backward":
        arrays = [arrays[0], *arrays, *results[2:]]
    plain, traced = (
        jax.eval_shape(timeline.kernel(shape, mesh, pass_name, keep, trace=t), *arrays)
        for t in (False, True)
    )
    assert [r.shape for r in plain] == [r.shape for r in traced[:-1]]
    assert plain[0].shape == (ranks * 96, 64)
    records = traced[-1].shape
    assert records[0] % ranks == 0 and records[1] == 4
    moved = timeline.transferred(shape, pass_name)
    assert (moved is None) == (ranks == 1)
