"""A run as it goes: its record, progress bar and TensorBoard, and the loss of what is held out."""

import math
import time

import jax
import numpy as np
from lm.terminal import UsageError
from qwen3 import data, report
from qwen3.processes import Placing
from tqdm import tqdm

from jax_megamoe.models import flops, training
from jax_megamoe.models.qwen3_moe import Qwen3Moe
from jax_megamoe.models.training_config import TrainingConfig


class Run:
    """A step is recorded when the next one has been given to the devices: they need not wait."""

    def __init__(
        self,
        config: TrainingConfig,
        devices: np.ndarray,
        rows: list[report.Row],
        board: report.TensorBoard,
        bar: tqdm,
    ) -> None:
        self._config, self._rows, self._board, self._bar = config, rows, board, bar
        self._num_devices = devices.size
        self._peak = flops.peak_flops(devices.flat[0].device_kind)
        self._held_out = next(
            (row.held_out_loss for row in reversed(rows) if row.held_out_loss is not None), None
        )
        self._since = time.perf_counter()

    def record(self, step: int, metrics: training.StepMetrics, of_step: float) -> None:
        """Waits for the step; `of_step`: its FLOPs.

        Raises:
          UsageError: its loss is not finite.
        """
        loss, norm, load = jax.device_get(metrics)
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        per_device = 1 / (seconds * self._num_devices)
        imbalance = load.max(axis=1) / np.maximum(load.mean(axis=1), 1)
        row = report.Row(
            step=step,
            loss=float(loss),
            held_out_loss=None,
            gradient_norm=float(norm),
            tokens_per_s_device=self._config.batch * self._config.seq * per_device,
            mfu=None if self._peak is None else of_step * per_device / self._peak,
            imbalance=[float(value) for value in imbalance],
        )
        self._rows.append(row)
        self._board.add(row)
        self._show()
        self._bar.update()
        self._check("the loss", row.loss)

    def record_held_out(self, loss: float) -> None:
        """Of the step that was recorded last; its time is that of no step.

        Raises:
          UsageError: it is not finite.
        """
        self._held_out = loss
        self._rows[-1] = self._rows[-1]._replace(held_out_loss=loss)
        self._board.add_held_out(self._rows[-1])
        self._show()
        self._since = time.perf_counter()
        self._check("the held-out loss", loss)

    def _show(self) -> None:
        row = self._rows[-1]
        held_out = "" if self._held_out is None else f", held out {self._held_out:.3f}"
        of_peak = "" if row.mfu is None else f", MFU {row.mfu:.1%}"
        rate = f"{row.tokens_per_s_device:,.0f} tokens/s a device"
        self._bar.set_postfix_str(f"loss {row.loss:.3f}{held_out}, {rate}{of_peak}", refresh=False)

    def _check(self, what: str, loss: float) -> None:
        if not math.isfinite(loss):
            step = self._rows[-1].step
            raise UsageError(f"{what} became {loss} at step {step}; try a lower --learning-rate.")


class HeldOut:
    """The part of the text that is held out, and the model's loss of it."""

    def __init__(self, text: data.Text, config: TrainingConfig, place: Placing) -> None:
        self._text, self._config, self._place = text, config, place

    def loss(self, model: Qwen3Moe) -> float:
        """Mean over all of its tokens, in nats, but each document's first; waits for it."""
        sizes = (self._config.batch, self._config.seq)
        found = [
            training.evaluate(model, self._place(*rows), self._config)
            for rows in data.held_out_batches(self._text, *sizes)
        ]
        found = jax.device_get(found)
        return sum(float(of.nll) for of in found) / sum(int(of.num_targets) for of in found)
