"""`save`: the same bits, the residual bytes of the docs, and what a remat policy makes of it.

Calls are counted in programs lowered for CUDA, products in those of the reference.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_megamoe import memory_plan, sharded_mega_moe
from jax_megamoe.config import Dims
from jax_megamoe.ops import GATE_UP_NAME
from tests import cases, compare, layer
from tests.cases import BF16, F32, ROUTINGS
from tests.lowering import count, lower_for_cuda

T, K, E, H, I = 32, 4, 16, 64, 64
IDS = ROUTINGS["invalid"](tokens=T, choices=K, experts=E)
BATCH = cases.normal(IDS, num_experts=E, hidden=H, intermediate=I)
X, _, W, *WEIGHTS, DY = map(jnp.asarray, BATCH)
FLOATS = (X, W, *WEIGHTS)
Op = Callable[..., Any]


def mesh_of(data: int, expert: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: data * expert]).reshape(data, expert)
    return Mesh(devices, ("data", "expert"), axis_types=(axis_type,) * 2)


def sharded(mesh: Mesh, **options: Any) -> Op:
    axes = {"expert_axis": "expert", "data_axes": ("data",)}
    return functools.partial(sharded_mega_moe, mesh=mesh, **axes, **options)


def in_shard_map(**options: Any) -> Op:
    spec = PartitionSpec("expert")
    op = layer.bind(axis_name="expert", **options)
    return jax.shard_map(op, mesh=layer.expert_mesh(4), in_specs=spec, out_specs=spec)


# The ways to call the op, and the ranks whose pools its residual holds: (op of options, D, R).
WAYS: dict[str, tuple[Callable[..., Op], int, int]] = {
    "one device": (layer.bind, 1, 1),
    "in a shard_map": (in_shard_map, 1, 4),
    "sharded": (functools.partial(sharded, mesh_of(2, 4)), 2, 4),
}


def pool_rows(data: int, ranks: int) -> int:
    """Rows of all devices: the first dimension of what the reference keeps of a call."""
    return data * ranks * Dims(T=T // (data * ranks), K=K, E=E, R=ranks, H=H, I=I).most_rows


def residuals(f: Op, *args: Any) -> Counter[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of what a pullback holds."""
    pull = jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], *args)
    return Counter((a.shape, str(a.dtype)) for a in jax.tree.leaves(pull))


@pytest.mark.parametrize("num_ranks", [None, 4])
@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("routing", ["invalid", "skewed", "nothing"])
def test_gradients_are_the_same_bits(routing: str, precision: str, num_ranks: int | None) -> None:
    """Of data that bf16 does not hold, with several tiles of an expert."""
    ids = ROUTINGS[routing](tokens=128, choices=3, experts=8)
    batch = cases.normal(ids, num_experts=8)
    batch = batch._replace(x=batch.x * F32.type(1 / 3), w_up=batch.w_up * F32.type(1 / 3))
    found, right = (
        layer.run(batch, num_ranks, save=save, precision=precision) for save in ("gate_up", "none")
    )
    compare.assert_results_bitwise(found, right)
    assert routing == "nothing" or np.any(found.dx)


@pytest.mark.parametrize(("tokens", "router"), [(BF16, F32), (F32, BF16)])
def test_every_dtype_gives_the_same_bits(tokens: np.dtype, router: np.dtype) -> None:
    batch = BATCH._replace(
        x=BATCH.x.astype(tokens),
        dy=BATCH.dy.astype(tokens),
        expert_weight=BATCH.expert_weight.astype(router),
    )
    found, right = (layer.run(batch, save=save) for save in ("gate_up", "none"))
    compare.assert_results_bitwise(found, right)


def test_debug_checks_change_nothing() -> None:
    ids = ROUTINGS["distinct"](tokens=T, choices=K, experts=E)
    batch = BATCH._replace(expert_idx=ids)
    for num_ranks in (None, 2):
        found = layer.run(batch, num_ranks, save="gate_up", debug_checks=True)
        compare.assert_results_bitwise(found, layer.run(batch, num_ranks))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_sharded_entry_gives_the_same_bits(axis_type: AxisType, inside: bool) -> None:
    """Also inside a shard_map that is manual over the data axis."""
    mesh = mesh_of(2, 4, axis_type)
    data, whole = PartitionSpec("data"), PartitionSpec()

    def run(save: str) -> cases.Results:
        f = layer.results_and_pullback(sharded(None if inside else mesh, save=save))  # type: ignore[arg-type]
        if inside:
            f = jax.shard_map(
                f,
                mesh=mesh,
                in_specs=(data,) * 3 + (whole,) * 3 + (data,),
                out_specs=cases.Results(data, data, data, whole, whole, whole),
                axis_names={"data"},
            )
        return cases.Results(*map(np.asarray, jax.jit(f)(*batch)))

    tokens = NamedSharding(mesh, PartitionSpec(("data", "expert")))
    experts = NamedSharding(mesh, PartitionSpec("expert"))
    shardings = [tokens] * 3 + [experts] * 3 + [tokens]
    batch = BATCH if inside else [*map(jax.device_put, BATCH, shardings)]
    with jax.set_mesh(mesh):
        compare.assert_results_bitwise(run("gate_up"), run("none"))


