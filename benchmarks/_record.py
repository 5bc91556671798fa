"""What every results file says of the run beside its figures."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import subprocess
from collections.abc import Sequence

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy")


def smi(query: str) -> str:
    """One field of the first GPU, as nvidia-smi prints it."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> tuple[str, bool]:
    """The commit of the checkout, and whether it was changed since.

    JAX_MEGAMOE_COMMIT names it where the sources lie without their history; then they count as
    unchanged, and whoever sets the variable answers for that.
    """
    if given := os.environ.get("JAX_MEGAMOE_COMMIT"):
        return given, False
    head = _git("rev-parse", "--verify", "--quiet", "HEAD")
    return head or "unknown", bool(_git("status", "--porcelain")) or not head


def write(path: pathlib.Path, records: Sequence[object]) -> None:
    """Writes the records with the commit, date, GPU, versions and clock of this run."""
    revision, dirty = commit()
    result = {
        "commit": revision,
        "dirty": dirty,
        "date": datetime.date.today().isoformat(),
        "device": smi("name"),
        "num_devices": 1,
        "driver": smi("driver_version"),
        "clock_mhz": int(smi("clocks.sm").split()[0]),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "records": list(records),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def _git(*arguments: str) -> str:
    root = pathlib.Path(__file__).parent
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
