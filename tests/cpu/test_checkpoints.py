"""Orbax checkpoints of both Flax modules restore at another expert-parallel size, bit for bit.

Case 19 (google/orbax #648, google/flax #5110): an expert-parallel size baked into what is saved.
"""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from jax_megamoe import linen
from jax_megamoe.config import MegaMoEConfig, RouterConfig
from jax_megamoe.nnx import MegaMoE
from tests.modules import E, H, I, K, assert_bitwise, make_x

OPTIONS: dict[str, Any] = {
    "config": MegaMoEConfig(precision="bf16"),
    "router_config": RouterConfig(scores="sigmoid", selection_bias=True),
    "shared_intermediate_size": 6,
    "expert_bias": True,
    "expert_axis": "expert",
}
PARAMETERS = {"router"} | {
    f"{w}_{n}" for w in ("w", "b", "shared_w") for n in ("gate", "up", "down")
}
X = make_x(8, 5)
MODULE = linen.MegaMoE(H, I, E, K, **OPTIONS)
# Of the run that restores: experts over how many devices, in which order, on which axis type.
MESHES = {
    "one device": (1, False, AxisType.Auto),
    "as saved": (2, False, AxisType.Auto),
    "more ranks": (4, False, AxisType.Auto),
    "reversed": (2, True, AxisType.Auto),
    "explicit": (4, True, AxisType.Explicit),
}


def make_mesh(num_ranks: int, is_reversed: bool, axis_type: AxisType) -> Mesh:
    devices = jax.devices()[:num_ranks]
    return Mesh(np.array(devices[::-1] if is_reversed else devices), ("expert",), (axis_type,))


def make_layer() -> MegaMoE:
    return MegaMoE(H, I, E, K, **OPTIONS, rngs=nnx.Rngs(0))


def bias() -> Any:
    return np.random.default_rng(2).normal(size=E).astype(np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a checkpoint of each module, saved at R = 2; their values and results."""
    folder = tmp_path_factory.mktemp("saved")
    with jax.set_mesh(make_mesh(*MESHES["as saved"])), ocp.StandardCheckpointer() as checkpointer:
        layer = make_layer()
        layer.selection_bias[...] = bias()
        checkpointer.save(folder / "nnx", nnx.state(layer))
        variables: Any = jax.jit(MODULE.init)(jax.random.key(0), X)
        box = variables[linen.STATE]["selection_bias"].replace_boxed(jnp.asarray(bias()))
        variables = {"params": variables["params"], linen.STATE: {"selection_bias": box}}
        checkpointer.save(folder / "linen", variables)
        results = {
            "nnx": (nnx.to_pure_dict(nnx.state(layer)), nnx.jit(lambda layer: layer(X))(layer)),
            "linen": (nn.unbox(variables), jax.jit(MODULE.apply)(variables, X)),
        }
    return folder, jax.tree.map(np.asarray, results)


def restored_nnx(folder: Path, mesh: Mesh) -> tuple[Any, Any]:
    graph, abstract = nnx.get_abstract_model(make_layer, mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        layer = nnx.merge(graph, checkpointer.restore(folder / "nnx", abstract))
    return nnx.to_pure_dict(nnx.state(layer)), nnx.jit(lambda layer: layer(X))(layer)


def restored_linen(folder: Path, mesh: Mesh) -> tuple[Any, Any]:
    key = jax.random.key(0)
    shardings = nn.get_sharding(jax.eval_shape(MODULE.init, key, X), mesh)
    target = jax.jit(MODULE.init, out_shardings=shardings).eval_shape(key, X)
    with ocp.StandardCheckpointer() as checkpointer:
        variables = checkpointer.restore(folder / "linen", target)
    return nn.unbox(variables), jax.jit(MODULE.apply)(variables, X)


RESTORED = {"nnx": restored_nnx, "linen": restored_linen}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", RESTORED)
def test_19_values_and_results_are_bitwise_at_another_size(
    saved: tuple[Path, dict[str, Any]], name: str, mesh: str
) -> None:
    folder, results = saved
    num_ranks = MESHES[mesh][0]
    with jax.set_mesh(make_mesh(*MESHES[mesh])):
        values, result = RESTORED[name](folder, make_mesh(*MESHES[mesh]))
    w_gate = values["w_gate"] if name == "nnx" else values["params"]["w_gate"]
    assert w_gate.addressable_shards[0].data.shape == (E // num_ranks, H, I)
    expected_values, (y, aux) = results[name]
    assert_bitwise(values, expected_values)
    assert_bitwise(result[0], y)
    np.testing.assert_array_equal(result[1].load, aux.load)
    np.testing.assert_allclose(result[1].z_loss, aux.z_loss, rtol=1e-6)


def test_a_checkpoint_holds_whole_parameters_and_nothing_of_a_run(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    """One entry for each variable, of the size of all experts: no ranks, no workspace."""
    folder, _ = saved
    with ocp.StandardCheckpointer() as checkpointer:
        in_nnx = checkpointer.metadata(folder / "nnx").item_metadata.tree
        in_linen = checkpointer.metadata(folder / "linen").item_metadata.tree
    assert set(in_nnx) == PARAMETERS | {"selection_bias"}
    assert {name: set(entry) for name, entry in in_nnx.items()} == dict.fromkeys(in_nnx, {"value"})
    assert set(in_linen) == {"params", linen.STATE}
    assert set(in_linen["params"]) == PARAMETERS
    for tree in (in_nnx, in_linen["params"]):
        assert tree["w_gate"]["value"].shape == (E, H, I)
        assert tree["w_down"]["value"].shape == (E, I, H)
