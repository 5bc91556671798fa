"""Runs of a pass with random delays in every role, in a process that has the test build."""

from pathlib import Path
from types import ModuleType

import numpy as np

from tests.delays import ROLES
from tests.forward_programs import counted
from tests.process import run_on_gpu


def delayed_runs(
    programs: ModuleType, folder: Path, runs: int, timeout_s: float = 300
) -> dict[str, int]:
    """Each has the bits of the extension that users run, which runs here, without delays.

    Args:
      programs: a module with `delayed_calls` and a program `delayed`. folder: for a file.

    Returns:
      How often each role was delayed.
    """
    path = folder / "results.npz"
    np.savez(path, *programs.delayed_calls().results())
    result = run_on_gpu(
        *("-m", programs.__name__, "delayed", str(path), str(runs)),
        JAX_MEGAMOE_EXTENSION="_cuda_delays",
        timeout_s=timeout_s,
    )
    assert result.returncode == 0, result.stderr
    found = counted(result.stdout)
    assert found["runs"] == runs
    assert set(found["delays"]) == set(ROLES)
    return found["delays"]
