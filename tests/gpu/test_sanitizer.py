"""compute-sanitizer finds nothing in small calls of every kind, of both passes.

racecheck cannot run kernels of wgmma and TMA: races are hunted by `test_races`.
"""

import pytest

from tests import sanitizer
from tests.cases import ROUTINGS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "initcheck"])
@pytest.mark.parametrize(
    ("programs", "num_sizes", "timeout_s"),
    [("tests.forward_programs", 3, 90), ("tests.backward_programs", 2, 180)],
)
def test_clean(programs: str, num_sizes: int, timeout_s: float, tool: str) -> None:
    # Each size fused and in parts.
    num_calls = 2 * num_sizes * len(ROUTINGS)
    sanitizer.assert_clean(tool, programs, num_calls=num_calls, timeout_s=timeout_s)
