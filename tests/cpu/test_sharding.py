"""`sharded_mega_moe` against `mega_moe` on one device: every kind of mesh gives the same bits.

dW is summed per data shard and then over them, so with a data axis it is equal to rounding only.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_megamoe import sharded_mega_moe
from jax_megamoe.config import SAVES
from tests import cases, compare, layer
from tests.cases import ROUTINGS

P = PartitionSpec
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
T, K, E = 32, 4, 16
IDS = ROUTINGS["invalid"](tokens=T, choices=K, experts=E)
BATCH = cases.normal(IDS, num_experts=E)
EXPERTS = P("expert")


@functools.cache
def right() -> cases.Results:
    return layer.run(BATCH, precision="float32")


def assert_right(found: cases.Results, *, bitwise_weights: bool = True) -> None:
    if bitwise_weights:
        compare.assert_results_bitwise(found, right())
        return
    for name in ("y", "dx", "dw"):
        compare.assert_bitwise(getattr(found, name), getattr(right(), name), name)
    compare.assert_within(found, right(), 1e-6)


def make_mesh(
    axes: dict[str, int], types: AxisType | Sequence[AxisType] = AUTO, devices: Any = None
) -> Mesh:
    """A mesh of the first of the given devices, by default of all."""
    shape = tuple(axes.values())
    devices = jax.devices() if devices is None else devices
    types = (types,) * len(axes) if isinstance(types, AxisType) else tuple(types)
    return Mesh(np.array(devices)[: np.prod(shape)].reshape(shape), tuple(axes), axis_types=types)


def entry(**how: Any) -> Any:
    how = {"expert_axis": "expert", "precision": "float32", **how}
    return functools.partial(sharded_mega_moe, **how)


def put(mesh: Mesh, tokens: PartitionSpec, experts: PartitionSpec = EXPERTS) -> Any:
    """The batch, placed on the mesh."""
    specs = (tokens,) * 3 + (experts,) * 3 + (tokens,)
    shardings = (NamedSharding(mesh, spec) for spec in specs)
    return BATCH._make(map(jax.device_put, BATCH, shardings))


def run(batch: Any, **how: Any) -> cases.Results:
    """The entry and its gradients under jit, with the mesh that is set or given."""
    return jax.jit(layer.results_and_pullback(entry(**how)))(*batch)


@pytest.mark.parametrize(
    ("axis_type", "num_ranks"), [(AUTO, 1), (AUTO, 8), (EXPLICIT, 1), (EXPLICIT, 2), (EXPLICIT, 4)]
)
def test_an_expert_axis_alone(axis_type: AxisType, num_ranks: int) -> None:
    mesh = make_mesh({"expert": num_ranks}, axis_type)
    with jax.set_mesh(mesh):
        assert_right(run(put(mesh, P("expert"))))


MESHES = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "explicit data, auto expert": (EXPLICIT, AUTO),
    "auto data, explicit expert": (AUTO, EXPLICIT),
}


@pytest.mark.parametrize("types", MESHES)
def test_a_data_axis_beside_the_expert_axis(types: str) -> None:
    mesh = make_mesh({"data": 2, "expert": 4}, MESHES[types])
    with jax.set_mesh(mesh):
        found = run(put(mesh, P(("data", "expert"))), data_axes=("data",))
    assert_right(found, bitwise_weights=False)


@pytest.mark.parametrize("tokens", [P("data"), P(), P(("expert", "data")), P(None, "expert")])
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_tokens_that_are_sharded_otherwise(axis_type: AxisType, tokens: PartitionSpec) -> None:
    """They are resharded on entry; y and dx come back as x came where JAX tracks shardings."""
    mesh = make_mesh({"data": 2, "expert": 4}, axis_type)
    batch = put(mesh, tokens)
    with jax.set_mesh(mesh):
        found = run(batch, data_axes=("data",))
    assert_right(found, bitwise_weights=False)
    if axis_type == EXPLICIT:
        for a, b in ((found.y, batch.x), (found.dx, batch.x), (found.dw, batch.expert_weight)):
            assert a.sharding.is_equivalent_to(b.sharding, 2), f"{a.sharding} of {b.sharding}"


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_weights_that_are_sharded_for_fsdp(axis_type: AxisType) -> None:
    """Split over the data axis too: gathered on entry, their gradients scattered back."""
    mesh = make_mesh({"data": 2, "expert": 4}, axis_type)
    batch = put(mesh, P(("data", "expert")), P("expert", "data"))
    with jax.set_mesh(mesh):
        found = run(batch, data_axes=("data",))
    assert_right(found, bitwise_weights=False)
    if axis_type == EXPLICIT:
        for gradient, weight in zip(found[3:], batch[3:6], strict=True):
            assert gradient.sharding.is_equivalent_to(weight.sharding, 3)


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
def test_an_axis_that_is_named_nowhere_does_the_same_work(axis_type: AxisType) -> None:
    mesh = make_mesh({"tensor": 2, "expert": 4}, axis_type)
    with jax.set_mesh(mesh):
        assert_right(run(put(mesh, P("expert"))))


def test_two_data_axes() -> None:
    mesh = make_mesh({"replica": 2, "fsdp": 2, "expert": 2})
    with jax.set_mesh(mesh):
        found = run(put(mesh, P(("replica", "fsdp", "expert"))), data_axes=("replica", "fsdp"))
    assert_right(found, bitwise_weights=False)


def test_inside_a_shard_map_over_the_data_axis() -> None:
    """Partly manual: the gradients of the replicated weights are summed by the outer shard_map."""
    mesh = make_mesh({"data": 2, "expert": 4})
    data, whole = P("data"), P()
    inside = jax.shard_map(
        layer.results_and_pullback(entry(data_axes=("data",))),
        mesh=mesh,
        in_specs=(data,) * 3 + (whole,) * 3 + (data,),
        out_specs=cases.Results(data, data, data, whole, whole, whole),
        axis_names={"data"},
    )
    assert_right(jax.jit(inside)(*BATCH), bitwise_weights=False)


def test_the_mesh_as_an_argument() -> None:
    assert_right(run(BATCH, mesh=make_mesh({"expert": 4})))


def test_numpy_arguments_outside_jit() -> None:
    y = entry(mesh=make_mesh({"expert": 4}))(*BATCH[:6])
    compare.assert_bitwise(y, right().y)


def test_numpy_arguments_on_an_explicit_mesh() -> None:
    mesh = make_mesh({"expert": 4}, EXPLICIT)
    with jax.set_mesh(mesh):
        assert_right(run(BATCH))


def test_wide_numpy_ids_do_not_wrap() -> None:
    ids = np.where(IDS == 3, np.int64(2**32 + 3), IDS)
    op = entry(mesh=make_mesh({"expert": 4}))
    y = jax.jit(lambda x: op(x, ids, *BATCH[2:6]))(BATCH.x)
    no_route = np.where(IDS == 3, -1, IDS).astype(np.int32)
    without = layer.run(BATCH._replace(expert_idx=no_route), precision="float32")
    compare.assert_bitwise(y, without.y)


@pytest.mark.parametrize("order", ["reversed", "odd", "even", "shuffled"])
def test_any_devices_in_any_order(order: str) -> None:
    """A submesh, and ranks that are not in the order of the devices' ids."""
    devices = jax.devices()
    chosen = {
        "reversed": devices[::-1],
        "odd": devices[1::2],
        "even": devices[::2],
        "shuffled": [devices[i] for i in (5, 2, 7, 0)],
    }[order]
    mesh = make_mesh({"expert": 4}, devices=chosen)
    with jax.set_mesh(mesh):
        found = run(put(mesh, P("expert")))
    assert_right(found)
    assert found.y.sharding.device_set == set(chosen[:4])


