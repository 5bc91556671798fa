"""A wait inside the forward that cannot end gives up and says for what; the process goes on."""

import functools
import time
from typing import Any

import jax
import numpy as np
import pytest

from jax_megamoe import _ffi
from jax_megamoe.config import Dims, MegaMoEConfig
from tests.forward import dims_of, forward, operands, random_batch

pytestmark = pytest.mark.gpu

# T, K, E, H, I: more items than a wave holds, so that many blocks wait at once.
SIZE = (2048, 8, 16, 512, 512)


@functools.partial(jax.jit, static_argnames=("dims", "launches", "deadline_s"))
def impatient(
    *arrays: Any, dims: Dims, launches: tuple[int, ...] = _ffi.FUSED, deadline_s: float = 0.2
) -> Any:
    config = MegaMoEConfig(backend="cuda")
    return _ffi.forward_call(
        *arrays,
        dims=dims,
        config=config,
        axis_name=None,
        launches=launches,
        deadline_s=deadline_s,
    )


# One part without the one before it: its input never comes.
@pytest.mark.parametrize(
    ("launches", "phase"), [((2,), "dispatch"), ((4,), "gate_up"), ((8,), "down")]
)
def test_gives_up_and_names_the_phase(launches: tuple[int, ...], phase: str) -> None:
    batch = random_batch(SIZE, "distinct")
    arrays = operands(batch)
    expected = np.asarray(forward(*arrays)[0])
    start = time.perf_counter()
    jax.block_until_ready(impatient(*arrays, dims=dims_of(batch), launches=launches))
    assert time.perf_counter() - start < 60, "compilation included"
    message = rf"ABORTED.*gave up waiting for rank 0 after \d+ ms: phase {phase}, .*block \d+"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(forward(*arrays))
    np.testing.assert_array_equal(np.asarray(forward(*arrays)[0]), expected)


def test_gives_up_in_the_middle() -> None:
    """Waits that are no fault last longer: some roles go on without their input, others with it."""
    batch = random_batch((16384, 8, 32, 1024, 512), "distinct")
    arrays, dims = operands(batch), dims_of(batch)
    expected = np.asarray(forward(*arrays)[0])
    faults = 0
    for deadline_us in (1, 3, 10, 30, 100):
        for _ in range(20):
            try:
                jax.block_until_ready(impatient(*arrays, dims=dims, deadline_s=deadline_us * 1e-6))
            except jax.errors.JaxRuntimeError as error:  # of the call before
                assert "gave up waiting" in str(error)
                faults += 1
    assert faults > 0
    try:
        jax.block_until_ready(forward(*arrays))
    except jax.errors.JaxRuntimeError as error:
        assert "gave up waiting" in str(error)
    np.testing.assert_array_equal(np.asarray(forward(*arrays)[0]), expected)
