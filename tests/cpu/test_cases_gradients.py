"""Known faults of systems like this one: what gradients mean, and tests blind to a bad expert.

Named as in test_cases.py; the others are in tests/gradient_cases.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_megamoe import reference
from jax_megamoe.config import SAVES
from tests import cases, compare, layer, process
from tests.cases import ROUTINGS

Array = jax.Array

SGD_STEPS = """
import sys
import jax, jax.numpy as jnp, numpy as np
from tests import cases, layer

poison, path, save = sys.argv[1] == "poison", sys.argv[2], sys.argv[3]
ids = cases.ROUTINGS["distinct"](tokens=192, choices=2, experts=8)
batch = cases.normal(ids, num_experts=8, hidden=256, intermediate=128)
run = layer.compiled(2, save=save)
for step in range(3):
    if poison:
        block = [jnp.full((192, 256), jnp.nan) for _ in range(64)]
        jax.block_until_ready(block)
        del block
    gradients = run(*batch)
    weights = [w - 0.1 * np.asarray(g) for w, g in zip(batch[3:6], gradients[3:])]
    batch = batch._replace(w_gate=weights[0], w_up=weights[1], w_down=weights[2])
np.savez(path, *batch[3:6])
"""


def test_01_stale_rows_do_not_reach_the_gradients(tmp_path: Any) -> None:
    """huggingface/transformers PR #48205: NaN from step 2 on, out of rows nobody wrote."""
    weights = {}
    for memory, save in (("fresh", "none"), ("poison", "none"), ("poison", "gate_up")):
        path = tmp_path / f"{memory}_{save}.npz"
        found = process.run_python(SGD_STEPS, memory, str(path), save)
        assert found.returncode == 0, found.stderr
        weights[memory, save] = np.load(path)
    fresh = weights.pop(("fresh", "none"))
    for poisoned in weights.values():
        for name in fresh:
            assert np.isfinite(poisoned[name]).all()
            compare.assert_bitwise(poisoned[name], fresh[name])


CASE_11 = cases.oracle(np.zeros((8, 1), np.int32), 1.0, num_experts=4)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_11_gradients_are_not_scaled_by_the_number_of_ranks(
    num_ranks: int, check_vma: bool
) -> None:
    """pytorch/pytorch #160285: expert gradients R times too large. 512, 128, 64 would be wrong."""
    spec = PartitionSpec("expert")
    op = jax.shard_map(
        layer.bind(axis_name="expert"),
        mesh=layer.expert_mesh(num_ranks),
        in_specs=spec,
        out_specs=spec,
        check_vma=check_vma,
    )
    *arrays, w_down, _ = map(jnp.asarray, CASE_11)

    def gradient(dy: Array) -> Array:
        return jax.vjp(lambda w_down: op(*arrays, w_down)[:, 0], w_down)[1](dy)[0]

    run = jax.jit(gradient)
    for reduce, right in ((jnp.sum, 256), (jnp.mean, 32)):
        dy = jax.grad(reduce)(jnp.ones(8))
        assert run(dy)[0, 0, 0] == right


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("reduce", [jax.lax.psum, jax.lax.pmean])
def test_11_gradients_taken_inside_shard_map(
    reduce: Callable[[Array, str], Array], num_ranks: int, save: str
) -> None:
    """pytorch/pytorch #160285, the loss reduced over the ranks by hand; pmean divides by R."""
    op = layer.bind(axis_name="expert", save=save)

    def gradient(*arrays: Array) -> Array:
        def loss(w_down: Array) -> Array:
            y = op(*arrays[:5], w_down)
            return reduce(jnp.sum(y[:, 0]), "expert")

        return jax.grad(loss)(arrays[5])

    spec = PartitionSpec("expert")
    mesh = layer.expert_mesh(num_ranks)
    run = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=spec, out_specs=spec))
    dw_down = run(*CASE_11[:6])
    assert dw_down[0, 0, 0] == (256 if reduce is jax.lax.psum else 256 / num_ranks)


# Case 21: faults that the judgement of this suite must see, put into the reference's backward.
def _scaled_expert(*gradients: Array) -> tuple[Array, ...]:
    dx, dw, dw_gate, dw_up, dw_down = gradients
    return dx, dw, dw_gate, dw_up, dw_down.at[37].multiply(1.1)


def _swapped_experts(*gradients: Array) -> tuple[Array, ...]:
    *rest, dw_down = gradients
    return *rest, dw_down.at[jnp.array([5, 6])].set(dw_down[jnp.array([6, 5])])


def _unchanged(*gradients: Array) -> tuple[Array, ...]:
    return gradients


def _put_in(monkeypatch: Any, fault: str) -> Any:
    """The layer, compiled anew, with a fault in `reference.backward`."""
    backward = reference.backward
    change = {"scale": _scaled_expert, "swap": _swapped_experts}.get(fault, _unchanged)

    def faulty(dy: Array, x: Array, ids: Array, *rest: Array, **how: Any) -> Any:
        if fault == "drop":  # one row of 512 is no longer a route
            ids = ids.at[17, 2].set(-1)
        return change(*backward(dy, x, ids, *rest, **how))

    monkeypatch.setattr(reference, "backward", faulty)
    return jax.jit(layer.results_and_pullback(layer.bind(precision="float32")))


@pytest.mark.parametrize("fault", ["none", "scale", "drop", "swap"])
def test_21_this_suite_sees_one_bad_expert_of_64(monkeypatch: Any, fault: str) -> None:
    """marin-community/marin PR #8549: "correct" because the median error of the experts was.

    Both kinds of judgement see it: the exact one of the oracle and the errors of random data.
    """
    ids = ROUTINGS["distinct"](tokens=128, choices=4, experts=64)
    oracle, normal = cases.oracle(ids, 0.5, num_experts=64), cases.normal(ids, num_experts=64)
    run = _put_in(monkeypatch, fault)
    of_oracle, of_normal = (cases.Results(*map(np.asarray, run(*b))) for b in (oracle, normal))
    judgements = (
        lambda: compare.assert_results_exact(of_oracle, cases.oracle_results(oracle)),
        lambda: compare.assert_within(of_normal, cases.dense(normal), 1e-5),
    )
    for judge in judgements:
        if fault == "none":
            judge()
            continue
        with pytest.raises(AssertionError, match="dw_down|dx"):
            judge()
