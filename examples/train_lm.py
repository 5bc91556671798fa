"""Trains a small mixture-of-experts language model on text, byte by byte.

    make train                                    # Python's own standard library, about 2 minutes
    make train ARGS="--data my_text"              # any file or directory
    make train ARGS="--devices 4"                 # the same run on 4 simulated CPU devices
    make train ARGS="--checkpoint out/run --resume"  # saved; goes on where it stopped

`make train` runs this script with the checkout on PYTHONPATH; with the package and its extra
`examples` installed, `python examples/train_lm.py` does the same.

Prints the held-out loss beside the unigram entropy of the held-out bytes, and writes a loss curve,
a CSV and a text sample below --out. Ctrl-C stops after the step in progress and reports; with
--checkpoint it saves that step too, and --resume gives what an uninterrupted run would have.
"""

import argparse
import contextlib
import hashlib
import math
import pathlib
import sys
import time

import jax
import numpy as np
from flax import nnx
from lm import data, report, training
from lm.checkpoint import CheckpointError, Checkpoints, Settings
from lm.model import LanguageModel, ModelConfig, generate
from lm.terminal import INTERRUPTED, StopRequest, UsageError, simulate_devices
from tqdm import tqdm

from jax_megamoe.config import BACKENDS, FP8_GROUP, PRECISIONS, RANK_COUNTS, MegaMoEConfig
from jax_megamoe.models.training import experts_run_on

