"""A rank that stalls, in each phase of a call, on the emulated machine."""

from typing import Any

import numpy as np
import pytest

from tests import emulated, stalls
from tests.failures import PHASES, RECORD, Failures

# Turns of the machine, of which a call takes fewer.
HOW: dict[str, Any] = {"deadline": 30_000}


@pytest.mark.parametrize("name", stalls.CASES)
def test_who_stalls_is_given_up_and_named(name: str) -> None:
    stalls.judge(name, **HOW)


def test_nobody_is_given_up_where_nobody_stalls() -> None:
    call = emulated.Call(stalls.batch(), is_backward=True)
    how: dict[str, Any] = {"ranks": 2, "pool_factor": stalls.POOL_FACTOR, **HOW}
    assert not emulated.failures([call] * 2, **how).epochs.any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("cause", 1), ("phase", 1), ("rank", 0), ("peer", 1), ("expert", 0)),
        *(("block", 0), ("block", 80), ("expected", 2), ("found", 1), ("epoch", 2)),
        ("waited_ns", 0),
    ],
)
def test_a_record_that_is_not_whole_is_found(field: str, value: int) -> None:
    record = np.array([(0, PHASES.index("peer_sums"), 1, 0, -1, 40, 1, 0, 1, 5)], RECORD)
    found = Failures(np.array([0, 1]), np.concatenate([np.zeros_like(record), record]), 0.0)
    stall = stalls.OF_A_PASS["sums of the next pass"]
    stalls.assert_told(found, stall)
    found.records[1][field] = value
    with pytest.raises(AssertionError):
        stalls.assert_told(found, stall)
