"""A step's profile shows no copy to the host and no wait between two layers."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import mega_moe
from tests import device_trace
from tests.forward import SIZES, operands, random_batch

pytestmark = pytest.mark.gpu

KERNEL = "ForwardKernel"
NUM_LAYERS = 6


def looked_at(x: Any) -> Any:
    """x, once the host has seen it."""
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize("host_looks", [False, True])
def test_no_synchronisation_between_layers(host_looks: bool, tmp_path: Path) -> None:
    """Where the host does look at a result between layers, the same judgement must say so."""
    x, *rest = operands(random_batch(SIZES[5], "distinct"))

    @jax.jit
    def step(x: Any, *rest: Any) -> Any:
        for i in range(NUM_LAYERS):
            x = x + mega_moe(x, *rest, backend="cuda")
            if host_looks and i == NUM_LAYERS // 2:
                x = jnp.tanh(looked_at(x))
        return x

    def run() -> None:
        step(x, *rest).block_until_ready()

    run()
    trace = device_trace.record(run, tmp_path)
    found = device_trace.synchronisations(trace, KERNEL, NUM_LAYERS)
    assert bool(found) == host_looks, found
