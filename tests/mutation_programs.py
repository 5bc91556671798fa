"""The GPU suite's checks of the backward with one seeded fault, in a process of its own:

    python -m tests.mutation_programs NUMBER

It needs the test build, JAX_MEGAMOE_EXTENSION=_cuda_delays, which fills results with NaN before a
call. Its last line, "done: ...", names the checks that failed.
"""

import functools
import sys
from collections.abc import Callable

from jax_megamoe import _ffi
from tests.cases import BF16, F32
from tests.forward import SIZES
from tests.forward_programs import done
from tests.gpu import test_backward as suite
from tests.mutations import FAULTS, failing


def all_of(*checks: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        for check in checks:
            check()

    return run


exact = functools.partial(functools.partial, suite.test_oracle_is_exact)
rows = functools.partial(functools.partial, suite.test_every_number_of_rows)
sums = functools.partial(functools.partial, suite.test_sums_are_float32)

# The suite's own, with a few of their parameters: a few seconds in all.
CHECKS: dict[str, Callable[[], None]] = {
    "oracle": all_of(
        exact(SIZES[2], "invalid", BF16),
        exact(SIZES[3], "skewed", F32),
        exact(SIZES[4], "one_expert", BF16),
    ),
    "every number of rows": all_of(*map(rows, (1, 64, 65, 129, 193))),
    "weight of zero": functools.partial(suite.test_a_route_of_weight_zero_has_its_gradient, [1, 0]),
    "error of every expert": functools.partial(
        suite.test_error_of_every_expert_is_that_of_an_unfused_path, 0
    ),
    "error with many choices": suite.test_error_with_many_choices,
    "sums in float32": all_of(sums("dx"), sums("dW")),
    "float32 gradients": functools.partial(
        suite.test_float32_gradients_are_the_sums_themselves, SIZES[3]
    ),
    "parts and repeats": functools.partial(
        suite.test_fused_equals_its_parts_and_itself, SIZES[3], "distinct", BF16
    ),
    "frozen experts": suite.test_frozen_experts_change_nothing_else,
    "NaN of one token": suite.test_nan_stays_with_its_token_and_its_experts,
    "weights of one expert": functools.partial(
        suite.test_weights_of_one_expert_reach_no_other, float("inf")
    ),
}


def main(number: int) -> None:
    module, reason = _ffi.extension()
    assert module is not None, reason
    assert module.fault_names() == [fault.name for fault in FAULTS], "build the extension again"
    module.set_fault(number)
    done(failing=list(failing(CHECKS)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
