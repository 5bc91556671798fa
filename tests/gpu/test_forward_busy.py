"""The kernel finishes, with the same bits, however few pairs of multiprocessors are free."""

import contextlib
import threading
import time
from collections.abc import Iterator

import jax
import pytest

from jax_megamoe import _ffi
from tests.forward import SIZES, dims_of, launched, num_rows_that_differ, operands, random_batch

pytestmark = pytest.mark.gpu

# Longer than a test takes, so that a kernel that hangs ends too.
DEADLINE_S = 20.0


@contextlib.contextmanager
def held(count: int, deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """Keeps that many multiprocessors from the kernels, to the end and not to the deadline."""
    module, reason = _ffi.extension()
    assert module is not None, reason
    module.hold_multiprocessors(count, deadline_s)
    try:
        yield
    finally:
        still_held = module.release_multiprocessors()
    assert still_held == count


def num_multiprocessors() -> int:
    return jax.devices()[0].core_count


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
    with held(1 if free < 0 else num_multiprocessors() - free):
        for _ in range(5):
            y, _ = launched(*arrays, dims=dims, launches=launches)
            assert int(num_rows_that_differ(y, want)) == 0


def test_multiprocessors_that_come_and_go() -> None:
    batch = random_batch(SIZES[5], "distinct")
    arrays, dims = operands(batch), dims_of(batch)
    want, _ = launched(*arrays, dims=dims, launches=_ffi.FUSED)
    assert int(num_rows_that_differ(want, want)) == 0
    stop, num_holds = threading.Event(), 0

    def hold_now_and_then() -> None:
        nonlocal num_holds
        while not stop.is_set():
            with held(num_multiprocessors() - 1 - num_holds % 100):
                time.sleep(0.001)
            num_holds += 1

    thread = threading.Thread(target=hold_now_and_then)
    thread.start()
    try:
        ys = [launched(*arrays, dims=dims, launches=_ffi.FUSED)[0] for _ in range(300)]
        wrong = [int(num_rows_that_differ(y, want)) for y in ys]
    finally:
        stop.set()
        thread.join()
    assert num_holds > 1
    assert wrong == [0] * 300


def test_a_hold_that_meets_its_deadline_is_told_apart() -> None:
    module, reason = _ffi.extension()
    assert module is not None, reason
    module.hold_multiprocessors(3, 0.05)
    time.sleep(0.3)
    assert module.release_multiprocessors() == 0
    with pytest.raises(RuntimeError, match="ReleaseMultiprocessors"):
        module.release_multiprocessors()