@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("way", WAYS)
def test_residuals_are_the_inputs_and_what_is_kept(way: str, precision: str) -> None:
    make, data, ranks = WAYS[way]

    def kept(save: str) -> Counter[Any]:
        op = make(save=save, precision=precision)
        return residuals(lambda x, w, *ws: op(x, jnp.asarray(IDS), w, *ws), *FLOATS)

    inputs = Counter((a.shape, str(a.dtype)) for a in (*FLOATS, jnp.asarray(IDS)))
    assert kept("none") == inputs
    dtype = {"bf16": "bfloat16", "float32": "float32"}[precision]
    assert kept("gate_up") - inputs == {((pool_rows(data, ranks), 2 * I), dtype): 1}
    assert inputs - kept("gate_up") == {}


@pytest.mark.parametrize(
    ("sizes", "right"),
    [((16384, 8, 128, 2048, 768), 452_591_616), ((16384, 8, 128, 4096, 1536), 905_183_232)],
)
def test_residual_bytes_are_those_of_the_docs(sizes: tuple[int, ...], right: int) -> None:
    """docs/architecture.md: 4 P I, twice the bytes of h in `memory_plan`."""
    named: dict[str, Any] = dict(zip("TKEHI", sizes, strict=True))
    tokens, choices, experts, hidden, intermediate = sizes
    shapes = [
        ((tokens, hidden), BF16),
        ((tokens, choices), F32),
        *[((experts, hidden, intermediate), BF16)] * 2,
        ((experts, intermediate, hidden), BF16),
    ]
    ids = jax.ShapeDtypeStruct((tokens, choices), np.int32)

    def num_bytes(save: str) -> int:
        def pullback(ids: Any, *floats: Any) -> Any:
            op = layer.bind(save=save)
            return jax.vjp(lambda x, w, *ws: op(x, ids, w, *ws), *floats)[1]

        pull = jax.eval_shape(pullback, ids, *(jax.ShapeDtypeStruct(*s) for s in shapes))
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pull))

    assert num_bytes("gate_up") - num_bytes("none") == right
    assert right == memory_plan(**named).gate_up_bytes
    assert right == 2 * memory_plan(**named).h_bytes
    assert right == 4 * Dims(R=1, **named).pool_rows * intermediate


def num_products(jaxpr: Any) -> int:
    """dot_general equations of a jaxpr, those of inner ones included."""
    inner = jax.tree.leaves([e.params for e in jaxpr.eqns], is_leaf=lambda p: hasattr(p, "eqns"))
    here = sum(e.primitive.name == "dot_general" for e in jaxpr.eqns)
    return here + sum(
        num_products(getattr(p, "jaxpr", p))
        for p in inner
        if hasattr(getattr(p, "jaxpr", p), "eqns")
    )


@pytest.mark.parametrize(("save", "of_backward"), [("none", 8), ("gate_up", 6)])
def test_the_reference_computes_nothing_again_that_is_kept(save: str, of_backward: int) -> None:
    """g, u and o; then g, u unless they are kept, dh, two of dx and three of dW."""
    op = layer.bind(save=save)
    forward = jax.make_jaxpr(lambda *a: op(a[0], IDS, *a[1:]))(*FLOATS)
    assert num_products(forward.jaxpr) == 3
    _, pull = jax.vjp(lambda *a: op(a[0], IDS, *a[1:]), *FLOATS)
    assert num_products(jax.make_jaxpr(pull)(DY).jaxpr) == of_backward


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("save", ["none", "gate_up"])
def test_the_forward_keeps_only_for_a_backward(save: str, differentiated: bool) -> None:
    op = layer.bind(backend="cuda", save=save)

    def f(*a: Any) -> Any:
        return op(a[0], IDS, *a[1:])

    run = functools.partial(jax.vjp, f) if differentiated else f
    (line,) = (
        line
        for line in lower_for_cuda(jax.jit(run), *FLOATS).splitlines()
        if "@jax_megamoe_forward" in line
    )
    kept = f"tensor<{pool_rows(1, 1)}x{2 * I}xbf16>"
    assert line.rsplit("->", 1)[1].count(kept) == (save == "gate_up" and differentiated)


