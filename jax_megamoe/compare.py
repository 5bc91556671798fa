"""The same training with this package's layer and without it, in a configuration of yours:

    python -m jax_megamoe.compare --config run.toml [--expert-parallel 8 ...] [--png compare.png]

Trains the Qwen3-MoE of the configuration (`jax_megamoe.models.training_config`; the options are its
fields) first with the layer, then with its reference in plain JAX, from the same parameters on the
same batches, in rounds. It prints tokens/s of a device for both, from the steps behind the compiled
and warmed-up ones, their ratio with its least and most over the rounds, and whether the losses of
each step agree. The reference is made to be exact and not to be fast: see docs/train-a-moe.md.

Exit codes, for scripts:
    0  the losses agree at each step
    1  they do not
    2  an argument or a configuration that cannot be; what it may be is on standard error
"""

import argparse
import dataclasses
import gc
import importlib
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_megamoe.models.training import (
    BATCH_SPEC,
    Batch,
    create,
    experts_run_on,
    make_mesh,
    train_step,
)
from jax_megamoe.models.training_config import (
    MOES,
    TrainingConfig,
    add_arguments,
    from_arguments,
)
from jax_megamoe.validation import check_size, refuse

AGREE, DISAGREE, BAD_ARGUMENTS = 0, 1, 2
# Of made-up text: so many tokens occur, and each is followed by one of so many.
ALPHABET, SUCCESSORS = 256, 4


class Side(NamedTuple):
    """A training run: losses float64 [steps], in nats per token, and seconds of each step."""

    losses: np.ndarray
    seconds: np.ndarray


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the rounds have shown; the first of each pair is the layer's.

    Attributes:
      tokens_per_s_device: by the median time of a round's measured steps, mean over the rounds.
      ratio: of the two; ratio_least, ratio_most: of a round by itself.
      largest_difference: of losses, relative, over the steps of all rounds, at `at_step`, from 1;
        infinite where a loss is not finite.
      agree: whether it is within the tolerance.
    """

    tokens_per_s_device: tuple[float, float]
    ratio: float
    ratio_least: float
    ratio_most: float
    largest_difference: float
    at_step: int
    agree: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check(options)
        config = from_arguments(options)
        mesh = make_mesh(config)
        configs = [dataclasses.replace(config, moe=moe) for moe in MOES]
        runs_on = [_runs_on(of_moe) for of_moe in configs]
        batches = list(_batches(config, options))
    except (OSError, EOFError, TypeError, ValueError) as error:
        parser.error(str(error))
    rounds = []
    for number in range(options.rounds):
        rounds.append([run(of_moe, mesh, batches) for of_moe in configs])
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    tokens = config.batch * config.seq / mesh.size
    outcome = judge(rounds, tokens, options.skip, options.tolerance)
    print("\n".join(lines(outcome, runs_on, options.tolerance)))
    if options.json:
        record = dataclasses.asdict(outcome) | {"runs_on": runs_on}
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    if options.png:
        draw(options.png, rounds[0], outcome)
    return AGREE if outcome.agree else DISAGREE


def run(config: TrainingConfig, mesh: jax.sharding.Mesh, batches: list[Batch]) -> Side:
    """Trains from the first step on, each step waited for."""
    gc.collect()  # the state of the run before, for whose memory this one may have no room beside
    losses, seconds = [], []
    sharding = jax.NamedSharding(mesh, BATCH_SPEC)
    with jax.set_mesh(mesh):
        model, optimizer = create(config)
        for batch in batches:
            placed = jax.block_until_ready(jax.device_put(batch, sharding))
            start = time.perf_counter()
            metrics = jax.block_until_ready(train_step(model, optimizer, placed, config))
            seconds.append(time.perf_counter() - start)
            losses.append(float(metrics.loss))
    return Side(np.array(losses), np.array(seconds))


def judge(
    rounds: list[list[Side]], tokens_a_device: float, skipped: int, tolerance: float
) -> Outcome:
    """What the rounds say, without the times of the first `skipped` steps of each run."""
    seconds = np.array([[side.seconds[skipped:] for side in sides] for sides in rounds])
    of_rounds = np.median(seconds, axis=2)  # [rounds, 2]
    ours, others = of_rounds.mean(axis=0)
    ratios = of_rounds[:, 1] / of_rounds[:, 0]
    losses = np.array([[side.losses for side in sides] for sides in rounds])
    with np.errstate(invalid="ignore"):
        differences = np.abs(losses[:, 0] - losses[:, 1]) / np.abs(losses[:, 1])
    differences = np.where(np.isfinite(differences), differences, np.inf).max(axis=0)
    return Outcome(
        tokens_per_s_device=(float(tokens_a_device / ours), float(tokens_a_device / others)),
        ratio=float(others / ours),
        ratio_least=float(ratios.min()),
        ratio_most=float(ratios.max()),
        largest_difference=float(differences.max()),
        at_step=int(differences.argmax()) + 1,
        agree=bool(differences.max() <= tolerance),
    )


def lines(outcome: Outcome, runs_on: Sequence[str], tolerance: float) -> Iterator[str]:
    """The table as text."""
    yield f"{'layer':10}{'tokens/s of a device':>22}  runs on"
    for moe, rate, where in zip(MOES, outcome.tokens_per_s_device, runs_on, strict=True):
        yield f"{moe:10}{rate:22,.0f}  {where}"
    spread = f"{outcome.ratio_least:.2f} to {outcome.ratio_most:.2f} over the rounds"
    yield f"{MOES[0]} over {MOES[1]}: {outcome.ratio:.2f} times the tokens/s, {spread}"
    if "kernels" not in runs_on[0]:
        yield "the kernels did not run: the ratio says nothing of them"
    verdict = "agree" if outcome.agree else "do not agree"
    yield (
        f"losses {verdict}: they differ by at most {outcome.largest_difference:.2e} relative, at"
        f" step {outcome.at_step}; {tolerance:g} is allowed"
    )


def draw(path: pathlib.Path, sides: list[Side], outcome: Outcome) -> None:
    """Losses and tokens/s of both, of one round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(9, 4), layout="constrained", width_ratios=(2, 1)
    )
    for moe, side, style in zip(MOES, sides, ("-", "--"), strict=True):
        left.plot(np.arange(1, len(side.losses) + 1), side.losses, style, label=moe)
    left.set(xlabel="step", ylabel="nats per token")
    left.legend()
    right.bar(MOES, outcome.tokens_per_s_device, color=("tab:blue", "tab:orange"))
    right.set(ylabel="tokens/s of a device", title=f"{outcome.ratio:.2f} times")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _check(options: argparse.Namespace) -> None:
    for name in ("measure", "rounds"):
        check_size(name, getattr(options, name), 10**6)
    check_size("skip", options.skip, 10**6)
    if not options.tolerance >= 0:
        refuse(ValueError, "tolerance", options.tolerance, "at least 0")
    for name in ("png", "json"):
        path = getattr(options, name)
        if path and (path.is_dir() or not path.parent.is_dir()):
            refuse(ValueError, name, path, "a file, in a folder that is there")
    if options.png:
        try:
            importlib.import_module("matplotlib")
        except ImportError as error:
            needed = "given without the package matplotlib"
            refuse(ValueError, "png", f"{needed} ({error})", "given where it is installed")


