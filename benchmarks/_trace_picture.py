"""The picture of a trace: what each multiprocessor of each rank did, and what crossed between."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from _trace import PRODUCTS, PULL, PUSH, Trace, bytes_over_time

# The forward and the backward are never in one picture.
COLOURS = {
    "share": "#577590",
    "wait for inputs": "#f94144",
    "dispatch": "#2a9d8f",
    PULL: "#00509d",
    "combine": "#e9c46a",
    PUSH: "#d00000",
    "finish": "#90be6d",
    "wait for sums": "#f9844a",
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
# communication warps (and all warps at the end) do. What is named later lies above.
PANELS = {
    "products": tuple(PRODUCTS.values()),
    "load waits": tuple(f"wait for {name}" for name in PRODUCTS.values()),
    "communication": (
        *("share", "wait for inputs", "dispatch", PULL, "combine", PUSH),
        *("finish", "wait for sums"),
    ),
}
NUM_BINS = 400


def flows(traces: Sequence[Trace], rank_bytes: Mapping[str, float]) -> np.ndarray:
    """GB/s into each rank over time, [R, NUM_BINS]: rows that it reads, sums that others send it.

    rank_bytes: of one rank, those of its PULL and of its PUSH, the latter to all others alike.
    """
    end_ns = max(int(trace.end_ns.max()) for trace in traces)
    pulled, pushed = (
        np.stack([bytes_over_time(t, kind, rank_bytes[kind], NUM_BINS, end_ns) for t in traces])
        for kind in (PULL, PUSH)
    )
    from_others = (pushed.sum(0) - pushed) / (len(traces) - 1)
    return (pulled + from_others) * NUM_BINS / end_ns


def draw(
    path: pathlib.Path,
    traces: Sequence[Trace],
    title: str,
    rank_bytes: Mapping[str, float] | None = None,
) -> None:
    """A panel for each rank and each of PANELS, in each a row a multiprocessor; time to the right.

    rank_bytes: adds a panel of `flows`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    shown = [name for name in COLOURS if any((t.kind == name).any() for t in traces)]
    num_rows = [len(np.unique(trace.multiprocessor)) for trace in traces]
    heights = [rows for rows in num_rows for _ in PANELS]
    if rank_bytes:
        heights.append(max(num_rows))
    figure, axes = plt.subplots(
        len(heights),
        sharex=True,
        figsize=(14, 2 + 0.025 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )
    places = iter(axes)
    end_us = max(float(trace.end_ns.max()) for trace in traces) / 1e3
    for rank, trace in enumerate(traces):
        for name, kinds in PANELS.items():
            of_rank = f"GPU {rank}, {name}" if len(traces) > 1 else name
            _draw_rows(next(places), trace, kinds, of_rank)
    if rank_bytes:
        panel = next(places)
        middles = (np.arange(NUM_BINS) + 0.5) * end_us / NUM_BINS
        for rank, rate in enumerate(flows(traces, rank_bytes)):
            panel.plot(middles, rate, label=f"into GPU {rank}")
        panel.set_ylabel("NVLink, GB/s")
        panel.legend(frameon=False)
    axes[0].set_title(title)
    axes[-1].set_xlim(0, end_us)
    axes[-1].set_xlabel("us since the first record")
    figure.legend(
        handles=[Patch(color=COLOURS[name], label=name) for name in shown],
        loc="outside lower center",
        ncols=min(len(shown), 8),
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_rows(panel: Any, trace: Trace, kinds: Sequence[str], name: str) -> None:
    from matplotlib.collections import PolyCollection

    row = np.unique(trace.multiprocessor, return_inverse=True)[1]
    for kind in kinds:
        mine = trace.kind == kind
        left, right, top = trace.start_ns[mine] / 1e3, trace.end_ns[mine] / 1e3, row[mine]
        # One collection a kind: a patch a record would take minutes.
        xs = np.stack([left, right, right, left], axis=1)
        ys = np.stack([top, top, top + 1, top + 1], axis=1)
        boxes = PolyCollection(list(np.stack([xs, ys], axis=2)), facecolors=COLOURS[kind])
        boxes.set_linewidth(0)
        panel.add_collection(boxes)
    panel.set_ylim(row.max() + 1, 0)
    panel.set_ylabel(f"{name}\nmultiprocessor")
