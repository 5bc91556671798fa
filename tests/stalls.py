"""The phases of a call in which a rank waits for a peer.

One that does not come, or stalls, is given up at the deadline, and the record says who waited for
what.
"""

from typing import Any, NamedTuple

import numpy as np

from tests import emulated
from tests.cases import Batch, normal_of
from tests.failures import PHASES, Failures

# T of both ranks, K, E, H, I: all routes go to rank 0, which needs two passes for them.
SIZE = (160, 4, 2, 64, 64)
POOL_FACTOR = 1.25
WAITS, STALLS = 1, 0  # ranks
DEADLINE_CAUSE = 0


class Stall(NamedTuple):
    """Of a rank that makes so many calls and of the next one so many kernels, -1: it does not come
    to it. phase: of the wait of its peer. first_token: of those that it may wait for."""

    calls: int
    kernels: int
    phase: str
    first_token: int = 0


# The peer waits for the tokens and the routing of a call, of which the plan is made; for them again
# where they overwrite those of the call before; for the sums of its tokens; for those of a later
# pass.
OF_A_PASS = {
    "inputs": Stall(0, -1, "peer_inputs"),
    "inputs of the next call": Stall(1, -1, "peer_inputs"),
    "sums": Stall(0, 0, "peer_sums"),
    "sums of the next pass": Stall(0, 1, "peer_sums", SIZE[0] // 4),
}
CASES = {
    f"{name} of a {'backward' if is_backward else 'forward'}": (is_backward, stall)
    for is_backward in (False, True)
    for name, stall in OF_A_PASS.items()
}


def judge(name: str, **how: Any) -> float:
    """Raises AssertionError unless the wait of a case ends as it should.

    Args:
      how: deadline and, of the machine, others of `emulated._run`.

    Returns:
      How long all calls took, in seconds.
    """
    is_backward, stall = CASES[name]
    calls = [emulated.Call(batch(), is_backward=is_backward)] * (stall.calls + 1)
    where = (stall.calls, stall.kernels)
    found = emulated.failures(calls, ranks=2, pool_factor=POOL_FACTOR, stall=where, **how)
    assert_told(found, stall)
    return found.seconds


def batch() -> Batch:
    made = normal_of(SIZE, np.zeros(SIZE[:2], np.int32))
    assert emulated.dims_of(made, 2, POOL_FACTOR).max_passes == 2
    return made


def assert_told(found: Failures, stall: Stall) -> None:
    """The rank that waits has failed in the call in which its peer stalls, alone, and its record is
    whole."""
    epoch = stall.calls + 1
    assert found.epochs[WAITS] == epoch and found.epochs[STALLS] == 0, found
    record = {field: int(found.records[WAITS][field]) for field in found.records.dtype.names or ()}
    assert PHASES[record["phase"]] == stall.phase, record
    right = {"cause": DEADLINE_CAUSE, "rank": WAITS, "peer": STALLS, "expert": -1}
    right |= {"expected": epoch, "epoch": epoch}
    assert {field: record[field] for field in right} == right, record
    assert record["found"] < epoch and record["waited_ns"] > 0, record
    if stall.phase == "peer_sums":
        assert stall.first_token <= record["block"] < SIZE[0] // 2, record
