"""A wait that fails becomes an exception that says who waited for whom, and the process goes on."""

import functools
import re
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jax_megamoe import _ffi

pytestmark = pytest.mark.gpu

MS = 1_000_000  # nanoseconds
RECORD = (
    r"ABORTED.*jax_megamoe: rank 0 {why} rank 1 after \d+ ms: phase probe, expert 3, block 7, "
    r"expected flag 1, found 0, epoch \d+"
)
GAVE_UP = RECORD.format(why="gave up waiting for")
WAS_TOLD = RECORD.format(why="was told to stop waiting for")


@functools.partial(jax.jit, static_argnames=("deadline_ns", "release_ns", "report"))
def probe(trigger: jax.Array, *, deadline_ns: int, release_ns: int, report: str) -> jax.Array:
    return _ffi.wait_probe(trigger, deadline_ns=deadline_ns, release_ns=release_ns, report=report)[
        0
    ]


def run(release_ns: int, report: str, deadline_ns: int = 50 * MS) -> int:
    came = probe(
        jnp.zeros(1, jnp.int32), deadline_ns=deadline_ns, release_ns=release_ns, report=report
    )
    return int(jax.device_get(came)[0])


@pytest.mark.parametrize("report", ["future", "next_call"])
@pytest.mark.parametrize("release_ns", [0, 5 * MS])
def test_flag_in_time(report: str, release_ns: int) -> None:
    assert run(release_ns, report, deadline_ns=10_000 * MS) == 1


def test_deadline_raises_in_the_failing_step_through_a_future() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=GAVE_UP):
        run(-1, "future")
    assert run(0, "future") == 1


def test_deadline_raises_in_the_next_call() -> None:
    assert run(-1, "next_call") == 0
    with pytest.raises(jax.errors.JaxRuntimeError, match=GAVE_UP):
        run(0, "next_call")
    assert run(0, "next_call") == 1


def test_first_of_two_faults_is_kept() -> None:
    """Two failing calls before the host looks: the record is the first one's."""
    trigger = jnp.zeros(1, jnp.int32)
    static = {"deadline_ns": 200 * MS, "release_ns": -1, "report": "next_call"}
    jax.block_until_ready([probe(trigger, **static), probe(trigger, **static)])
    with pytest.raises(jax.errors.JaxRuntimeError, match=GAVE_UP) as first:
        run(0, "next_call")
    assert run(0, "next_call") == 1
    with pytest.raises(jax.errors.JaxRuntimeError, match=GAVE_UP) as later:
        run(-1, "future")
    epochs = [int(re.findall(r"epoch (\d+)", str(e.value))[0]) for e in (first, later)]
    # The second failing call, the refused one's successor and the last one lie between.
    assert epochs[1] == epochs[0] + 3


def test_abort_ends_a_wait_long_before_its_deadline() -> None:
    module, reason = _ffi.extension()
    assert module is not None, reason
    run(0, "future")
    timer = threading.Timer(0.3, module.abort_waits, args=(0,))
    timer.start()
    start = time.perf_counter()
    with pytest.raises(jax.errors.JaxRuntimeError, match=WAS_TOLD):
        run(-1, "future", deadline_ns=60_000 * MS)
    assert time.perf_counter() - start < 5
    timer.join()
    assert run(0, "future") == 1
