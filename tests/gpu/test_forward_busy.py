"""The kernel finishes, with the same bits, however few pairs of multiprocessors are free."""

import time

import pytest

from jax_megamoe import _ffi
from tests import busy
from tests.forward import SIZES, dims_of, launched, num_rows_that_differ, operands, random_batch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("launches", [_ffi.FUSED, _ffi.UNFUSED], ids=["fused", "unfused"])
@pytest.mark.parametrize("free", [2, 4, 8, 66, -1])
@pytest.mark.parametrize(("size", "routing"), [(SIZES[5], "distinct"), (SIZES[6], "skewed")])
def test_any_number_of_free_multiprocessors(
    size: tuple[int, ...], routing: str, free: int, launches: tuple[int, ...]
) -> None:
    """free: how many are; -1: all but one."""
    batch = random_batch(size, routing)
    arrays, dims = operands(batch), dims_of(batch)
    want, _ = launched(*arrays, dims=dims, launches=launches)
    # Everything is compiled and loaded before anything is held.
    assert int(num_rows_that_differ(want, want)) == 0
    with busy.all_but(free):
        for _ in range(5):
            y, _ = launched(*arrays, dims=dims, launches=launches)
            assert int(num_rows_that_differ(y, want)) == 0


def test_multiprocessors_that_come_and_go() -> None:
    batch = random_batch(SIZES[5], "distinct")
    arrays, dims = operands(batch), dims_of(batch)
    want, _ = launched(*arrays, dims=dims, launches=_ffi.FUSED)
    assert int(num_rows_that_differ(want, want)) == 0
    wrong: list[int] = []

    def work() -> None:
        ys = [launched(*arrays, dims=dims, launches=_ffi.FUSED)[0] for _ in range(300)]
        wrong.extend(int(num_rows_that_differ(y, want)) for y in ys)

    busy.while_they_come_and_go(work)
    assert wrong == [0] * 300


def test_a_hold_that_meets_its_deadline_is_told_apart() -> None:
    module, reason = _ffi.extension()
    assert module is not None, reason
    module.hold_multiprocessors(3, 0.05)
    time.sleep(0.3)
    assert module.release_multiprocessors() == 0
    with pytest.raises(RuntimeError, match="ReleaseMultiprocessors"):
        module.release_multiprocessors()
