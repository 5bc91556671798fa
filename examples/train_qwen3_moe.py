"""Trains a Qwen3-MoE on packed text: experts over some devices, all else stored split (FSDP).

    python examples/train_qwen3_moe.py --config examples/qwen3/small.toml  # minutes on a CPU
    python examples/train_qwen3_moe.py --config examples/qwen3/small.toml --devices 4 \\
        --expert-parallel 2
    python examples/train_qwen3_moe.py --model qwen3-30b-a3b --layers 4 --expert-parallel 8 \\
        --batch 64 --dataset Salesforce/wikitext,wikitext-103-raw-v1 --tokenizer Qwen/Qwen3-30B-A3B

With the package and its extra `examples` installed; from the checkout, with it on PYTHONPATH. The
packages datasets, transformers and tensorboardX, of the extra `text`, are needed by the options
that say so alone. --moe jax takes the layer's reference in plain JAX and changes nothing else.

Writes run.csv and run.png below --out, and run.json, which `python -m jax_megamoe.compare --config`
takes. Ctrl-C stops after the step in progress; with --checkpoint it saves that step too, and
--resume gives what an uninterrupted run would have, bit for bit.
"""

import argparse
import contextlib
import hashlib
import json
import math
import pathlib
import sys
import time

import jax
import numpy as np
from lm.checkpoint import CheckpointError, Checkpoints, Settings
from lm.data import DataError
from lm.terminal import INTERRUPTED, StopRequest, UsageError, simulate_devices
from qwen3 import data, report
from tqdm import tqdm

from jax_megamoe.models import flops, training
from jax_megamoe.models.training_config import (
    TrainingConfig,
    add_arguments,
    from_arguments,
    to_dict,
)

