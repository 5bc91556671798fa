"""The record of a run: its CSV, its loss curve, its sample."""

import csv
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402 - after the backend is chosen


class Row(NamedTuple):
    """One step; `held_out_loss` is None on the steps without an evaluation.

    Losses are in nats per byte; `imbalance` is the busiest expert's load over the mean.
    """

    step: int
    train_loss: float
    held_out_loss: float | None
    tokens_per_s: float
    imbalance: float


def write_csv(fields: Sequence[str], rows: Iterable[Sequence[object]], path: pathlib.Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        writer.writerows(rows)


def write_curve(rows: list[Row], entropy: float, path: pathlib.Path) -> None:
    """Draws training and held-out loss over steps, with the unigram entropy as a line."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([row.step for row in rows], [row.train_loss for row in rows], label="training", lw=1)
    held_out = [(row.step, row.held_out_loss) for row in rows if row.held_out_loss is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", label="held out", ms=4)
    axes.axhline(entropy, ls="--", color="grey", label="unigram entropy of the held-out bytes")
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def as_text(sample: list[int]) -> str:
    """Bytes as text; what is not UTF-8 or not printable shows as a replacement character."""
    text = bytes(sample).decode("utf-8", errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
