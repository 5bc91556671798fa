"""A group of two GPUs of one process of which one does not come, or stalls: who raises, and who
goes on."""

import functools
import os
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_megamoe
from jax_megamoe import _ffi
from tests import layer, peers, stalled_calls

pytestmark = pytest.mark.multi_gpu(2)

AXIS = "expert"
DEADLINE_S = 2.0
N = 100
# Of their own: a group that has failed does for good.
CONFIGURATIONS = iter(range(0x1000, 0x2000))
TOKENS = iter(range(1002, 2000, 2))


@functools.cache
def probe(configuration: int, ranks: tuple[int, ...]) -> jax.stages.Wrapped:
    """[2, N] -> [2, 2, N]: what each rank receives, of which only some make the call."""

    def call(row: jax.Array) -> jax.Array:
        return _ffi.peer_probe(
            row, axis_name=AXIS, configuration=configuration, deadline_s=DEADLINE_S
        )

    def run(row: jax.Array) -> jax.Array:
        comes = jnp.isin(jax.lax.axis_index(AXIS), jnp.asarray(ranks))
        return jax.lax.cond(comes, call, lambda row: jnp.stack([row] * 2), row)

    return peers.on_each_rank(layer.expert_mesh(2), run)


def run(configuration: int, *ranks: int) -> np.ndarray:
    return np.asarray(probe(configuration, ranks)(peers.rows(2, N)))


def assert_works(configuration: int) -> None:
    np.testing.assert_array_equal(run(configuration, 0, 1), np.stack([peers.rows(2, N)] * 2))


def text_of(rank: int) -> str:
    return (
        rf"rank {rank} gave up waiting for rank {1 - rank} \(pid {os.getpid()} on .*, GPU .*\) "
        r"after 2\d\d\d ms: phase probe, expert -1, block 0, .*, epoch \d+"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_the_group_that_failed_raises_and_others_go_on(rank: int) -> None:
    fails, works = next(CONFIGURATIONS), next(CONFIGURATIONS)
    for configuration in (fails, works):
        assert_works(configuration)
    run(fails, rank)
    for _ in range(3):
        assert_works(works)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"ABORTED.*{text_of(rank)}"):
        run(fails, 0, 1)
    start = time.perf_counter()
    with pytest.raises(jax.errors.JaxRuntimeError, match="have to start again"):
        run(fails, 0, 1)
    assert_works(works)
    assert time.perf_counter() - start < DEADLINE_S, "the other rank waited for this one"
    # Now that it has made a call that this one has not.
    with pytest.raises(RuntimeError, match=f"{1 - rank} was told .* makes no more calls"):
        jax_megamoe.check_faults()
    jax_megamoe.check_faults()


def test_the_last_call_is_raised_on_request() -> None:
    configuration = next(CONFIGURATIONS)
    assert_works(configuration)
    jax_megamoe.check_faults()
    run(configuration, 1)
    with pytest.raises(RuntimeError, match=text_of(1)):
        jax_megamoe.check_faults()
    jax_megamoe.check_faults()
    with pytest.raises(jax.errors.JaxRuntimeError, match="since an earlier call failed: rank 1"):
        run(configuration, 0, 1)


def test_calls_behind_one_that_failed_do_not_wait_to_deadlines_of_their_own() -> None:
    configuration = next(CONFIGURATIONS)
    assert_works(configuration)
    start = time.perf_counter()
    results = [probe(configuration, (0,))(peers.rows(2, N)) for _ in range(20)]
    jax.block_until_ready(results)
    assert time.perf_counter() - start < 3 * DEADLINE_S
    with pytest.raises(RuntimeError, match=re.compile(text_of(0))):
        jax_megamoe.check_faults()


# By what rank 1 waits for: the whole calls before, what rank 0 does of the one in which it stalls,
# the phase.
STALLS = {
    "inputs": (0, None, "peer_inputs"),
    "inputs of the next call": (1, None, "peer_inputs"),
    "sums": (1, stalled_calls.DISPATCH, "peer_sums"),
}


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", STALLS)
def test_who_stalls_in_a_call_of_the_layer_is_given_up_and_named(
    name: str, is_backward: bool
) -> None:
    num_calls, of_rank_0, phase = STALLS[name]
    batch = stalled_calls.batch_of(next(TOKENS))
    fused = _ffi.BACKWARD_FUSED if is_backward else _ffi.FUSED
    whole, arrays = stalled_calls.program(batch, is_backward, fused, DEADLINE_S)
    for _ in range(num_calls):
        jax.block_until_ready(whole(*arrays))
    jax_megamoe.check_faults()
    stalled, _ = stalled_calls.program(batch, is_backward, of_rank_0, DEADLINE_S)
    jax.block_until_ready(stalled(*arrays))
    epoch = num_calls + 1
    text = (
        rf"rank 1 gave up waiting for rank 0 \(pid {os.getpid()} on .*, GPU .*\) after 2\d\d\d ms: "
        rf"phase {phase}, expert -1, block \d+, expected flag {epoch}, found {num_calls}, "
        rf"epoch {epoch}"
    )
    with pytest.raises(RuntimeError, match=text):
        jax_megamoe.check_faults()
