"""What is left of a run: its CSV, its curves, and what TensorBoard shows."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from lm.report import pyplot, write_csv
from qwen3.data import need_package


class Row(NamedTuple):
    """A step. Rates are of the time since the step before it was done: with what was saved
    between them, but not with what was held out, and of a process's first step with the
    compilation.

    Attributes:
      loss: in nats per token.
      held_out_loss: behind the step; None where it was not computed.
      gradient_norm: before it is clipped.
      tokens_per_s_device: of one device.
      mfu: share of the devices' bf16 peak; None where that is not known.
      imbalance: of each layer with experts, the busiest expert's load over the mean.
    """

    step: int
    loss: float
    held_out_loss: float | None
    gradient_norm: float
    tokens_per_s_device: float
    mfu: float | None
    imbalance: list[float]


def scalars(row: Row) -> dict[str, Any]:
    """By name, as the CSV has them; layers with experts are counted from 0."""
    of_layers = {f"imbalance_{n}": value for n, value in enumerate(row.imbalance)}
    return row._asdict() | {"imbalance": float(np.mean(row.imbalance))} | of_layers


def write(rows: Sequence[Row], out: pathlib.Path) -> None:
    """run.csv and run.png."""
    table = [scalars(row) for row in rows]
    write_csv(list(table[0]), [list(row.values()) for row in table], out / "run.csv")
    steps = [row.step for row in rows]
    figure, (loss, rate, load) = pyplot.subplots(
        3, sharex=True, figsize=(8, 9), layout="constrained"
    )
    loss.plot(steps, [row.loss for row in rows], lw=1, label="training")
    held_out = [(row.step, row.held_out_loss) for row in rows if row.held_out_loss is not None]
    if held_out:
        loss.plot(*zip(*held_out, strict=True), "o-", ms=4, label="held out")
        loss.legend()
    loss.set_ylabel("nats per token")
    rate.plot(steps, [row.tokens_per_s_device for row in rows], lw=1)
    rate.set_ylabel("tokens/s of a device")
    imbalance = np.array([row.imbalance for row in rows])
    colors = pyplot.get_cmap("viridis")(np.linspace(0, 1, imbalance.shape[1]))
    for n, color in enumerate(colors):
        load.plot(steps, imbalance[:, n], lw=1, color=color, label=f"{n}")
    load.set(ylabel="busiest expert over mean,\nby layer, first one dark", xlabel="step")
    figure.savefig(out / "run.png", dpi=120)
    pyplot.close(figure)


class TensorBoard:
    """Writes each row for TensorBoard; does nothing without a folder.

    Raises:
      DataError: the package tensorboardX is not installed.
    """

    def __init__(self, folder: pathlib.Path | None, first_step: int) -> None:
        self._writer: Any = None
        if folder is not None:
            package = need_package("tensorboardX", "--tensorboard")
            self._writer = package.SummaryWriter(str(folder), purge_step=first_step)

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, row: Row) -> None:
        self._add(row, {name: value for name, value in scalars(row).items() if name != "step"})

    def add_held_out(self, row: Row) -> None:
        """Of a row that was added without it."""
        self._add(row, {"held_out_loss": row.held_out_loss})

    def _add(self, row: Row, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if self._writer is not None and value is not None:
                self._writer.add_scalar(name, value, row.step)
