"""The training examples through their command lines, each in a process of its own."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

ROOT = Path(__file__).resolve().parents[1]


def command(*arguments: Any, script: str = "train_lm") -> list[str]:
    return [sys.executable, str(ROOT / "examples" / f"{script}.py"), *map(str, arguments)]


def environment() -> dict[str, str]:
    """One simulated device unless --devices says more, whatever this process has."""
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    return {**inherited, **added}


def train(
    *arguments: Any, script: str = "train_lm", **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, script=script),
        env=environment() | variables,
        capture_output=True,
        text=True,
        timeout=600,
    )


def rows(out: Path, name: str = "loss.csv") -> list[dict[str, str]]:
    """The record that a run has left in `out`."""
    with (out / name).open() as file:
        return list(csv.DictReader(file))


def final_state(out: Path, step: int) -> list[np.ndarray]:
    """Every array of the checkpoint of a step below `out`: parameters and optimizer state."""
    with ocp.StandardCheckpointer() as checkpointer:
        folder = out / "run" / str(step) / "state"
        metadata = checkpointer.metadata(folder).item_metadata.tree
        target = jax.tree.map(lambda a: np.empty(a.shape, a.dtype), metadata)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(checkpointer.restore(folder, target))]


def write_text(folder: Path) -> None:
    """Counted sheep in three files: predictable, and more than one file to split."""
    for part in range(3):
        lines = (f"{n} sheep jump over the fence.\n" for n in range(part * 300, part * 300 + 300))
        (folder / f"part{part}.txt").write_text("".join(lines))
    (folder / "image.bin").write_bytes(b"\0" * 5000)
