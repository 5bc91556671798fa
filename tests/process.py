"""Python programs in processes of their own, for what a process can do once only."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]


def run_python(program: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program from the repository's root on 8 simulated devices; at most two minutes."""
    command = [sys.executable, "-c", program, *args]
    return _run(command, cpu_environment(**environment), timeout_s=120)


def run_module(
    module: str, *args: str, timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The same of a module."""
    command = [sys.executable, "-m", module, *args]
    return _run(command, cpu_environment(**environment), timeout_s)


def run_on_gpu(
    *arguments: str, under: Sequence[str] = (), timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments on the GPU, beside the memory that this process holds.

    under: a command that runs it, such as a checker with its options.
    """
    return _run([*under, sys.executable, *arguments], gpu_environment(**environment), timeout_s)


def start_on_gpu(
    *arguments: str, stderr: IO[str], stdout: IO[str] | int = subprocess.PIPE, **environment: str
) -> subprocess.Popen[str]:
    """Starts Python as `run_on_gpu` runs it, with pipes to its input and, unless a file takes it,
    from its output."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=gpu_environment(**environment),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        text=True,
    )


def cpu_environment(**changed: str) -> dict[str, str]:
    """This process's, for a program on 8 simulated devices."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
        **changed,
    }


def gpu_environment(**changed: str) -> dict[str, str]:
    """This process's, for a program on its GPUs beside other programs."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": str(ROOT),
        **changed,
    }


def _run(
    command: Sequence[str], env: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
