"""compute-sanitizer finds nothing in small backward calls of every kind.

racecheck cannot run kernels of wgmma and TMA: races are hunted by `test_races`.
"""

import pytest

from tests import sanitizer
from tests.cases import ROUTINGS

pytestmark = pytest.mark.gpu

# Two sizes, fused and in parts.
NUM_CALLS = 4 * len(ROUTINGS)


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "initcheck"])
def test_clean(tool: str) -> None:
    programs = "tests.backward_programs"
    sanitizer.assert_clean(tool, programs, num_calls=NUM_CALLS, timeout_s=180)
