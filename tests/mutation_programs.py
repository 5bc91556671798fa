"""The GPU suite's checks of the backward with seeded faults, one a line that it reads:

    python -m tests.mutation_programs

It is the worker of tests.mutation_driver. It needs the test build of the extension,
JAX_MEGAMOE_EXTENSION=_cuda_delays, which fills results with NaN before a call.
"""

import functools
import sys
from collections.abc import Callable

import jax

from jax_megamoe import _ffi
from tests.cases import BF16, F32
from tests.forward import SIZES
from tests.gpu import test_backward as suite
from tests.mutation_driver import ANSWER
from tests.mutations import FAULTS, error_of


def all_of(*checks: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for check in checks:
            check()

    return run


exact = functools.partial(functools.partial, suite.test_oracle_is_exact)
rows = functools.partial(functools.partial, suite.test_every_number_of_rows)
sums = functools.partial(functools.partial, suite.test_sums_are_float32)
weight_of_zero = functools.partial(suite.test_a_route_of_weight_zero_has_its_gradient, [1, 0])

# The suite's own, with a few of their parameters. A fault is that of the first to fail: those that
# find most in little time come first, the two with a host's float64 layer of many rows last.
CHECKS: dict[str, Callable[[], None]] = {
    "oracle": all_of(
        exact(SIZES[2], "invalid", BF16),
        exact(SIZES[3], "skewed", F32),
        exact(SIZES[4], "one_expert", BF16),
    ),
    "every number of rows": all_of(*map(rows, (1, 64, 65, 129, 193))),
    "weight of zero": weight_of_zero,
    "sums in float32": all_of(sums("dx"), sums("dW")),
    "NaN of one token": suite.test_nan_stays_with_its_token_and_its_experts,
    "weights of one expert": functools.partial(
        suite.test_weights_of_one_expert_reach_no_other, float("inf")
    ),
    "float32 gradients": functools.partial(
        suite.test_float32_gradients_are_the_sums_themselves, SIZES[3]
    ),
    "error of every expert": functools.partial(
        suite.test_error_of_every_expert_is_that_of_an_unfused_path, 0
    ),
    "parts and repeats": functools.partial(
        suite.test_fused_equals_its_parts_and_itself, SIZES[3], "distinct", BF16
    ),
    "frozen experts": suite.test_frozen_experts_change_nothing_else,
    "error with many choices": suite.test_error_with_many_choices,
}


def settle() -> None:
    """Takes the error that a wait leaves to the call after it; then a call must be right.

    If it is not, the process ends, and the fault counts as one that ended it.
    """
    try:
        weight_of_zero()
    except jax.errors.JaxRuntimeError:
        weight_of_zero()


def main() -> None:
    module, reason = _ffi.extension()
    assert module is not None, reason
    assert module.fault_names() == [fault.name for fault in FAULTS], "build the extension again"
    settle()  # a fault is that of the device which JAX has opened
    for line in sys.stdin:
        number, name = line.rstrip("\n").split(" ", maxsplit=1)
        module.set_fault(int(number))
        error = error_of(CHECKS[name])
        module.set_fault(0)
        settle()
        print(ANSWER + " ".join(error.split())[:1000], flush=True)


if __name__ == "__main__":
    main()
