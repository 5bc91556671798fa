"""The device's oracle is right by the reference backend, and finds every kind of fault."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import mega_moe
from tests import device_oracle, layer, ranks_oracle
from tests.cases import ROUTINGS, Size

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


def gradients(ids: np.ndarray) -> list[jnp.ndarray]:
    arrays = device_oracle.operands(ids, **SHAPE)
    dy = device_oracle.cotangent(ids.shape[0], SHAPE["hidden"])
    _, *found = layer.compiled(backend="reference")(*arrays, dy)
    return list(map(jnp.asarray, found))


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_gradients_of_the_reference_are_exact(routing: str) -> None:
    ids = ROUTINGS[routing](tokens=50, choices=4, experts=20)
    assert device_oracle.gradients_wrong(gradients(ids), ids, experts=20) == {}


def test_every_fault_of_a_gradient_is_found() -> None:
    ids = ROUTINGS["distinct"](tokens=50, choices=4, experts=20)
    right = gradients(ids)

    def wrong(i: int, changed: jnp.ndarray) -> dict[str, list[int]]:
        found = [changed if i == j else a for j, a in enumerate(right)]
        return device_oracle.gradients_wrong(found, ids, experts=20)

    assert wrong(0, right[0].at[3, 0].set(1)) == {"dx": [3]}
    assert wrong(0, right[0].at[49].set(0)) == {"dx": [49]}
    assert wrong(1, right[1].at[7, 2].set(jnp.nan)) == {"dw": [7]}
    for i, name in enumerate(("dw_gate", "dw_up", "dw_down"), 2):
        assert wrong(i, right[i] * 2) == {name: list(range(8))}
        assert wrong(i, right[i].at[19, 5, 0].set(1)) == {name: [19]}


@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
@pytest.mark.parametrize("routing", ["distinct", "one_expert", "skewed"])
def test_ranks_are_exact_in_both_precisions(routing: str, precision: str) -> None:
    size: Size = (24, 2, 16, 128, 128)
    assert ranks_oracle.faults("reference", 2, size, precision, routing) == {}


def test_the_oracle_of_ranks_finds_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """More bits than codes of FP8 hold are not exact: the tags of bf16 are such."""
    monkeypatch.setitem(ranks_oracle.TAGS, "fp8_block", device_oracle.NUM_TAGS)
    size: Size = (24, 2, 64, 128, 128)
    wrong = ranks_oracle.faults("reference", 2, size, "fp8_block", "distinct")
    assert set(wrong) == {"y", "dx", "dw", "dw_gate", "dw_up"}
    # The other routings have few experts, with small tags.
    assert ranks_oracle.judge("reference", 2, [size]) == (6, 1)
