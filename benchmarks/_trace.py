"""What the trace of a pass says: its records decoded, brought to one time axis, and summed up."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jax_megamoe._call_arrays import TRAFFIC_RECORDS

# Kinds of a record: the parts of cuda/shared/part.h, and what cuda/shared/trace.h has besides.
WAIT = 16
OF_PEER = 1024
SHARE = 2048
PRODUCTS = {
    2: "gate_up",
    4: "down",
    32: "dgrad_down",
    64: "dgrad_gate_up",
    128: "wgrad_down",
    256: "wgrad_gate_up",
}
WAIT_FOR_INPUTS = "wait for inputs"
PULL, PUSH = "dispatch from peers", "combine for peers"
KINDS = {
    SHARE: "share",
    WAIT | SHARE: WAIT_FOR_INPUTS,
    1: "dispatch",
    OF_PEER | 1: PULL,
    8: "combine",
    OF_PEER | 8: PUSH,
    512: "finish",
    WAIT | 512: "wait for sums",
    **PRODUCTS,
    **{WAIT | part: f"wait for {name}" for part, name in PRODUCTS.items()},
}


@dataclasses.dataclass(frozen=True)
class Trace:
    """One entry a record, ordered by start.

    start_ns, end_ns: int64, from the first start of the trace. multiprocessor: int64. kind: a value
    of KINDS each.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    multiprocessor: np.ndarray
    kind: np.ndarray


def decode(records: np.ndarray, num_ranks: int = 1) -> Trace:
    """A trace from the records of a rank's call with trace=True, int32 [1 + capacity, 4] and, with
    several ranks, what _traffic.py reads.

    Raises:
      ValueError: when nothing was recorded, records did not fit, or a kind is unknown.
    """
    words = np.ascontiguousarray(records).view(np.uint32)
    count, capacity = int(words[0, 0]), len(words) - 1 - TRAFFIC_RECORDS * (num_ranks > 1)
    if not 0 < count <= capacity:
        raise ValueError(f"the trace counts {count} records; it may hold 1 to {capacity}")
    start, end, multiprocessor, kind = words[1 : 1 + count].T
    # The low words of a 64-bit clock: differences of up to 2 s come out right over their wrap.
    start_ns = (start - start[0]).view(np.int32).astype(np.int64)
    end_ns = start_ns + (end - start).astype(np.int64)
    first, order = start_ns.min(), np.argsort(start_ns, kind="stable")
    unknown = sorted(set(kind.tolist()) - set(KINDS))
    if unknown:
        raise ValueError(f"the trace has records of the unknown kinds {unknown}")
    return Trace(
        start_ns=(start_ns - first)[order],
        end_ns=(end_ns - first)[order],
        multiprocessor=multiprocessor[order].astype(np.int64),
        kind=np.array([KINDS[k] for k in kind.tolist()])[order],
    )


def summary(trace: Trace) -> list[dict[str, object]]:
    """One line a kind: its records, when they ran, and their time on an average multiprocessor.

    Several warps of a multiprocessor dispatch and combine at a time: their times add up.
    """
    num_multiprocessors = len(np.unique(trace.multiprocessor))
    lines = []
    for name in KINDS.values():
        mine = trace.kind == name
        if not mine.any():
            continue
        lasted = (trace.end_ns - trace.start_ns)[mine]
        lines.append(
            {
                "kind": name,
                "num_records": int(mine.sum()),
                "first_start_us": round(float(trace.start_ns[mine].min()) / 1e3, 1),
                "last_end_us": round(float(trace.end_ns[mine].max()) / 1e3, 1),
                "us_a_record": round(float(lasted.mean()) / 1e3, 2),
                "us_a_multiprocessor": round(float(lasted.sum()) / 1e3 / num_multiprocessors, 1),
            }
        )
    return lines


def decode_ranks(records: np.ndarray, num_ranks: int) -> list[Trace]:
    """A trace for each rank, on one time axis, from the records of all, int32 [R, ..., 4] or those
    of each behind one another.

    Raises:
      ValueError: as `decode` and `align`.
    """
    return align([decode(of_rank) for of_rank in records.reshape(num_ranks, -1, 4)])


def align(traces: Sequence[Trace]) -> list[Trace]:
    """The traces of ranks, shifted so that their waits for each other's inputs end together.

    The clocks of two GPUs need not agree. These waits do, to about a microsecond: each ends when
    the flags of all ranks have come, those of the last one within the latency of a store to a peer.

    Raises:
      ValueError: a rank of several has no such wait.
    """
    if len(traces) == 1:
        return list(traces)
    ends = []
    for rank, trace in enumerate(traces):
        waits = trace.end_ns[trace.kind == WAIT_FOR_INPUTS]
        if not waits.size:
            raise ValueError(f"the trace of rank {rank} has no {WAIT_FOR_INPUTS}")
        ends.append(int(waits.max()))
    shifts = [max(ends) - end for end in ends]
    return [
        dataclasses.replace(trace, start_ns=trace.start_ns + by, end_ns=trace.end_ns + by)
        for trace, by in zip(traces, shifts, strict=True)
    ]


def overlap(trace: Trace) -> dict[str, float]:
    """Of the time of each kind of transfer, the part between the first and the last product."""
    products = np.isin(trace.kind, list(PRODUCTS.values()))
    if not products.any():
        return {}
    first, last = trace.start_ns[products].min(), trace.end_ns[products].max()
    found = {}
    for name in (PULL, PUSH):
        mine = trace.kind == name
        if not mine.any():
            continue
        start, end = trace.start_ns[mine], trace.end_ns[mine]
        inside = np.clip(np.minimum(end, last) - np.maximum(start, first), 0, None)
        found[name] = round(float(inside.sum() / max(1, (end - start).sum())), 4)
    return found


def bytes_over_time(
    trace: Trace, kind: str, num_bytes: float, num_bins: int, end_ns: int
) -> np.ndarray:
    """Bytes of a kind of transfer in each of the equal bins of [0, end_ns], float64 [num_bins].

    All records of the kind are taken to have moved as much, evenly while they lasted.
    """
    edges = np.linspace(0, end_ns, num_bins + 1)
    mine = trace.kind == kind
    start, end = trace.start_ns[mine], np.maximum(trace.end_ns[mine], trace.start_ns[mine] + 1)
    moved = np.clip((edges[:, None] - start) / (end - start), 0, 1).sum(1)
    return np.diff(moved) * num_bytes / max(1, mine.sum())
