"""compute-sanitizer finds nothing in small backward calls of every kind.

racecheck cannot run kernels of wgmma and TMA: races are hunted by `test_backward_races`.
"""

import pytest

from tests import sanitizer
from tests.cases import ROUTINGS
from tests.forward_programs import counted
from tests.process import run_on_gpu

pytestmark = pytest.mark.gpu

# Two sizes, fused and in parts.
NUM_CALLS = 4 * len(ROUTINGS)


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "initcheck"])
def test_clean(tool: str) -> None:
    """XLA's arrays are allocations of their own, so that the tool knows where each ends."""
    result = run_on_gpu(
        "-m",
        "tests.backward_programs",
        "tiny",
        under=sanitizer.command(tool),
        timeout_s=180,
        XLA_PYTHON_CLIENT_ALLOCATOR="platform",
    )
    output = result.stdout + result.stderr
    assert sanitizer.num_errors(output) == 0, output
    program = [line for line in result.stdout.splitlines() if not line.startswith("=")]
    assert result.returncode == 0, output
    assert counted("\n".join(program)) == {"calls": NUM_CALLS}