HEAD_SIZE = 32
EVALUATION_BATCHES = 4
FINAL_EVALUATION_BATCHES = 16
PROMPT = b"def "
SAMPLE_BYTES = 300
TEMPERATURE = 0.7
# The arguments that the steps of a run and its record depend on; any devices may go on with it.
OF_THE_RUN = "steps eval_every batch seq layers hidden intermediate experts choices learning_rate"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", help="a text file or a directory of them (default: Python's standard library)")
    add("--out", type=pathlib.Path, default=pathlib.Path("out"), help="where to write (./out)")
    add("--devices", type=int, help="simulate that many CPU devices")
    add(
        "--expert-parallel",
        type=int,
        help="devices that share the experts (default: 2 if their number is even, else 1)",
    )
    add("--steps", type=int, default=300, help="of training (default: %(default)s)")
    add("--eval-every", type=int, default=50, help="steps between held-out losses")
    add("--batch", type=int, default=16, help="sequences of a step, over all devices")
    add("--seq", type=int, default=128, help="bytes of a sequence")
    add("--layers", type=int, default=3)
    add("--hidden", type=int, default=128, help=f"a multiple of {HEAD_SIZE}")
    add("--intermediate", type=int, default=128, help="of one expert")
    add("--experts", type=int, default=8)
    add("--choices", type=int, default=2, help="experts of one byte")
    add("--learning-rate", type=float, default=2e-3)
    add("--seed", type=int, default=0)
    add("--precision", choices=PRECISIONS, help="default: bf16 on a GPU, float32 on a CPU")
    add("--backend", choices=BACKENDS, default="auto")
    add("--checkpoint", type=pathlib.Path, help="a folder to save the run in")
    add("--checkpoint-every", type=int, default=50, help="steps between two (%(default)s)")
    add("--resume", action="store_true", help="go on with the run that --checkpoint holds, if any")
    return parser.parse_args(argv)


def make_mesh(args: argparse.Namespace) -> jax.sharding.Mesh:
    """A mesh ("data", "expert") of all devices, after simulating --devices CPU devices."""
    simulate_devices(args.devices)
    num_devices = jax.device_count()
    ranks = args.expert_parallel
    if ranks is None:
        ranks = 2 if num_devices % 2 == 0 else 1
    if ranks not in RANK_COUNTS or num_devices % ranks:
        raise UsageError(
            f"--expert-parallel must be one of {RANK_COUNTS} and divide the {num_devices} devices,"
            f" but it is {ranks}."
        )
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((num_devices // ranks, ranks), ("data", "expert"), axis_types=auto)


def check_sizes(args: argparse.Namespace, mesh: jax.sharding.Mesh) -> None:
    positive = "steps eval_every batch seq layers hidden intermediate experts choices"
    for name in (*positive.split(), "checkpoint_every"):
        if (value := getattr(args, name)) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, but it is {value}.")
    multiples = [
        ("--batch", args.batch, mesh.size, "the number of devices"),
        ("--experts", args.experts, mesh.shape["expert"], "--expert-parallel"),
        ("--hidden", args.hidden, HEAD_SIZE, "the size of an attention head"),
    ]
    if args.precision == "fp8_block":
        group = (FP8_GROUP, "a group of --precision fp8_block")
        multiples.append(("--hidden", args.hidden, *group))
        multiples.append(("--intermediate", args.intermediate, *group))
    for name, value, unit, meaning in multiples:
        if value % unit:
            raise UsageError(f"{name} must be a multiple of {unit}, {meaning}, but it is {value}.")
    if args.seed < 0:
        raise UsageError(f"--seed must be at least 0, but it is {args.seed}.")
    if args.resume and args.checkpoint is None:
        raise UsageError("--resume needs --checkpoint, the folder of the run to go on with.")
    if args.choices > args.experts:
        raise UsageError(f"--choices {args.choices} must be at most --experts {args.experts}.")


def model_config(args: argparse.Namespace) -> ModelConfig:
    precision = args.precision or ("float32" if jax.default_backend() == "cpu" else "bf16")
    return ModelConfig(
        layers=args.layers,
        hidden=args.hidden,
        heads=args.hidden // HEAD_SIZE,
        intermediate=args.intermediate,
        experts=args.experts,
        choices=args.choices,
        dtype=jax.numpy.float32 if precision == "float32" else jax.numpy.bfloat16,
        moe=MegaMoEConfig(precision=precision, backend=args.backend),
    )


def settings_of(args: argparse.Namespace, config: ModelConfig, corpus: data.Corpus) -> Settings:
    """What a run must share with the one that it goes on with."""
    text = hashlib.sha256(corpus.train.tobytes() + corpus.held_out.tobytes()).hexdigest()
    arguments = {name: getattr(args, name) for name in (*OF_THE_RUN.split(), "seed", "backend")}
    return {**arguments, "precision": config.moe.precision, "sha256 of the text": text}


def train(
    args: argparse.Namespace,
    config: ModelConfig,
    corpus: data.Corpus,
    checkpoints: Checkpoints | None,
    rows: list[report.Row],
) -> LanguageModel:
    """Runs the steps under the mesh that is set, until Ctrl-C at most; appends a row for each.

    Raises:
      UsageError: the loss is not finite; `rows` then ends with that step.
    """
    model, optimizer = training.create(
        config, learning_rate=args.learning_rate, steps=args.steps, seed=args.seed
    )
    if checkpoints:
        rows += [report.Row(*row) for row in checkpoints.restore(model, optimizer)]
    done = len(rows)
    with (
        StopRequest() as stop,
        tqdm(total=args.steps, initial=done, unit="step", mininterval=1.0) as bar,
    ):
        for step in range(done + 1, args.steps + 1):
            start = time.perf_counter()
            sequences = data.train_batch(corpus, args.seed, step, args.batch, args.seq)
            metrics = training.train_step(model, optimizer, sequences)
            loss, imbalance = float(metrics.loss), float(metrics.imbalance)
            tokens_per_s = args.batch * args.seq / (time.perf_counter() - start)
            rows.append(report.Row(step, loss, None, tokens_per_s, imbalance))
            if step % args.eval_every == 0 and step < args.steps:
                evaluate(model, corpus, args, EVALUATION_BATCHES, rows, bar)
            bar.set_postfix_str(f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s", refresh=False)
            bar.update()
            check_finite(rows[-1])
            is_last = step == args.steps or stop.asked
            if checkpoints:
                checkpoints.save(step, model, optimizer, rows, is_last)
            if is_last:
                break
        evaluate(model, corpus, args, FINAL_EVALUATION_BATCHES, rows, bar)
        check_finite(rows[-1])
    return model


def evaluate(
    model: LanguageModel,
    corpus: data.Corpus,
    args: argparse.Namespace,
    num_batches: int,
    rows: list[report.Row],
    bar: tqdm,
) -> None:
    """Puts the held-out loss into the last row and prints it."""
    held_out = held_out_loss(model, corpus, args, num_batches)
    rows[-1] = rows[-1]._replace(held_out_loss=held_out)
    bar.write(f"step {rows[-1].step}: held-out loss {held_out:.3f} nats per byte")
    sys.stdout.flush()  # also into a file, as it happens


def check_finite(row: report.Row) -> None:
    if not all(math.isfinite(value) for value in (row.train_loss, row.held_out_loss or 0.0)):
        raise UsageError(
            f"the loss became {row.train_loss} at step {row.step}, the held-out loss"
            f" {row.held_out_loss}; try a lower --learning-rate."
        )


def held_out_loss(
    model: LanguageModel, corpus: data.Corpus, args: argparse.Namespace, num_batches: int
) -> float:
    """Mean loss in nats per byte over evenly spaced held-out sequences."""
    batches = data.held_out_batches(corpus, num_batches, args.batch, args.seq)
    return float(np.mean([float(training.evaluate(model, batch)) for batch in batches]))


def sample_text(model: LanguageModel, args: argparse.Namespace, num_devices: int) -> str:
    """A continuation of PROMPT; each device gets a row, and the first is returned."""
    prompt = np.tile(np.frombuffer(PROMPT, np.uint8).astype(np.int32), (num_devices, 1))
    compiled = nnx.jit(generate, static_argnums=(2, 3, 4))
    text = compiled(model, prompt, SAMPLE_BYTES, args.seq, TEMPERATURE)
    return report.as_text(np.asarray(text)[0].tolist())


def run(args: argparse.Namespace) -> int:
    """Trains, reports, writes the files; the exit status."""
    mesh = make_mesh(args)
    check_sizes(args, mesh)
    config = model_config(args)
    try:
        ranks = mesh.shape["expert"]
        backend = experts_run_on(config.moe, H=config.hidden, I=config.intermediate, R=ranks)
    except ValueError as error:
        raise UsageError(f"--{error}.") from error
    if config.moe.precision == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    corpus = data.load_corpus(args.data, args.seq + 1)
    entropy = data.unigram_entropy(corpus.held_out)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {args.out} cannot be made a directory: {error}.") from error
    print(
        f"text: {corpus.source}, {len(corpus.train):,} bytes to train on,"
        f" {len(corpus.held_out):,} held out\n"
        f"mesh: {dict(mesh.shape)} on {jax.devices()[0].device_kind}, {config.moe.precision}\n"
        f"experts: {backend}",
        flush=True,
    )
    rows: list[report.Row] = []
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if args.checkpoint is not None:
            settings = settings_of(args, config, corpus)
            checkpoints = stack.enter_context(
                Checkpoints(args.checkpoint, args.checkpoint_every, settings, args.resume)
            )
            print(f"checkpoints: {args.checkpoint}, from step {(checkpoints.latest or 0) + 1} on")
        stack.enter_context(jax.set_mesh(mesh))
        try:
            model = train(args, config, corpus, checkpoints, rows)
        finally:
            if rows:  # a run that never began leaves an earlier one's files alone
                report.write_csv(report.Row._fields, rows, args.out / "loss.csv")
                report.write_curve(rows, entropy, args.out / "loss.png")
                print(f"written: {args.out}/loss.csv, {args.out}/loss.png")
        sample = sample_text(model, args, mesh.size)
    (args.out / "sample.txt").write_text(sample, encoding="utf-8")
    print(f"--- {args.out}/sample.txt ---\n{sample}\n---")
    if len(rows) < args.steps:
        print(f"interrupted after {len(rows)} of {args.steps} steps")
    final = rows[-1].held_out_loss
    assert final is not None, "the last step is evaluated"
    side = "below" if final < entropy else "above"
    print(
        f"held-out loss {final:.4f} nats per byte; unigram entropy of the held-out bytes"
        f" {entropy:.4f}; {abs(entropy - final):.4f} nats {side} it"
    )
    return 0 if len(rows) == args.steps else INTERRUPTED


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        return run(args)
    except (UsageError, data.DataError, CheckpointError) as error:
        print(f"train_lm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_lm: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
