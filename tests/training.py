"""The training example through its command line, in a process of its own."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def command(*arguments: Any) -> list[str]:
    return [sys.executable, str(ROOT / "examples" / "train_lm.py"), *map(str, arguments)]


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


def train(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, timeout=600
    )


def rows(out: Path) -> list[dict[str, str]]:
    """The record that a run has left in `out`."""
    with (out / "loss.csv").open() as file:
        return list(csv.DictReader(file))


def write_text(folder: Path) -> None:
    """Counted sheep in three files: predictable, and more than one file to split."""
    for part in range(3):
        lines = (f"{n} sheep jump over the fence.\n" for n in range(part * 300, part * 300 + 300))
        (folder / f"part{part}.txt").write_text("".join(lines))
    (folder / "image.bin").write_bytes(b"\0" * 5000)
