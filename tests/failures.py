"""What the waits of a run of calls have left, on the emulated machine and for ranks on one GPU."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

HEADER = Path(__file__).resolve().parents[1] / "cuda" / "shared" / "fault.h"

# FaultRecord of cuda/shared/fault.h.
RECORD = np.dtype(
    [
        *((name, np.int32) for name in ("cause", "phase", "rank", "peer", "expert", "block")),
        *((name, np.uint32) for name in ("expected", "found", "epoch")),
        ("waited_ns", np.uint64),
    ],
    align=True,
)
# Of a rank, as tests/ranks/calls.h writes it.
FAILED = np.dtype([("epoch", np.uint32), ("record", RECORD)])


def _phases() -> list[str]:
    """Their words, by number."""
    (words,) = re.findall(r"kPhaseNames\[\] = \{([^}]*)\}", HEADER.read_text())
    return re.findall(r'"(\w+)"', words)


PHASES = _phases()


class Failures(NamedTuple):
    """Of each rank the epoch of the last call that has failed, or 0, and the record of the first;
    how long all calls took."""

    epochs: np.ndarray
    records: np.ndarray
    seconds: float