# Fields that may change between a run and what goes on with it: the bits are then others.
MAY_CHANGE = ("data_parallel", "fsdp", "expert_parallel")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=pathlib.Path, default=pathlib.Path("out"), help="where to write (./out)")
    add("--devices", type=int, help="simulate that many CPU devices")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--data", help="a file or a directory (default: Python's standard library)")
    text.add_argument("--dataset", metavar="NAME[,CONFIG]", help="of Hugging Face; needs datasets")
    add("--text-field", default="text", help="of a row of --dataset (%(default)s)")
    add("--tokenizer", default=data.BYTES, help="bytes, or a Hugging Face model's: transformers")
    add("--most-tokens", type=int, default=10**9, help="of the text (%(default)s)")
    kept = "a .npy file that keeps the tokens for other runs, which then read no text"
    add("--tokens", type=pathlib.Path, help=kept)
    add("--checkpoint", type=pathlib.Path, help="a folder to save the run in")
    add("--checkpoint-every", type=int, default=100, help="steps between two (%(default)s)")
    add("--resume", action="store_true", help="go on with the run that --checkpoint holds, if any")
    add("--tensorboard", action="store_true", help="write OUT/tensorboard; needs tensorboardX")
    add_arguments(parser)
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    for name in ("most_tokens", "checkpoint_every"):
        if (value := getattr(args, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, but it is {value}.")
    if args.resume and args.checkpoint is None:
        raise UsageError("--resume needs --checkpoint, the folder of the run to go on with.")
    if args.tokens is not None and args.tokens.suffix != ".npy":
        raise UsageError(f"--tokens must end in .npy, but it is {args.tokens}.")
    if args.tensorboard:
        data.need_package("tensorboardX", "--tensorboard")


def load_text(args: argparse.Namespace, config: TrainingConfig) -> data.Text:
    tokenizer = data.load_tokenizer(args.tokenizer)
    if tokenizer.size > config.model.vocab_size:
        raise UsageError(
            f"--tokenizer {args.tokenizer} has {tokenizer.size} tokens, but the model's vocab_size"
            f" is {config.model.vocab_size}."
        )
    texts, source = data.documents(args.data, args.dataset, args.text_field)
    return data.load_text(texts, source, tokenizer, args.most_tokens, args.tokens)


class Run:
    """The record of a run as it goes: rows, progress bar, TensorBoard.

    A step is recorded when the next one has been given to the devices, so that they need not wait.
    """

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
            gradient_norm=float(norm),
            tokens_per_s_device=self._config.batch * self._config.seq * per_device,
            mfu=None if self._peak is None else of_step * per_device / self._peak,
            imbalance=[float(value) for value in imbalance],
        )
        self._rows.append(row)
        self._board.add(row)
        of_peak = "" if row.mfu is None else f", MFU {row.mfu:.1%}"
        rate = f"{row.tokens_per_s_device:,.0f} tokens/s a device"
        self._bar.set_postfix_str(f"loss {row.loss:.3f}, {rate}{of_peak}", refresh=False)
        self._bar.update()
        if not math.isfinite(row.loss):
            raise UsageError(
                f"the loss became {row.loss} at step {step}; try a lower --learning-rate."
            )


def train(
    args: argparse.Namespace,
    config: TrainingConfig,
    text: data.Text,
    mesh: jax.sharding.Mesh,
    checkpoints: Checkpoints | None,
    rows: list[report.Row],
) -> None:
    """Runs the steps under the mesh that is set, until Ctrl-C at most; appends a row for each.

    Raises:
      UsageError: the loss is not finite; `rows` then ends with that step.
    """
    model, optimizer = training.create(config)
    if checkpoints:
        rows += [report.Row(*row) for row in checkpoints.restore(model, optimizer)]
    sharding = jax.NamedSharding(mesh, training.BATCH_SPEC)

    def make(step: int) -> tuple[training.Batch, float]:
        """A step's batch, and its FLOPs."""
        tokens = data.rows_of_step(text, config.seed, step, config.batch, config.seq)
        ids = data.segment_ids(tokens, text.end)
        pairs = flops.attended_pairs(ids[:, :-1])
        of_step = flops.step_flops(config.model, config.batch * config.seq, pairs)
        parts = (a.reshape(config.microbatches, -1, config.seq + 1) for a in (tokens, ids))
        # New arrays each time: on a CPU the devices may use the memory of these.
        return training.Batch(*jax.device_put(tuple(parts), sharding)), of_step

    steps = range(len(rows) + 1, config.steps + 1)
    folder = args.out / "tensorboard" if args.tensorboard else None
    with (
        report.TensorBoard(folder, steps.start) as board,
        StopRequest() as stop,
        contextlib.closing(data.prefetch(make, steps)) as batches,
        tqdm(total=config.steps, initial=len(rows), unit="step", mininterval=1.0) as bar,
    ):
        run = Run(config, mesh.devices, rows, board, bar)
        given = None
        for step, (batch, of_step) in zip(steps, batches, strict=True):
            metrics = training.train_step(model, optimizer, batch, config)
            if given is not None:
                run.record(*given)
            given = (step, metrics, of_step)
            is_last = step == config.steps or stop.asked
            if is_last or (checkpoints and checkpoints.is_time(step)):
                run.record(*given)
                given = None
                if checkpoints:
                    checkpoints.save(step, model, optimizer, rows, is_last)
            if is_last:
                break


def settings_of(args: argparse.Namespace, config: TrainingConfig, text: data.Text) -> Settings:
    """What a run must share with the one that it goes on with."""
    fields = {name: value for name, value in to_dict(config).items() if name not in MAY_CHANGE}
    tokens = hashlib.sha256(np.ascontiguousarray(text.tokens).data).hexdigest()
    return {**fields, "tokenizer": args.tokenizer, "sha256 of the tokens": tokens}


def run(args: argparse.Namespace) -> int:
    """Trains, reports, writes the files; the exit status."""
    check_arguments(args)
    try:
        config = from_arguments(args)
        simulate_devices(args.devices)
        mesh = training.make_mesh(config)
        model = config.model
        sizes = {
            "H": model.hidden_size,
            "I": model.moe_intermediate_size,
            "R": config.expert_parallel,
        }
        experts = training.experts_run_on(config.experts, **sizes)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"{error}.") from error
    text = load_text(args, config)
    data.rows_of_step(text, config.seed, 1, 1, config.seq)  # refuses a text that is too short
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {args.out} cannot be made a directory: {error}.") from error
    (args.out / "run.json").write_text(json.dumps(to_dict(config), indent=2) + "\n")
    print(
        f"text: {text.source}, {len(text.tokens):,} tokens\n"
        f"mesh: {dict(mesh.shape)} on {jax.devices()[0].device_kind}, {config.precision}\n"
        f"experts: {experts}",
        flush=True,
    )
    rows: list[report.Row] = []
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if args.checkpoint is not None:
            how = (args.checkpoint_every, settings_of(args, config, text), args.resume)
            checkpoints = stack.enter_context(
                Checkpoints(args.checkpoint, *how, in_background=True)
            )
            print(f"checkpoints: {args.checkpoint}, from step {(checkpoints.latest or 0) + 1} on")
        stack.enter_context(jax.set_mesh(mesh))
        try:
            train(args, config, text, mesh, checkpoints, rows)
        finally:
            if rows:  # a run that never began leaves an earlier one's files alone
                report.write(rows, args.out)
                print(f"written: {args.out}/run.csv, {args.out}/run.png")
    if len(rows) < config.steps:
        print(f"interrupted after {len(rows)} of {config.steps} steps")
        return INTERRUPTED
    print(f"loss of the last step: {rows[-1].loss:.4f} nats per token")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        return run(args)
    except (UsageError, DataError, CheckpointError) as error:
        print(f"train_qwen3_moe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_qwen3_moe: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
