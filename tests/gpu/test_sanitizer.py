"""compute-sanitizer finds nothing in small calls of every kind, of both passes.

racecheck cannot run kernels of wgmma and TMA: races are hunted by `test_races`.
"""

import pytest

from tests import sanitizer
from tests.cases import ROUTINGS

pytestmark = pytest.mark.gpu


FORWARD = ("tests.forward_programs", 3, 90)
BACKWARD = ("tests.backward_programs", 2, 180)
FP8_FORWARD = ("tests.fp8_programs", 2, 150)
FP8_BACKWARD = ("tests.fp8_backward", 2, 220)


@pytest.mark.parametrize(
    ("tool", "program", "of"),
    [
        ("memcheck", "tiny", FORWARD),
        ("synccheck", "tiny", FORWARD),
        ("initcheck", "tiny", FORWARD),
        ("memcheck", "tiny", BACKWARD),
        ("synccheck", "tiny", BACKWARD),
        # initcheck does not see what TMA stores of tensors write: dx of the rows, which the sums
        # read, and dW. In the forward the dispatch has written where o lies. That nothing reads
        # what nobody wrote is shown by NaN in all memory.
        ("initcheck", "tiny_without_sums", BACKWARD),
        # No initcheck: products of codes load the scales of pads, which nobody wrote, for sums that
        # are not stored.
        ("memcheck", "tiny", FP8_FORWARD),
        ("synccheck", "tiny", FP8_FORWARD),
        ("memcheck", "tiny", FP8_BACKWARD),
        ("synccheck", "tiny", FP8_BACKWARD),
    ],
)
def test_clean(tool: str, program: str, of: tuple[str, int, float]) -> None:
    programs, num_sizes, timeout_s = of
    # Each size fused and in parts.
    num_calls = 2 * num_sizes * len(ROUTINGS)
    sanitizer.assert_clean(tool, programs, program, num_calls=num_calls, timeout_s=timeout_s)
