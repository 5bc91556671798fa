"""What every results file says of the run beside its figures."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import subprocess
from collections.abc import Sequence

import jax

# Those of a run that are installed.
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch", "triton", "tokamax")
# What the benchmarks write: rewriting it does not change what was measured.
OUTPUTS = (":(top,exclude)benchmarks/results", ":(top,exclude,glob)docs/*.png")


def smi(query: str, num_devices: int = 1) -> str:
    """One field of the first GPUs, as nvidia-smi prints it, a line each."""
    indices = ",".join(map(str, range(num_devices)))
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", indices]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def sm_clocks(num_devices: int = 1) -> list[int]:
    """MHz of the first GPUs, now."""
    return [int(line.split()[0]) for line in smi("clocks.sm", num_devices).splitlines()]


def device() -> str:
    """The kind of device that JAX runs on: "NVIDIA H200", or "cpu"."""
    return jax.devices()[0].device_kind


def need_gpu() -> None:
    """Ends the program with one line where JAX has no GPU."""
    if jax.default_backend() != "gpu":
        raise SystemExit(f"this benchmark needs a Hopper GPU; JAX runs on {device()} here")


def commit() -> tuple[str, bool]:
    """The commit of the checkout, and whether its sources were changed since.

    JAX_MEGAMOE_COMMIT names it where the sources lie without their history; then they count as
    unchanged, and whoever sets the variable answers for that.
    """
    if given := os.environ.get("JAX_MEGAMOE_COMMIT"):
        return given, False
    head = _git("rev-parse", "--verify", "--quiet", "HEAD")
    return head or "unknown", bool(_git("status", "--porcelain", "--", ":/", *OUTPUTS)) or not head


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(
    path: pathlib.Path,
    records: Sequence[object],
    num_devices: int = 1,
    *,
    key: str = "records",
    **others: object,
) -> None:
    """Writes the records under a key, and what else is given, beside commit, date, device and
    versions, on a GPU driver and clock too."""
    revision, dirty = commit()
    on_gpu = jax.default_backend() == "gpu"
    result = {
        "commit": revision,
        "dirty": dirty,
        "date": datetime.date.today().isoformat(),
        "device": device(),
        "num_devices": num_devices,
        "driver": smi("driver_version") if on_gpu else None,
        "clock_mhz": min(sm_clocks(num_devices)) if on_gpu else None,
        "versions": versions(),
        key: list(records),
        **others,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def _git(*arguments: str) -> str:
    root = pathlib.Path(__file__).parent
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
