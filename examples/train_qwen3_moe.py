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
takes. The end of the text is held out: its loss is computed now and then. Ctrl-C stops after the
step in progress, with several processes one step later; with --checkpoint it saves that step too,
and --resume gives what an uninterrupted run would have, bit for bit. --weights starts from a
checkpoint of Hugging Face, --export leaves one.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from lm.checkpoint import CheckpointError, Checkpoints, Settings
from lm.data import DataError
from lm.terminal import INTERRUPTED, StopRequest, UsageError, simulate_devices
from qwen3 import data, processes, report, weights
from qwen3.progress import HeldOut, Run
from tqdm import tqdm

from jax_megamoe.models import flops, training
from jax_megamoe.models.qwen3_moe import Qwen3Moe
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
    add("--devices", type=int, help="simulate that many CPU devices, in each process")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--data", help="a file or a directory (default: Python's standard library)")
    text.add_argument("--dataset", metavar="NAME[,CONFIG]", help="of Hugging Face; needs datasets")
    add("--text-field", default="text", help="of a row of --dataset (%(default)s)")
    add("--tokenizer", default=data.BYTES, help="bytes, or a Hugging Face model's: transformers")
    add("--most-tokens", type=int, default=10**9, help="of the text (%(default)s)")
    kept = "a .npy file that keeps the tokens for other runs, which then read no text"
    add("--tokens", type=pathlib.Path, help=kept)
    part = "of the text's end that is not trained on: tokens, or a share below 1; 0: none (default:"
    most = f"{data.HELD_OUT_SHARE:.0%}, at least a sequence, at most {data.HELD_OUT_MOST} tokens)"
    add("--held-out", type=float, metavar="X", help=f"{part} {most}".replace("%", "%%"))
    add("--held-out-every", type=int, default=100, help="steps between its losses (%(default)s)")
    add("--checkpoint", type=pathlib.Path, help="a folder to save the run in")
    add("--checkpoint-every", type=int, default=100, help="steps between two (%(default)s)")
    add("--resume", action="store_true", help="go on with the run that --checkpoint holds, if any")
    add("--tensorboard", action="store_true", help="write OUT/tensorboard; needs tensorboardX")
    weights.add_arguments(parser)
    processes.add_arguments(parser)
    add_arguments(parser)
    return parser.parse_args(argv)


def check_arguments(args: argparse.Namespace) -> None:
    for name in ("most_tokens", "checkpoint_every", "held_out_every"):
        if (value := getattr(args, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, but it is {value}.")
    if args.held_out is not None and not 0 <= args.held_out < math.inf:
        raise UsageError(f"--held-out must be finite and at least 0, but it is {args.held_out}.")
    if args.resume and args.checkpoint is None:
        raise UsageError("--resume needs --checkpoint, the folder of the run to go on with.")
    if args.weights is not None and not (args.weights / "config.json").is_file():
        raise UsageError(f"--weights {args.weights} is no folder with a config.json.")
    if args.tokens is not None and args.tokens.suffix != ".npy":
        raise UsageError(f"--tokens must end in .npy, but it is {args.tokens}.")
    if args.tokens is not None and args.tokens.is_dir():
        raise UsageError(f"--tokens must be a file, but {args.tokens} is a folder.")
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


def train(
    args: argparse.Namespace,
    config: TrainingConfig,
    text: data.Text,
    held_out: data.Text | None,
    mesh: jax.sharding.Mesh,
    checkpoints: Checkpoints | None,
    rows: list[report.Row],
) -> Qwen3Moe:
    """Runs the steps under the mesh that is set, until Ctrl-C at most; appends a row for each.

    Raises:
      UsageError: a loss is not finite; `rows` then ends with that step.
    """
    model, optimizer = training.create(config)
    if checkpoints:
        rows += [report.Row(*row) for row in checkpoints.restore(model, optimizer)]
    if args.weights and not rows:
        weights.load(model, args.weights)
    place = processes.Placing(mesh, config.microbatches)
    held = None if held_out is None else HeldOut(held_out, config, place)

    def make(step: int) -> tuple[training.Batch, float]:
        """A step's batch, and its FLOPs."""
        tokens = data.rows_of_step(text, config.seed, step, config.batch, config.seq)
        ids = data.segment_ids(tokens, text.end)
        pairs = flops.attended_pairs(ids[:, :-1])
        of_step = flops.step_flops(config.model, config.batch * config.seq, pairs)
        return place(tokens, ids), of_step

    steps = range(len(rows) + 1, config.steps + 1)
    speaks = processes.is_first()
    folder = args.out / "tensorboard" if args.tensorboard and speaks else None
    bar_options = {"initial": len(rows), "unit": "step", "mininterval": 1.0, "disable": not speaks}
    with (
        report.TensorBoard(folder, steps.start) as board,
        StopRequest() as own_stop,
        contextlib.closing(data.prefetch(make, steps)) as batches,
        tqdm(total=config.steps, **bar_options) as bar,
    ):
        run = Run(config, mesh.devices, rows, board, bar)
        stop = processes.SharedStop(own_stop, mesh)
        given = None
        for step, (batch, of_step) in zip(steps, batches, strict=True):
            metrics = training.train_step(model, optimizer, batch, config)
            if given is not None:
                run.record(*given)
            given = (step, metrics, of_step)
            is_last = step == config.steps or stop.asked()
            # Not where a run is stopped: one that never was would not have it.
            evaluates = held and (step % args.held_out_every == 0 or step == config.steps)
            if is_last or evaluates or (checkpoints and checkpoints.is_time(step)):
                run.record(*given)
                given = None
                if held and evaluates:
                    run.record_held_out(held.loss(model))
                if checkpoints:
                    checkpoints.save(step, model, optimizer, rows, is_last)
            if is_last:
                break
    return model


def settings_of(
    args: argparse.Namespace,
    config: TrainingConfig,
    text: data.Text,
    held_out: data.Text | None,
) -> Settings:
    """What a run must share with the one that it goes on with."""
    fields = {name: value for name, value in to_dict(config).items() if name not in MAY_CHANGE}
    tokens = hashlib.sha256(np.ascontiguousarray(text.tokens).data).hexdigest()
    return {
        **fields,
        "tokenizer": args.tokenizer,
        "sha256 of the tokens": tokens,
        "tokens held out": 0 if held_out is None else len(held_out.tokens),
        "held_out_every": args.held_out_every,
    }


def configure(args: argparse.Namespace) -> tuple[TrainingConfig, jax.sharding.Mesh, str]:
    """What the run is, its mesh, and what runs the experts.

    Raises:
      UsageError: options that are none, or do not fit each other, the devices or the weights.
    """
    check_arguments(args)
    if args.weights is not None and args.model is None:
        args.model = str(args.weights)
    try:
        config = from_arguments(args)
        if args.weights is not None:
            weights.check_fits(args.weights, config.model, args.layers)
        simulate_devices(args.devices)
        processes.join(args)
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
    if args.export is not None:
        weights.check_export(args.export, config.balance)
    return config, mesh, experts


def run(args: argparse.Namespace) -> int:
    """Trains, reports, writes the files; the exit status."""
    config, mesh, experts = configure(args)
    text, held_out = data.hold_out(load_text(args, config), args.held_out, config.seq)
    writes = processes.is_first()
    say: Callable[..., Any] = functools.partial(print, flush=True) if writes else lambda *_: None
    settings: Settings = {}
    if args.checkpoint is not None or jax.process_count() > 1:
        settings = settings_of(args, config, text, held_out)
    together = [*map(str, (args.weights, args.layers, args.checkpoint, args.resume, args.export))]
    processes.check_same(
        "options or a text", [settings, to_dict(config), args.checkpoint_every, together]
    )
    if writes:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {args.out} cannot be made a directory: {error}.") from error
        (args.out / "run.json").write_text(json.dumps(to_dict(config), indent=2) + "\n")
    num_held_out = 0 if held_out is None else len(held_out.tokens)
    say(
        f"text: {text.source}, {len(text.tokens):,} tokens to train on, {num_held_out:,} held out\n"
        f"mesh: {dict(mesh.shape)} on {jax.devices()[0].device_kind}, {config.precision}\n"
        f"experts: {experts}"
    )
    rows: list[report.Row] = []
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if args.checkpoint is not None:
            how = (args.checkpoint_every, settings, args.resume)
            checkpoints = stack.enter_context(
                Checkpoints(args.checkpoint, *how, in_background=True)
            )
            say(f"checkpoints: {args.checkpoint}, from step {(checkpoints.latest or 0) + 1} on")
        stack.enter_context(jax.set_mesh(mesh))
        try:
            model = train(args, config, text, held_out, mesh, checkpoints, rows)
        finally:
            if rows and writes:  # a run that never began leaves an earlier one's files alone
                report.write(rows, args.out)
                say(f"written: {args.out}/run.csv, {args.out}/run.png")
        if len(rows) < config.steps:
            say(f"interrupted after {len(rows)} of {config.steps} steps")
            return INTERRUPTED
        if args.export is not None:
            weights.export(model, args.export, args.export_dtype)
            say(f"model: {args.export}")
    held = rows[-1].held_out_loss
    of_held_out = "" if held is None else f", held out {held:.4f}"
    say(f"loss of the last step: {rows[-1].loss:.4f}{of_held_out} nats per token")
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
