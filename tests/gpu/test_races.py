"""A thousand runs of a pass with random delays in every role and poisoned memory: always the same
bits.

They need the test build of the extension (MEGAMOE_DELAYS), which `make test-gpu` makes.
"""

from pathlib import Path
from types import ModuleType

import pytest

from tests import backward_programs, forward_programs, races

pytestmark = pytest.mark.gpu

NUM_RUNS = 1000
# A role that is delayed hardly ever proves nothing.
MIN_DELAYS = 1000
PASSES = {"forward": forward_programs, "backward": backward_programs}


@pytest.mark.parametrize("programs", PASSES.values(), ids=PASSES.keys())
def test_delays_change_no_bit(programs: ModuleType, tmp_path: Path) -> None:
    delays = races.delayed_runs(programs, tmp_path, NUM_RUNS)
    assert {role: n for role, n in delays.items() if n < MIN_DELAYS} == {}
