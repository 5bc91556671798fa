"""The device's oracle is right by the reference backend, and finds every kind of fault."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import mega_moe
from tests import device_oracle
from tests.cases import ROUTINGS

SHAPE = {"experts": 20, "hidden": 64, "intermediate": 32}


def reference(ids: np.ndarray) -> tuple[jnp.ndarray, dict[str, int]]:
    arrays = device_oracle.operands(ids, **SHAPE)
    return jnp.asarray(mega_moe(*arrays, backend="reference")), {"experts": SHAPE["experts"]}


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_reference_is_exact(routing: str) -> None:
    ids = ROUTINGS[routing](tokens=50, choices=4, experts=20)
    y, sizes = reference(ids)
    assert device_oracle.rows_wrong(y, ids, **sizes) == []


def test_every_fault_is_found() -> None:
    ids = ROUTINGS["distinct"](tokens=50, choices=4, experts=20)
    y, sizes = reference(ids)
    assert device_oracle.rows_wrong(jnp.roll(y, 1, axis=1), ids, **sizes) == list(range(8))
    assert device_oracle.rows_wrong(y.at[17, 63].set(jnp.nan), ids, **sizes) == [17]
    assert device_oracle.rows_wrong(y.at[3].set(y[4]), ids, **sizes) == [3]
    assert np.array_equal(device_oracle.tags(512)[[0, 250, 251, 511]], [1, 251, 1, 10])
