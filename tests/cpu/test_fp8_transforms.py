"""precision="fp8_block" inside what users build around it, with weights quantised once a step."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_megamoe import (
    QuantizedExperts,
    _ffi,
    mega_moe,
    quantize_expert_weights,
    sharded_mega_moe,
)
from jax_megamoe.ops import GATE_UP_NAME
from tests import cases, compare, fp8, layer
from tests.cases import ROUTINGS

T, K, E, H, I = 32, 4, 16, 128, 128
IDS = ROUTINGS["invalid"](tokens=T, choices=K, experts=E)
BATCH = cases.normal(IDS, num_experts=E, hidden=H, intermediate=I)
# Others than those of the batch, so that it shows whose codes are multiplied.
OTHER = cases.normal(IDS, num_experts=E, hidden=H, intermediate=I, seed=1)
X, _, W, *WEIGHTS, DY = map(jnp.asarray, BATCH)
FLOATS = (X, W, *WEIGHTS)
P = PartitionSpec


@functools.cache
def given() -> QuantizedExperts:
    return fp8.quantize(OTHER)


@functools.cache
def right() -> cases.Results:
    return fp8.run_with(given(), BATCH)


def assert_right(found: Any, names: tuple[str, ...] = cases.Results._fields) -> None:
    """Bitwise in these results; in the others but for the order of sums."""
    for name in names:
        compare.assert_bitwise(getattr(found, name), getattr(right(), name), name)
    compare.assert_within(found, right(), 1e-5)


def op(quantized: Any, x: Any, w: Any, *weights: Any, **options: Any) -> Any:
    how = {"precision": "fp8_block", "quantized_experts": quantized, **options}
    return mega_moe(x, IDS, w, *weights, **how)


def gradients_of(f: Any) -> Any:
    """(quantized, *floats) -> the gradients of sum(f * dy) in the floats, as one program."""

    def loss(quantized: Any, *floats: Any) -> Any:
        return jnp.sum(f(quantized, *floats) * DY)

    return jax.jit(jax.grad(loss, argnums=tuple(range(1, 1 + len(FLOATS)))))


def assert_same(found: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        compare.assert_bitwise(a, b)


def test_outside_of_jit() -> None:
    y, pull = jax.vjp(functools.partial(op, given()), *FLOATS)
    assert_right(cases.Results(y, *pull(DY)))


@pytest.mark.parametrize("save", ["none", "gate_up"])
def test_residuals_are_the_arguments_and_what_is_kept(save: str) -> None:
    def kept(quantized: Any) -> Counter[Any]:
        pull = jax.eval_shape(
            lambda q, *a: jax.vjp(lambda *b: op(q, *b, save=save), *a)[1], quantized, *FLOATS
        )
        return Counter((a.shape, str(a.dtype)) for a in jax.tree.leaves(pull))

    inputs = Counter((a.shape, str(a.dtype)) for a in (*FLOATS, jnp.asarray(IDS)))
    codes = Counter((a.shape, str(a.dtype)) for a in jax.tree.leaves(given()))
    pool = [d for (_, d), n in (kept(None) - inputs).items() for _ in range(n)]
    assert pool == ["bfloat16"] * (save == "gate_up")
    assert kept(given()) == kept(None) + codes


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("caller_quantises", [False, True])
def test_remat(caller_quantises: bool, save: str) -> None:
    """Under a nonlinear operation, so that a recomputed y is used."""
    quantized = given() if caller_quantises else None
    policies = jax.checkpoint_policies

    def nonlinear(*args: Any) -> Any:
        return jnp.tanh(op(*args, save=save))

    want = gradients_of(nonlinear)(quantized, *FLOATS)
    for policy in (policies.nothing_saveable, policies.save_only_these_names(GATE_UP_NAME)):
        remat = jax.checkpoint(nonlinear, policy=policy)
        assert_same(gradients_of(remat)(quantized, *FLOATS), want)


def test_scan_over_layers_equals_a_loop() -> None:
    """The quantised weights of a stack are a stack, too."""
    stack = [jnp.stack([w, 0.5 * w, -w]) for w in WEIGHTS]

    def block(x: Any, weights: Any) -> Any:
        quantized, *floats = weights
        return x + op(quantized, x, W, *floats), None

    def scanned(stack: Any, x: Any) -> Any:
        quantized = jax.vmap(quantize_expert_weights)(*stack)
        return jnp.sum(jax.lax.scan(jax.checkpoint(block), x, (quantized, *stack))[0] * DY)

    def looped(stack: Any, x: Any) -> Any:
        for i in range(3):
            x, _ = block(x, (None, *(w[i] for w in stack)))
        return jnp.sum(x * DY)

    found, other = (jax.jit(jax.grad(f, argnums=(0, 1)))(stack, X) for f in (scanned, looped))
    assert_same(found, other)
    assert all(np.any(g) for g in jax.tree.leaves(found))


def test_microbatches_share_one_quantisation() -> None:
    """A step that quantises once and adds gradients up in a scan, with donated parameters."""
    batches = [a.reshape(2, T // 2, -1) for a in (X, jnp.asarray(IDS), W, DY)]

    def gradient(weights: Any, quantized: Any, x: Any, ids: Any, w: Any, dy: Any) -> Any:
        how = {"precision": "fp8_block", "quantized_experts": quantized}
        loss = lambda ws: jnp.sum(mega_moe(x, ids, w, *ws, **how) * dy)  # noqa: E731
        return jax.grad(loss)(weights)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(weights: Any) -> Any:
        quantized = quantize_expert_weights(*weights)

        def add(total: Any, batch: Any) -> Any:
            return jax.tree.map(jnp.add, total, gradient(weights, quantized, *batch)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), batches)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, total), total

    weights = [jnp.copy(w) for w in WEIGHTS]
    for _ in range(2):
        parts = [gradient(weights, None, *(a[i] for a in batches)) for i in range(2)]
        want = jax.tree.map(lambda a, b: a + b, *parts)
        moved, found = step(given_away := weights)
        assert_same(found, want)
        assert all(w.is_deleted() for w in given_away)
        # The next step quantises what this one has moved.
        assert np.any(moved[0] != WEIGHTS[0])
        weights = moved


def test_donated_codes() -> None:
    quantized = jax.tree.map(jnp.copy, given())
    step = jax.jit(lambda q, *floats: (op(q, *floats), q), donate_argnums=0)
    y, moved = step(quantized, *FLOATS)
    compare.assert_bitwise(y, right().y)
    assert all(a.is_deleted() for a in jax.tree.leaves(quantized))
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(given()), strict=True):
        np.testing.assert_array_equal(a, b)


def test_codes_have_no_gradient() -> None:
    """Asked for, it is zeros of their dtypes."""
    loss = lambda q: jnp.sum(op(q, *FLOATS) * DY)  # noqa: E731
    found = jax.jit(jax.grad(loss))(given())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(given()), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and not np.any(a)


def test_vmap_and_a_second_derivative_are_refused() -> None:
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), given())
    with pytest.raises(NotImplementedError, match="vmap of mega_moe is not supported"):
        jax.eval_shape(jax.vmap(lambda q: op(q, *FLOATS)), stacked)

    def first(x: Any) -> Any:
        return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(op(given(), x, *FLOATS[1:]))))(x))

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.eval_shape(jax.grad(first), X)


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_no_tokens_give_zeros(num_ranks: int | None) -> None:
    nothing = BATCH._replace(
        **{n: getattr(BATCH, n)[:0] for n in ("x", "expert_idx", "expert_weight", "dy")}
    )
    found = fp8.run_with(given(), nothing, num_ranks, save="gate_up")
    assert found.y.shape == (0, H)
    assert not any(np.any(a) for a in found[3:])


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_rank_count_gives_the_same_bits(num_ranks: int, save: str) -> None:
    assert_right(fp8.run_with(given(), BATCH, num_ranks, save=save))


def test_debug_checks_change_nothing() -> None:
    batch = BATCH._replace(expert_idx=np.where((IDS < 0) | (IDS >= E), -1, IDS))
    for num_ranks in (None, 2):
        assert_right(fp8.run_with(given(), batch, num_ranks, debug_checks=True))


MESHES = {
    "expert": ({"expert": 4}, AxisType.Auto),
    "data": ({"data": 2, "expert": 4}, AxisType.Auto),
    "explicit": ({"data": 2, "expert": 4}, AxisType.Explicit),
    "tensor": ({"tensor": 2, "expert": 4}, AxisType.Explicit),
}


def sharded(data_axes: tuple[str, ...], save: str, quantized: Any, *arrays: Any) -> cases.Results:
    how = {"expert_axis": "expert", "data_axes": data_axes, "precision": "fp8_block"}
    entry = functools.partial(sharded_mega_moe, **how, save=save, quantized_experts=quantized)
    return layer.results_and_pullback(entry)(*arrays)


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("placed", [True, False], ids=["by expert", "on one device or replicated"])
@pytest.mark.parametrize("name", MESHES)
def test_meshes_agree_with_one_device(name: str, placed: bool, save: str) -> None:
    axes, axis_type = MESHES[name]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes))
    data_axes = tuple(a for a in axes if a == "data")
    tokens, experts = P((*data_axes, "expert")), P("expert") if placed else P()
    specs = [tokens] * 3 + [experts] * 3 + [tokens]
    with jax.set_mesh(mesh):
        arrays = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(BATCH, specs, strict=True)
        ]
        others = [jax.device_put(w, NamedSharding(mesh, experts)) for w in fp8.weights_of(OTHER)]

        def step(others: Any, *arrays: Any) -> cases.Results:
            return sharded(data_axes, save, quantize_expert_weights(*others), *arrays)

        found = jax.jit(step)(others, *arrays)
    assert_right(found, ("y", "dx", "dw") if data_axes else cases.Results._fields)


@pytest.mark.parametrize("caller_quantises", [False, True])
def test_inside_a_shard_map_over_the_data_axis(caller_quantises: bool) -> None:
    """Replicated weights and codes there; the weights get the gradient of all tokens."""
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    batch = (
        BATCH
        if caller_quantises
        else BATCH._replace(**{n: getattr(OTHER, n) for n in ("w_gate", "w_up", "w_down")})
    )
    data, whole = P("data"), P()
    inside = jax.shard_map(
        functools.partial(sharded, ("data",), "gate_up"),
        mesh=mesh,
        in_specs=(whole, *(data,) * 3, *(whole,) * 3, data),
        out_specs=cases.Results(data, data, data, whole, whole, whole),
        axis_names={"data"},
    )
    with jax.set_mesh(mesh):
        found = jax.jit(inside)(given() if caller_quantises else None, *batch)
    assert_right(found, ("y", "dx", "dw"))


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_weights_of_a_shard_map_over_tokens(check_vma: bool) -> None:
    """All experts on each of two devices, which split the tokens."""
    tokens, whole = P("data"), P()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def run(quantized: Any, *arrays: Any) -> cases.Results:
        bound = layer.bind(precision="fp8_block", quantized_experts=quantized)
        found = layer.results_and_pullback(bound)(*arrays)
        # Without the check of what varies, gradients of what is replicated are shares.
        shares = () if check_vma else found[3:]
        return found._replace(
            **{
                name: jax.lax.psum(a, "data")
                for name, a in zip(cases.Results._fields[3:], shares, strict=False)
            }
        )

    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(whole, *(tokens,) * 3, *(whole,) * 3, tokens),
        out_specs=cases.Results(*[tokens] * 3, *[whole] * 3),
        check_vma=check_vma,
    )
    assert_right(jax.jit(mapped)(given(), *BATCH), ("y", "dx", "dw"))


@pytest.mark.parametrize("save", ["none", "gate_up"])
def test_where_the_platform_decides_it_is_one_pass_each(
    monkeypatch: pytest.MonkeyPatch, save: str
) -> None:
    """Where the kernels take the call: else the choice is made before."""
    monkeypatch.setattr(_ffi, "missing", lambda: "")
    program = gradients_of(functools.partial(op, save=save, activation="geglu"))
    assert "mega_moe_pass" not in str(program.trace(given(), *FLOATS).jaxpr)
    program = gradients_of(functools.partial(op, save=save))
    assert str(program.trace(given(), *FLOATS).jaxpr).count("mega_moe_pass") == 2
    assert_same(program(given(), *FLOATS), right()[1:])
