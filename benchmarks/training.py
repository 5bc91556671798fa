"""A training run with the kernels beside the same run with the reference: losses and step times.

    python benchmarks/training.py [--out benchmarks/results/training.json --png docs/training.png]

Runs examples/train_lm.py once with each backend, in a process of its own, one after the other. All
but the layer is the same in both: parameters, text, batches, optimizer.
"""

import argparse
import csv
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import numpy as np
from _record import need_gpu, write

ROOT = pathlib.Path(__file__).parents[1]
BACKENDS = ("cuda", "reference")
LAST = 20  # steps whose mean losses are compared
# 16,384 bytes a step: a loss of fewer says more of the batch than of the weights. At the example's
# own rate, 2e-3, two runs that differ by a rounding part for good within 60 steps.
BATCH, SEQ = 64, 256
RUN = f"--batch {BATCH} --seq {SEQ} --learning-rate 5e-4 --eval-every 1000".split()


def train(backend: str, steps: int, folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The columns of the run's loss.csv that hold a number at each step, [steps] each.

    Raises:
      subprocess.CalledProcessError: the run failed; its output is on stderr.
    """
    script = ROOT / "examples" / "train_lm.py"
    command = [sys.executable, script, *RUN, "--steps", str(steps), "--backend", backend]
    subprocess.run([*command, "--out", folder], check=True, stdout=sys.stderr)
    with (folder / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name]) for row in rows]) for name in _EVERY_STEP}


_EVERY_STEP = ("train_loss", "tokens_per_s")


def differences(losses: np.ndarray, right: np.ndarray) -> dict[str, float]:
    """How far losses [steps] are from `right`, relative: at most, and of the means of the end."""
    each = np.abs(losses - right) / np.abs(right)
    ends = losses[-LAST:].mean(), right[-LAST:].mean()
    return {
        "largest": float(each.max()),
        "at_step": int(each.argmax()) + 1,
        f"of_last_{LAST}": float(abs(ends[0] - ends[1]) / abs(ends[1])),
    }


def record(backend: str, run: dict[str, np.ndarray], tokens: int) -> dict[str, object]:
    """Of the second half of the run, when everything has been compiled, the median step time."""
    rate = np.median(run["tokens_per_s"][len(run["tokens_per_s"]) // 2 :])
    losses = run["train_loss"]
    return {
        "backend": backend,
        "tokens_a_step": tokens,
        "steps": len(losses),
        "step_ms": round(tokens / float(rate) * 1e3, 3),
        f"loss_of_last_{LAST}": round(float(losses[-LAST:].mean()), 5),
        "losses": [round(float(loss), 6) for loss in losses],
    }


def draw(path: pathlib.Path, losses: Sequence[np.ndarray]) -> None:
    """The two curves, and below them the relative difference of each step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curves, below) = plt.subplots(
        2, sharex=True, figsize=(8, 5), layout="constrained", height_ratios=(2, 1)
    )
    steps = np.arange(1, len(losses[0]) + 1)
    for backend, values, style in zip(BACKENDS, losses, ("-", "--"), strict=True):
        curves.plot(steps, values, style, label=backend, lw=1.5)
    curves.set_ylabel("nats per byte")
    curves.legend()
    below.plot(steps, (losses[0] - losses[1]) / losses[1], lw=1, color="#d1495b")
    for bound in (-0.01, 0.01):
        below.axhline(bound, ls=":", color="grey")
    below.set(xlabel="step", ylabel="relative\ndifference")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training with the kernels and without.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    parser.add_argument("--png", type=pathlib.Path, help="draw the curves into this file")
    args = parser.parse_args()
    need_gpu()
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(backend, args.steps, pathlib.Path(folder) / backend) for backend in BACKENDS]
    losses = [run["train_loss"] for run in runs]
    records = [record(b, run, BATCH * SEQ) for b, run in zip(BACKENDS, runs, strict=True)]
    apart = differences(*losses)
    for of_backend in records:
        print({k: v for k, v in of_backend.items() if k != "losses"})
    print("relative difference:", apart)
    if args.out:
        write(args.out, [*records, {"relative_difference": apart}])
    if args.png:
        draw(args.png, losses)


if __name__ == "__main__":
    main()