def test_three_dimensions() -> None:
    """[T, S, H]: the first leading dimension is the one that is split."""
    mesh = make_mesh({"expert": 4})
    shape = {name: getattr(BATCH, name).reshape(8, 4, -1) for name in ("x", "expert_weight", "dy")}
    batch = BATCH._replace(expert_idx=IDS.reshape(8, 4, K), **shape)
    found = run(batch, mesh=mesh)
    flat = {name: getattr(found, name).reshape(T, -1) for name in ("y", "dx", "dw")}
    assert_right(found._replace(**flat))


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
@pytest.mark.parametrize(
    "axes", [{"expert": 4}, {"data": 2, "expert": 4}, {"tensor": 2, "expert": 2}]
)
def test_counts_are_those_of_all_tokens(axes: dict[str, int], axis_type: AxisType) -> None:
    mesh = make_mesh(axes, axis_type)
    data_axes = tuple(name for name in axes if name == "data")
    with jax.set_mesh(mesh):
        batch = put(mesh, P((*data_axes, "expert")))
        _, counts = jax.jit(entry(data_axes=data_axes, return_counts=True))(*batch[:6])
    assert counts.dtype == np.int32
    np.testing.assert_array_equal(counts, cases.counts(BATCH))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
@pytest.mark.parametrize(
    "axes", [{"data": 2, "expert": 4}, {"data": 4, "expert": 2}, {"expert": 8}]
)
def test_11_replicated_weights_get_the_whole_gradient(
    axes: dict[str, int], axis_type: AxisType, save: str
) -> None:
    """pytorch/pytorch #160285, as in test_cases_gradients.py: neither a share nor a multiple."""
    mesh = make_mesh(axes, axis_type)
    data_axes = tuple(name for name in axes if name == "data")
    batch = cases.oracle(np.zeros((8, 1), np.int32), 1.0, num_experts=8)

    def losses(w_down: Any) -> Any:
        y = entry(data_axes=data_axes, save=save)(*batch[:5], w_down)
        return jnp.stack([jnp.sum(y[:, 0]), jnp.mean(y[:, 0])])

    def gradients(w_down: Any) -> Any:
        pull = jax.vjp(losses, w_down)[1]
        return [pull(dy)[0] for dy in jnp.eye(2)]

    with jax.set_mesh(mesh):
        w_down = jax.device_put(batch.w_down, NamedSharding(mesh, P()))
        of_sum, of_mean = jax.jit(gradients)(w_down)
    assert of_sum[0, 0, 0] == 256
    assert of_mean[0, 0, 0] == 32
    assert not np.any(np.asarray(of_sum)[1:])


