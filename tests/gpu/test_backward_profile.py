"""A training step's profile shows no copy to the host and no wait between two backward kernels."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_megamoe import mega_moe
from tests import device_trace
from tests.forward import SIZES, operands, random_batch

pytestmark = pytest.mark.gpu

KERNEL = "BackwardKernel"
NUM_LAYERS = 4


@jax.custom_vjp
def looked_at(x: Any) -> Any:
    """x, whose gradient the host sees."""
    return x


def _look(_: None, dx: Any) -> tuple[Any]:
    return (jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(dx.shape, dx.dtype), dx),)


looked_at.defvjp(lambda x: (x, None), _look)


@pytest.mark.parametrize("host_looks", [False, True])
def test_no_synchronisation_between_layers(host_looks: bool, tmp_path: Path) -> None:
    """Where the host does look at a gradient between layers, the same judgement must say so."""
    x, ids, *rest = operands(random_batch(SIZES[5], "distinct"))

    @jax.jit
    def step(x: Any, *rest: Any) -> Any:
        def stack(x: Any, *rest: Any) -> Any:
            for i in range(NUM_LAYERS):
                x = x + mega_moe(x, ids, *rest, backend="cuda")
                if host_looks and i == NUM_LAYERS // 2:
                    x = looked_at(x)
            return x

        y, pull = jax.vjp(stack, x, *rest)
        return pull(y)

    def run() -> None:
        jax.block_until_ready(step(x, *rest))

    run()
    trace = device_trace.record(run, tmp_path)
    found = device_trace.synchronisations(trace, KERNEL, NUM_LAYERS)
    assert bool(found) == host_looks, found
