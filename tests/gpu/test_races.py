"""A thousand runs of a pass with random delays in every role and poisoned memory: always the same
bits.

They need the test build of the extension (MEGAMOE_DELAYS), which `make test-gpu` makes.
"""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests import backward_programs, forward_programs
from tests.forward_programs import ROLES, counted
from tests.process import run_on_gpu

pytestmark = pytest.mark.gpu

NUM_RUNS = 1000
# A role that is delayed hardly ever proves nothing.
MIN_DELAYS = 1000
PASSES = {"forward": forward_programs, "backward": backward_programs}


@pytest.mark.parametrize("programs", PASSES.values(), ids=PASSES.keys())
def test_delays_change_no_bit(programs: ModuleType, tmp_path: Path) -> None:
    """The right bits are those of the extension that users run, in this process."""
    path = tmp_path / "results.npz"
    np.savez(path, *programs.results())
    result = run_on_gpu(
        "-m",
        programs.__name__,
        "delays",
        str(path),
        str(NUM_RUNS),
        JAX_MEGAMOE_EXTENSION="_cuda_delays",
    )
    assert result.returncode == 0, result.stderr
    found = counted(result.stdout)
    assert found["runs"] == NUM_RUNS
    assert {role: n for role, n in found["delays"].items() if n < MIN_DELAYS} == {}
    assert set(found["delays"]) == set(ROLES)
