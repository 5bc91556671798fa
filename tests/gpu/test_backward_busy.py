"""The backward finishes, with the same bits, however few pairs of multiprocessors are free."""

from typing import Any

import numpy as np
import pytest

from jax_megamoe import _ffi
from tests import busy
from tests.backward import launched, num_values_that_differ, operands
from tests.cases import BF16, F32
from tests.forward import SIZES, dims_of, random_batch

pytestmark = pytest.mark.gpu

LAUNCHES = {"fused": _ffi.BACKWARD_FUSED, "unfused": _ffi.BACKWARD_UNFUSED}


def compiled_call(
    size: tuple[int, ...], routing: str, dtype: np.dtype, launches: tuple[int, ...]
) -> tuple[Any, Any]:
    """A call without arguments, and what it returns; all that runs later is compiled and loaded."""
    batch = random_batch(size, routing)
    arrays, dims = operands(batch, dtype), dims_of(batch)

    def call() -> Any:
        return launched(*arrays, dims=dims, launches=launches)

    want = call()
    assert num_values_that_differ(want, want) == 0
    return call, want


@pytest.mark.parametrize("launches", LAUNCHES)
@pytest.mark.parametrize("free", [2, 4, 8, 66, -1])
@pytest.mark.parametrize(
    ("size", "routing", "dtype"), [(SIZES[5], "distinct", BF16), (SIZES[6], "skewed", F32)]
)
def test_any_number_of_free_multiprocessors(
    size: tuple[int, ...], routing: str, dtype: np.dtype, free: int, launches: str
) -> None:
    """free: how many are; -1: all but one."""
    call, want = compiled_call(size, routing, dtype, LAUNCHES[launches])
    with busy.all_but(free):
        for _ in range(5):
            assert num_values_that_differ(call(), want) == 0


def test_multiprocessors_that_come_and_go() -> None:
    call, want = compiled_call(SIZES[5], "distinct", BF16, _ffi.BACKWARD_FUSED)
    wrong: list[int] = []

    def work() -> None:
        for _ in range(20):
            found = [call() for _ in range(10)]
            wrong.extend(num_values_that_differ(gradients, want) for gradients in found)

    busy.while_they_come_and_go(work)
    assert wrong == [0] * 200