def _runs_on(config: TrainingConfig) -> str:
    model = config.model
    sizes = {"H": model.hidden_size, "I": model.moe_intermediate_size, "R": config.expert_parallel}
    return experts_run_on(config.experts, **sizes)


def _batches(config: TrainingConfig, options: argparse.Namespace) -> Iterator[Batch]:
    """The steps' sequences, of the text that is given, or made up."""
    shape = (config.microbatches, config.batch // config.microbatches, config.seq + 1)
    num_steps = options.skip + options.measure
    if options.tokens is None:
        for step in range(num_steps):
            yield Batch(_made_up(config, step).reshape(shape))
        return
    text = np.load(options.tokens, mmap_mode="r")
    size = config.batch * (config.seq + 1)
    if not isinstance(text, np.ndarray):  # an archive, whatever its name ends in
        text.close()
        refuse(ValueError, "tokens", f"several arrays in {options.tokens}", "one, of integers [N]")
    if text.ndim != 1 or text.dtype.kind not in "iu" or text.size < size * num_steps:
        was = f"{text.dtype} {text.shape} in {options.tokens}"
        refuse(ValueError, "tokens", was, f"integers, [{size * num_steps}] or more of them")
    for step in range(num_steps):
        rows = np.array(text[step * size : (step + 1) * size], np.int32)
        if rows.min() < 0 or rows.max() >= config.model.vocab_size:
            was, most = f"{rows.min()} to {rows.max()}", config.model.vocab_size - 1
            refuse(ValueError, "tokens", was, f"in 0..{most}, of the model's vocabulary")
        yield Batch(rows.reshape(shape))


def _made_up(config: TrainingConfig, step: int) -> np.ndarray:
    """int32 [batch, seq + 1] of few tokens in an order that a model learns within some steps."""
    fixed, rng = np.random.default_rng(config.seed), np.random.default_rng((config.seed, step))
    size = min(ALPHABET, config.model.vocab_size)
    alphabet = fixed.choice(config.model.vocab_size, size, replace=False).astype(np.int32)
    followers = fixed.integers(0, size, (size, SUCCESSORS))
    choices = rng.integers(0, SUCCESSORS, (config.seq + 1, config.batch))
    state = rng.integers(0, size, config.batch)
    rows = np.empty((config.batch, config.seq + 1), np.int32)
    for position, choice in enumerate(choices):
        rows[:, position] = alphabet[state]
        state = followers[state, choice]
    return rows


def _parser() -> argparse.ArgumentParser:
    text, _, codes = str(__doc__).partition("Exit codes")
    parser = argparse.ArgumentParser(
        prog="python -m jax_megamoe.compare",
        description=text,
        epilog=f"Exit codes{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Any = parser.add_argument
    path = {"type": pathlib.Path, "metavar": "FILE"}
    add("--skip", type=int, default=5, help="steps of a run before its times count (%(default)s)")
    add("--measure", type=int, default=20, help="steps of a run behind them (%(default)s)")
    add("--rounds", type=int, default=3, help="runs of each (%(default)s)")
    add("--tolerance", type=float, default=1e-2, help="of losses, relative (%(default)s)")
    add("--tokens", **path, help="a .npy of token ids [N] to train on (default: made up)")
    add("--png", **path, help="draw the losses and rates; needs matplotlib")
    add("--json", **path, help="write the figures")
    add_arguments(parser, "moe")
    return parser


if __name__ == "__main__":
    sys.exit(main())
