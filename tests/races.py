"""Runs of a pass with random delays in every role, in a process that has the test build."""

from pathlib import Path
from types import ModuleType

import numpy as np

from tests.forward_programs import ROLES, counted
from tests.process import run_on_gpu


def delayed_runs(programs: ModuleType, folder: Path, runs: int) -> dict[str, int]:
    """Each has the bits of the extension that users run, which runs here, without delays.

    Args:
      programs: tests.forward_programs or tests.backward_programs. folder: for a file.

    Returns:
      How often each role was delayed.
    """
    path = folder / "results.npz"
    np.savez(path, *programs.results())
    result = run_on_gpu(
        *("-m", programs.__name__, "delays", str(path), str(runs)),
        JAX_MEGAMOE_EXTENSION="_cuda_delays",
        timeout_s=300,
    )
    assert result.returncode == 0, result.stderr
    found = counted(result.stdout)
    assert found["runs"] == runs
    assert set(found["delays"]) == set(ROLES)
    return found["delays"]
