"""compute-sanitizer finds nothing in small calls of every kind.

racecheck cannot run kernels of wgmma and TMA: races are hunted by `test_races`.
"""

import pytest

from tests import sanitizer
from tests.cases import ROUTINGS

pytestmark = pytest.mark.gpu

# Three sizes, fused and in parts.
NUM_CALLS = 6 * len(ROUTINGS)


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "initcheck"])
def test_clean(tool: str) -> None:
    programs = "tests.forward_programs"
    sanitizer.assert_clean(tool, programs, num_calls=NUM_CALLS, timeout_s=90)
