"""What the scorecard asks for: the lines, their rules, and the programs and tests that answer.

Where a line and its like for two GPUs differ in the machine alone, their names say so.
"""

from _scorecard import Line, Rule
from _scorecard_any_machine import ANY_MACHINE
from _scorecard_fp8 import FP8
from _scorecard_one_gpu import ONE_GPU
from _scorecard_two_gpus import TWO_GPUS


def _skips(id: str, gpus: int, lines: tuple[Line, ...]) -> Line:
    suites = tuple(part for line in lines for part in line.parts if part.is_suite)
    what = "tests that were skipped although their hardware is declared"
    return Line(id, what, suites, (Rule("skipped", at_most=0),), gpus)


LINES = (
    *ANY_MACHINE,
    *ONE_GPU,
    *FP8,
    _skips("skips", 1, ONE_GPU + FP8),
    *TWO_GPUS,
    _skips("skips_ranks", 2, TWO_GPUS),
)
