"""Calls with seeded delays in every role, in a process that has the test build.

`tests.races` starts one and has the right results.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import _ffi
from tests.backward import num_that_differ

# The sites of cuda/pipeline/delay.cuh, in its order.
ROLES = ("load", "store", "dispatch", "multiply", "combine")


class Calls(NamedTuple):
    """What is called in turn.

    Attributes:
      of: by what a call is, for texts: the bits of its results, made by some launches.
      fused: the launches of a call as users make it. unfused: one for each of its parts.
    """

    of: Mapping[Any, Callable[[Any], Sequence[jax.Array]]]
    fused: Any
    unfused: Any

    def results(self) -> list[np.ndarray]:
        """Of every call, one behind another."""
        return [np.asarray(a) for call in self.of.values() for a in call(self.fused)]


def run(calls: Calls, right: Iterable[np.ndarray], num_runs: int) -> dict[str, Any]:
    """So many runs, each bitwise equal to `calls.results()` of a process without delays; raises
    AssertionError for the first that is not.

    Returns:
      How many runs there were, and how often each role was delayed.
    """
    module, reason = _ffi.extension()
    assert module is not None, reason
    wanted = [jnp.asarray(a) for a in right]
    assert wanted and len(wanted) % len(calls.of) == 0
    per_call = len(wanted) // len(calls.of)
    num_delays = np.zeros(len(ROLES), np.int64)
    # Seed 0 has no delays.
    for seed in range(num_runs + 1):
        which = seed % len(calls.of)
        name, call = list(calls.of.items())[which]
        launches = calls.unfused if seed % 8 == 7 else calls.fused
        module.set_delay_seed(seed)
        found = list(call(launches))
        of_call = wanted[which * per_call : (which + 1) * per_call]
        wrong = [int(n) for n in num_that_differ(found, of_call)]
        assert not any(wrong), f"{wrong} values differ: seed {seed}, {name}, {launches}"
        num_delays += np.asarray(module.count_delays())
    return {"runs": num_runs, "delays": dict(zip(ROLES, num_delays.tolist(), strict=True))}
