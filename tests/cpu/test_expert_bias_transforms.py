"""Experts with biases inside what users build around the op, on meshes, and by each backend."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_megamoe import (
    ClampedSwiGLU,
    MegaMoEConfig,
    _ffi,
    mega_moe,
    reason_for_reference,
    sharded_mega_moe,
)
from jax_megamoe.ops import GATE_UP_NAME
from tests import cases, compare, layer
from tests.cases import BF16, ROUTINGS
from tests.gated import Biases, normal_biases
from tests.lowering import lower_for_cuda

T, K, E, H, I = 32, 4, 16, 64, 64
IDS = ROUTINGS["invalid"](tokens=T, choices=K, experts=E)
BATCH = cases.normal(IDS, num_experts=E, hidden=H, intermediate=I)
BIASES = normal_biases(BATCH.w_gate)
ARRAYS = (*BATCH[:-1], *BIASES, BATCH.dy)
X, _, W, *EXPERTS, DY = map(jnp.asarray, ARRAYS)
FLOATS = (X, W, *EXPERTS)
HOW: dict[str, Any] = {"activation": ClampedSwiGLU(limit=1.0)}
P = PartitionSpec
Found = tuple[cases.Results, Biases]


@functools.cache
def right() -> Found:
    return layer.run_biased(BATCH, BIASES, **HOW)


def assert_right(found: Found, names: tuple[str, ...] = cases.Results._fields) -> None:
    """Bitwise in the results of the given names, and with all of them in the biases' gradients."""
    for name in names:
        compare.assert_bitwise(getattr(found[0], name), getattr(right()[0], name), name)
    compare.assert_within(found[0], right()[0], 1e-5)
    for name, a, b in zip(Biases._fields, found[1], right()[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)
        if names == cases.Results._fields:
            compare.assert_bitwise(a, b, name)


def op(x: Any, w: Any, *experts: Any, **options: Any) -> Any:
    biases = dict(zip(Biases._fields, experts[3:], strict=True))
    return mega_moe(x, IDS, w, *experts[:3], **biases, **HOW, **options)  # pyright: ignore[reportArgumentType]


def graded(f: Any) -> Any:
    """The gradients of all floats of sum(f * dy), as one program."""
    loss = lambda *args: jnp.sum(f(*args).astype(jnp.float32) * DY)  # noqa: E731
    return jax.jit(jax.grad(loss, argnums=tuple(range(len(FLOATS)))))(*FLOATS)


@pytest.mark.parametrize("num_ranks", [None, 4])
def test_keeping_gate_and_up_gives_the_same_bits(num_ranks: int | None) -> None:
    assert_right(layer.run_biased(BATCH, BIASES, num_ranks, save="gate_up", **HOW))


def test_residuals_are_the_inputs_and_what_is_kept() -> None:
    def residuals(save: str) -> Counter[Any]:
        pull = jax.eval_shape(lambda *a: jax.vjp(functools.partial(op, save=save), *a)[1], *FLOATS)
        return Counter((a.shape, str(a.dtype)) for a in jax.tree.leaves(pull))

    inputs = Counter((a.shape, str(a.dtype)) for a in (*FLOATS, jnp.asarray(IDS)))
    assert residuals("none") == inputs
    assert [(dtype, n) for (_, dtype), n in (residuals("gate_up") - inputs).items()] == [
        ("bfloat16", 1)
    ]


def test_debug_checks_change_nothing() -> None:
    batch = BATCH._replace(expert_idx=np.where((IDS < 0) | (IDS >= E), -1, IDS))
    for num_ranks in (None, 2):
        assert_right(layer.run_biased(batch, BIASES, num_ranks, debug_checks=True, **HOW))


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_no_tokens_give_zeros(num_ranks: int | None) -> None:
    nothing = BATCH._replace(**{n: getattr(BATCH, n)[:0] for n in ("x", "expert_weight", "dy")})
    found, gradients = layer.run_biased(
        nothing._replace(expert_idx=IDS[:0]), BIASES, num_ranks, save="gate_up", **HOW
    )
    assert found.y.shape == (0, H)
    for a, b in zip(gradients, BIASES, strict=True):
        compare.assert_bitwise(a, np.zeros_like(b))


@pytest.mark.parametrize("save", ["none", "gate_up"])
def test_remat(save: str) -> None:
    """Under a nonlinear operation, so that a recomputed y is used."""
    policies = jax.checkpoint_policies
    nonlinear = lambda *args: jnp.tanh(op(*args, save=save))  # noqa: E731
    want = graded(nonlinear)
    for policy in (policies.nothing_saveable, policies.save_only_these_names(GATE_UP_NAME)):
        for a, b in zip(graded(jax.checkpoint(nonlinear, policy=policy)), want, strict=True):
            compare.assert_bitwise(a, b)


def test_scan_over_layers_equals_a_loop() -> None:
    stack = [jnp.stack([a, 0.5 * a, -a]) for a in EXPERTS]

    def block(x: Any, experts: Any) -> Any:
        return x + op(x, W, *experts), None

    def scanned(x: Any, stack: Any) -> Any:
        return jnp.sum(jax.lax.scan(jax.checkpoint(block), x, stack)[0] * DY)

    def looped(x: Any, stack: Any) -> Any:
        for i in range(3):
            x, _ = block(x, [a[i] for a in stack])
        return jnp.sum(x * DY)

    found, other = (jax.jit(jax.grad(f, argnums=(0, 1)))(X, stack) for f in (scanned, looped))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        compare.assert_bitwise(a, b)


def test_microbatches_add_up() -> None:
    """Gradients of two halves of the tokens, as an accumulating loop has them."""
    halves = [[a[i : i + T // 2] for a in (X, jnp.asarray(IDS), W, DY)] for i in (0, T // 2)]

    @jax.jit
    def of(biases: Any, x: Any, ids: Any, w: Any, dy: Any) -> Any:
        named = lambda b: dict(zip(Biases._fields, b, strict=True))  # noqa: E731
        loss = lambda b: jnp.sum(mega_moe(x, ids, w, *BATCH[3:6], **named(b), **HOW) * dy)  # noqa: E731
        return jax.grad(loss)(biases)

    first, second = (of(tuple(BIASES), *half) for half in halves)
    for a, b, c in zip(first, second, right()[1], strict=True):
        np.testing.assert_allclose(a + b, c, rtol=1e-4, atol=1e-5)


def test_donated_biases() -> None:
    step = jax.jit(
        lambda x, w, *experts: (*experts[:3], op(x, w, *experts), *(b - 1 for b in experts[3:])),
        donate_argnums=(5, 6, 7),
    )
    given = [jnp.copy(b) for b in EXPERTS[3:]]
    *_, y, b_gate, _, _ = step(X, W, *EXPERTS[:3], *given)
    compare.assert_bitwise(y, right()[0].y)
    compare.assert_bitwise(b_gate, BIASES.b_gate - 1)
    assert all(b.is_deleted() for b in given)


@pytest.mark.parametrize("name", Biases._fields)
def test_vmap_and_a_second_derivative_are_refused(name: str) -> None:
    arrays = dict(zip((*cases.Batch._fields[:-1], *Biases._fields), ARRAYS[:-1], strict=True))

    def loss(a: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(layer.bind(**HOW)(**{**arrays, name: a, "x": x})))

    b = arrays[name]
    with pytest.raises(NotImplementedError, match="vmap of mega_moe is not supported"):
        jax.eval_shape(jax.vmap(lambda b: loss(b, X)), np.stack([b, b]))
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.eval_shape(jax.grad(lambda b: jnp.sum(jax.grad(loss, argnums=1)(b, X))), b)


MESHES = {
    "expert": ({"expert": 4}, AxisType.Auto),
    "data": ({"data": 2, "expert": 4}, AxisType.Auto),
    "explicit": ({"data": 2, "expert": 4}, AxisType.Explicit),
    "tensor": ({"tensor": 2, "expert": 4}, AxisType.Explicit),
}


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("placed", [True, False], ids=["by expert", "on one device or replicated"])
@pytest.mark.parametrize("name", MESHES)
def test_meshes_agree_with_one_device(name: str, placed: bool, save: str) -> None:
    axes, axis_type = MESHES[name]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes))
    data_axes = tuple(a for a in axes if a == "data")
    tokens = P((*data_axes, "expert"))
    specs = [tokens] * 3 + [P("expert") if placed else P()] * 6 + [tokens]
    entry = functools.partial(
        sharded_mega_moe, expert_axis="expert", data_axes=data_axes, save=save, **HOW
    )
    with jax.set_mesh(mesh):
        arrays = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(ARRAYS, specs, strict=True)
        ]
        found = jax.jit(layer.biased_results_and_pullback(entry))(*arrays)
    assert_right(found, ("y", "dx", "dw") if data_axes else cases.Results._fields)


def test_inside_a_shard_map_over_the_data_axis() -> None:
    """Replicated biases there get the gradient of all tokens."""
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    entry = functools.partial(
        sharded_mega_moe, expert_axis="expert", data_axes=("data",), save="gate_up", **HOW
    )
    data, whole = P("data"), P()
    inside = jax.shard_map(
        layer.biased_results_and_pullback(entry),
        mesh=mesh,
        in_specs=(data,) * 3 + (whole,) * 6 + (data,),
        out_specs=(cases.Results(data, data, data, whole, whole, whole), Biases(*[whole] * 3)),
        axis_names={"data"},
    )
    with jax.set_mesh(mesh):
        assert_right(jax.jit(inside)(*ARRAYS), ("y", "dx", "dw"))


def test_biases_that_a_shard_map_replicates_get_the_whole_gradient() -> None:
    """The op with all experts on each of two devices, which split the tokens."""
    tokens, whole = P("data"), P()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(
        layer.biased_results_and_pullback(layer.bind(**HOW)),
        mesh=mesh,
        in_specs=(tokens,) * 3 + (whole,) * 6 + (tokens,),
        out_specs=(cases.Results(*[tokens] * 3, *[whole] * 3), Biases(*[whole] * 3)),
    )
    assert_right(jax.jit(run)(*ARRAYS), ("y", "dx", "dw"))


@pytest.mark.parametrize("expert_bias", [False, True])
@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("config", [{"activation": "geglu"}, HOW, {}])
def test_auto_is_the_kernels(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], save: str, expert_bias: bool
) -> None:
    """In a program for CUDA, where they run."""
    monkeypatch.setattr(_ffi, "missing", lambda: "")
    assert reason_for_reference(MegaMoEConfig(**config), H=H, I=I) == ""
    pullback = layer.biased_results_and_pullback if expert_bias else layer.results_and_pullback
    arrays = ARRAYS if expert_bias else tuple(BATCH)
    text = lower_for_cuda(jax.jit(pullback(layer.bind(save=save, **config))), *arrays)
    for name in ("forward", "backward"):
        assert text.count(f"@jax_megamoe_{name}") == 1


def test_bf16_everywhere() -> None:
    """Results have the dtypes of their arguments and are those of float32, rounded once."""
    batch = BATCH._replace(
        **{n: getattr(BATCH, n).astype(BF16) for n in BATCH._fields if n != "expert_idx"}
    )
    biases = Biases(*(b.astype(BF16) for b in BIASES))
    wide = Biases(*(b.astype(np.float32) for b in biases))
    found, exact = layer.run_biased(batch, biases, **HOW), layer.run_biased(BATCH, wide, **HOW)
    compare.assert_results_exact(*(one[0] for one in (found, exact)))
    for a, b in zip(found[1], exact[1], strict=True):
        assert a.dtype == BF16
        compare.assert_exact(a, b)
