"""What the trace of a pass says: its records decoded, summed up, and drawn."""

import dataclasses
import pathlib

import numpy as np

from jax_megamoe.memory import TRAFFIC_RECORDS

# Kinds of a record: the parts of cuda/shared/part.h, and cuda/shared/trace.h's wait before those
# that multiply.
WAIT = 16
PRODUCTS = {
    2: "gate_up",
    4: "down",
    32: "dgrad_down",
    64: "dgrad_gate_up",
    128: "wgrad_down",
    256: "wgrad_gate_up",
}
KINDS = {
    1: "dispatch",
    8: "combine",
    512: "finish",
    **PRODUCTS,
    **{WAIT | part: f"wait for {name}" for part, name in PRODUCTS.items()},
}
# The forward and the backward are never in one picture.
COLOURS = {
    "dispatch": "#2a9d8f",
    "combine": "#e9c46a",
    "finish": "#90be6d",
    "gate_up": "#355070",
    "down": "#8d99ae",
    "dgrad_down": "#355070",
    "dgrad_gate_up": "#8d99ae",
    "wgrad_down": "#6d597a",
    "wgrad_gate_up": "#b5a2c8",
    "wait for gate_up": "#d1495b",
    "wait for down": "#f08080",
    "wait for dgrad_down": "#d1495b",
    "wait for dgrad_gate_up": "#f08080",
    "wait for wgrad_down": "#f4a261",
    "wait for wgrad_gate_up": "#9d4edd",
}
# Panels of the picture: what the warps that multiply do, what the load warp waited for, what the
# communication warps (and all warps at the end) do.
PANELS = {
    "products": tuple(PRODUCTS.values()),
    "load waits": tuple(f"wait for {name}" for name in PRODUCTS.values()),
    "communication": ("dispatch", "combine", "finish"),
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


def draw(path: pathlib.Path, trace: Trace, title: str) -> None:
    """A panel for each of PANELS, in each a row a multiprocessor; time to the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    shown = [name for name in COLOURS if (trace.kind == name).any()]
    row = np.unique(trace.multiprocessor, return_inverse=True)[1]
    figure, axes = plt.subplots(
        len(PANELS), sharex=True, figsize=(14, 2 + 0.075 * int(row.max() + 1)), layout="constrained"
    )
    for panel, (panel_name, kinds) in zip(axes, PANELS.items(), strict=True):
        for name in kinds:
            mine = trace.kind == name
            left, right, top = trace.start_ns[mine] / 1e3, trace.end_ns[mine] / 1e3, row[mine]
            # One collection a kind: a patch a record would take minutes.
            xs = np.stack([left, right, right, left], axis=1)
            ys = np.stack([top, top, top + 1, top + 1], axis=1)
            boxes = PolyCollection(list(np.stack([xs, ys], axis=2)), facecolors=COLOURS[name])
            boxes.set_linewidth(0)
            panel.add_collection(boxes)
        panel.set_xlim(0, trace.end_ns.max() / 1e3)
        panel.set_ylim(row.max() + 1, 0)
        panel.set_ylabel(f"{panel_name}\nmultiprocessor")
    axes[0].set_title(title)
    axes[-1].set_xlabel("us since the first record")
    figure.legend(
        handles=[Patch(color=COLOURS[name], label=name) for name in shown],
        loc="outside lower center",
        ncols=len(shown),
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
