"""Python programs in processes of their own, for what a process can do once only."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(program: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program from the repository's root on 8 simulated devices; at most two minutes."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