POLICIES = jax.checkpoint_policies
OFFLOAD = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[GATE_UP_NAME],
    offload_src="device",
    offload_dst="pinned_host",
)
# What each policy does with g and u, and whether it saves y where a nonlinear operation needs it.
POLICY_CASES = {
    "nothing": (POLICIES.nothing_saveable, False, False),
    "everything": (POLICIES.everything_saveable, True, True),
    "dots": (POLICIES.dots_saveable, False, False),
    "dots without batch": (POLICIES.dots_with_no_batch_dims_saveable, False, False),
    "this name": (POLICIES.save_only_these_names(GATE_UP_NAME), True, False),
    "another name": (POLICIES.save_only_these_names("another"), False, False),
    "any name but this": (POLICIES.save_any_names_but_these(GATE_UP_NAME), False, False),
    "any name but another": (POLICIES.save_any_names_but_these("another"), True, False),
    "offload": (OFFLOAD, True, False),
}


def linear_block(op: Op) -> Op:
    return lambda x, *rest: x + op(jnp.tanh(x), IDS, *rest)


def nonlinear_block(op: Op) -> Op:
    return lambda x, *rest: x + jnp.tanh(op(jnp.tanh(x), IDS, *rest))


@pytest.mark.parametrize("policy", POLICY_CASES)
@pytest.mark.parametrize("way", WAYS)
def test_policies_are_honoured(way: str, policy: str) -> None:
    """Kept where the policy says so, and the forward runs again only for what it says is not."""
    make, data, ranks = WAYS[way]
    chosen, saves_gate_up, saves_y = POLICY_CASES[policy]
    for save in ("none", "gate_up"):
        for block, needs_y in ((linear_block, False), (nonlinear_block, True)):
            remat = jax.checkpoint(block(make(backend="cuda", save=save)), policy=chosen)
            kept = [s for s, _ in residuals(remat, *FLOATS) if s[-1] == 2 * I and len(s) == 2]
            is_kept = save == "gate_up" and saves_gate_up
            assert kept == [(pool_rows(data, ranks), 2 * I)] * is_kept
            again = (needs_y and not saves_y) or (save == "gate_up" and not saves_gate_up)
            f = jax.grad(lambda *a, f=remat: jnp.sum(jnp.square(f(*a))), argnums=tuple(range(5)))
            counted = count(lower_for_cuda(jax.jit(f), *FLOATS))
            assert (counted["forward"], counted["backward"]) == (1 + again, 1), (save, needs_y)


@pytest.mark.parametrize("way", ["one device", "sharded"])
def test_the_name_is_shown(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_saved_residuals(linear_block(WAYS[way][0](save="gate_up")), *FLOATS)
    lines = [line for line in capsys.readouterr().out.splitlines() if GATE_UP_NAME in line]
    assert len(lines) == 1 and lines[0].startswith("bf16[") and "named" in lines[0]


@pytest.mark.parametrize(
    ("way", "policy"), [*(("one device", p) for p in POLICY_CASES), ("sharded", "this name")]
)
def test_policies_change_no_bit(way: str, policy: str) -> None:
    block = nonlinear_block(WAYS[way][0](save="gate_up", backend="reference"))

    def gradients(f: Op) -> Any:
        return jax.jit(jax.grad(lambda *a: jnp.sum(f(*a) * DY), argnums=tuple(range(5))))(*FLOATS)

    found = gradients(jax.checkpoint(block, policy=POLICY_CASES[policy][0]))
    for a, b in zip(found, _without_remat(way), strict=True):
        compare.assert_bitwise(a, b)


@functools.cache
def _without_remat(way: str) -> Any:
    block = nonlinear_block(WAYS[way][0](save="none"))
    f = jax.grad(lambda *a: jnp.sum(block(*a) * DY), argnums=tuple(range(5)))
    return jax.jit(f)(*FLOATS)


@pytest.mark.parametrize("policy", [None, "nothing", "this name"])
def test_a_scan_over_layers_keeps_each_layer(policy: str | None) -> None:
    """The residual of L layers is [L, P, 2I], and no layer's is another's."""
    stack = [jnp.stack([w, 0.5 * w, -w]) for w in WEIGHTS]

    def of(op: Op, chosen: Any) -> Op:
        def block(x: Any, weights: Any) -> Any:
            return x + op(jnp.tanh(x), IDS, W, *weights), None

        body = jax.checkpoint(block, policy=POLICY_CASES[chosen][0]) if chosen else block
        return lambda x, stack: jax.lax.scan(body, x, stack)[0]

    def gradients(f: Op) -> Any:
        return jax.jit(jax.grad(lambda *a: jnp.sum(f(*a) * DY), argnums=(0, 1)))

    f = of(layer.bind(save="gate_up", backend="cuda"), policy)
    kept = residuals(f, X, stack)[(3, pool_rows(1, 1), 2 * I), "bfloat16"]
    assert kept == (policy != "nothing")
    counted = count(lower_for_cuda(gradients(f), X, stack))
    assert counted == {"forward": 1 + (policy == "nothing"), "backward": 1}
    found = gradients(of(layer.bind(save="gate_up"), policy))(X, stack)
    right = gradients(of(layer.bind(save="none"), None))(X, stack)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        compare.assert_bitwise(a, b)
