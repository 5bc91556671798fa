"""What is left of a run: its CSV, its curves, and what TensorBoard shows."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from lm.report import pyplot, write_csv
from qwen3.data import need_package


class Row(NamedTuple):
    """A step. Rates are of the time since the step before it was done: with what was saved
    between them, and of a process's first step with the compilation.

    Attributes:
      loss: in nats per token.
      gradient_norm: before it is clipped.
      tokens_per_s_device: of one device.
      mfu: share of the devices' bf16 peak; None where that is not known.
      imbalance: of each layer with experts, the busiest expert's load over the mean.
    """

    step: int
    loss: float
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
    loss.plot(steps, [row.loss for row in rows], lw=1)
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
        if self._writer is None:
            return
        for name, value in scalars(row).items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, row.step)