def test_frozen_experts() -> None:
    found = run(BATCH, mesh=make_mesh({"expert": 4}), trainable_experts=False)
    zeros = {name: np.zeros_like(getattr(right(), name)) for name in found._fields[3:]}
    compare.assert_results_bitwise(found, right()._replace(**zeros))


def test_remat_and_scan_over_layers() -> None:
    """Under explicit axes y has x's sharding, so that the scan's carry has one type."""
    mesh = make_mesh({"data": 2, "expert": 4}, EXPLICIT)
    stack = [np.stack([w, 0.5 * w]) for w in BATCH[3:6]]

    def of(op: Any, batch: Any, stack: Any) -> Any:
        @jax.checkpoint
        def block(x: Any, weights: Any) -> Any:
            return x + op(x, batch[1], batch[2], *weights), None

        def loss(x: Any, stack: Any) -> Any:
            return jnp.sum(jax.lax.scan(block, x, stack)[0] * batch[6])

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(batch[0], stack)

    plain = of(layer.bind(precision="float32"), BATCH, stack)
    with jax.set_mesh(mesh):
        batch = put(mesh, P(("data", "expert")))
        placed = jax.device_put(stack, NamedSharding(mesh, P(None, "expert")))
        found = of(entry(data_axes=("data",)), batch, placed)
    compare.assert_bitwise(found[0], plain[0])
    for a, b in zip(found[1], plain[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
