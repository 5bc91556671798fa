"""Multiprocessors that are kept from the kernels for a while."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import jax

from jax_megamoe import _ffi

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


@contextlib.contextmanager
def all_but(free: int) -> Iterator[None]:
    """Leaves that many free; -1: all but one."""
    with held(1 if free < 0 else num_multiprocessors() - free):
        yield


def num_multiprocessors() -> int:
    return jax.devices()[0].core_count


def while_they_come_and_go(work: Callable[[], None]) -> None:
    """Does the work while between 32 and all but one are held, another number every millisecond."""
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
        work()
    finally:
        stop.set()
        thread.join()
    assert num_holds > 1
