"""What balances the load: the losses and over which tokens they are, and the selection bias."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe import RouterConfig, Routing, route, update_selection_bias
from tests.refusals import refusal
from tests.routers import CONFIGS, E, bias_of, route_float64

K = 3
LOSSES = ("load_balance_loss", "sequence_balance_loss", "z_loss")
RAW = RouterConfig(renormalize=False)


def logits_and_mask(rows: int = 8, length: int = 6) -> tuple[jax.Array, jax.Array]:
    """Sequences of several lengths, the last of none, whose tokens prefer other experts each."""
    rng = np.random.default_rng(0)
    drift = np.linspace(-1, 1, rows)[:, None, None] * np.linspace(-3, 3, E)[None, None]
    logits = jnp.asarray(rng.normal(size=(rows, length, E)) + drift, jnp.float32)
    lengths = np.append(rng.integers(1, length + 1, size=rows - 1), 0)
    return logits, jnp.asarray(np.arange(length)[None] < lengths[:, None])


def test_an_even_load_gives_k_and_a_collapsed_one_gives_e() -> None:
    for config, factor in ((RouterConfig(), 20.0), (RouterConfig(scores="sigmoid"), 90.0)):
        eye = np.eye(8, dtype=np.float32)
        even = jnp.asarray(factor * (eye + np.roll(eye, 1, 1)) - factor / 2)
        np.testing.assert_allclose(route(even, 2, config).load_balance_loss, 2.0, rtol=1e-6)
        np.testing.assert_allclose(route(even, 2, config).sequence_balance_loss, 2.0, rtol=1e-6)
    collapsed = jnp.zeros((8, 8)).at[:, 3].set(200.0)
    np.testing.assert_allclose(route(collapsed, 1, RAW).load_balance_loss, 8.0, rtol=1e-6)


def test_a_batch_that_is_even_only_as_a_whole() -> None:
    """Each sequence falls on one expert, all together on all: the scopes of the two losses."""
    logits = jnp.repeat(200.0 * jnp.eye(8)[:, None], 5, axis=1)
    routing = route(logits, 1, RAW)
    np.testing.assert_allclose(routing.load_balance_loss, 1.0, rtol=1e-6)
    np.testing.assert_allclose(routing.sequence_balance_loss, 8.0, rtol=1e-6)
    flat = route(logits.reshape(-1, 8), 1, RAW)  # one sequence
    np.testing.assert_allclose(flat.sequence_balance_loss, 1.0, rtol=1e-6)


def run_on_ranks(
    name: str, logits: jax.Array, mask: jax.Array | None, axis_name: Any, check_vma: bool
) -> Routing:
    """`route` inside a shard_map over 4 ranks; losses and load stacked, [4] and [4, E]."""
    config, bias = CONFIGS[name], bias_of(CONFIGS[name])
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    split = P(("a", "b"))

    def on_rank(x: jax.Array, m: jax.Array | None) -> Routing:
        r = route(x, K, config, selection_bias=bias, mask=m, axis_name=axis_name)
        return Routing(r.expert_idx, r.expert_weight, *[a[None] for a in r[2:]])

    sharded = jax.shard_map(
        on_rank, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=check_vma
    )
    return jax.jit(sharded)(logits, mask)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", ["softmax", "deepseek"])
def test_statistics_are_of_one_rank_or_of_all(name: str, masked: bool, check_vma: bool) -> None:
    logits, mask = logits_and_mask()
    mask = mask if masked else None
    config, bias = CONFIGS[name], bias_of(CONFIGS[name])

    def right(rows: slice) -> Routing:
        of_rows = None if mask is None else mask[rows]
        return route_float64(logits[rows], K, config, bias, of_rows)

    per_rank = run_on_ranks(name, logits, mask, None, check_vma)
    over_all = run_on_ranks(name, logits, mask, ("a", "b"), check_vma)
    over_pairs = run_on_ranks(name, logits, mask, "b", check_vma)
    for rank in range(4):
        pair = rank // 2
        for found, rows in (
            (per_rank, slice(2 * rank, 2 * rank + 2)),
            (over_pairs, slice(4 * pair, 4 * pair + 4)),
            (over_all, slice(0, 8)),
        ):
            expected = right(rows)
            np.testing.assert_array_equal(found.load[rank], expected.load)
            for loss in LOSSES:
                np.testing.assert_allclose(
                    getattr(found, loss)[rank], getattr(expected, loss), rtol=2e-6, err_msg=loss
                )
    assert np.ptp(per_rank.load_balance_loss) > 0.1
    everything = right(slice(0, 8))
    for found in (per_rank, over_all, over_pairs):
        np.testing.assert_array_equal(found.expert_idx, everything.expert_idx)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_on_global_arrays_statistics_are_of_the_global_batch(axis_type: AxisType) -> None:
    logits, mask = logits_and_mask()
    config, bias = CONFIGS["deepseek"], bias_of(CONFIGS["deepseek"])
    mesh = jax.make_mesh((4,), ("rank",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        placed = jax.device_put((logits, mask), jax.NamedSharding(mesh, P("rank")))
        found = jax.jit(lambda x, m: route(x, K, config, selection_bias=bias, mask=m))(*placed)
    expected = route_float64(logits, K, config, bias, mask)
    np.testing.assert_array_equal(found.expert_idx, expected.expert_idx)
    np.testing.assert_array_equal(found.load, expected.load)
    for loss in LOSSES:
        np.testing.assert_allclose(getattr(found, loss), getattr(expected, loss), rtol=2e-6)


@pytest.mark.parametrize("axis_name", [None, "rank"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_losses_over_ranks(axis_name: str | None, check_vma: bool) -> None:
    """That of the global loss, once, or that of the mean of each rank's own."""
    logits, mask = logits_and_mask()
    mesh = jax.make_mesh((4,), ("rank",), axis_types=(AxisType.Auto,))

    def losses(x: jax.Array, m: jax.Array, axis_name: str | None = None) -> jax.Array:
        r = route(x, K, mask=m, axis_name=axis_name)
        return r.load_balance_loss + r.sequence_balance_loss + r.z_loss

    def on_rank(x: jax.Array, m: jax.Array) -> jax.Array:
        loss = losses(x, m, axis_name)
        return loss if axis_name else jax.lax.pmean(loss, "rank")

    specs = {"in_specs": (P("rank"), P("rank")), "out_specs": P(), "check_vma": check_vma}
    sharded = jax.shard_map(on_rank, mesh=mesh, **specs)
    found = jax.jit(jax.value_and_grad(sharded))(logits, mask)

    def right(x: jax.Array) -> jax.Array:
        if axis_name:
            return losses(x, mask)
        rows = (x.reshape(4, 2, *x.shape[1:]), mask.reshape(4, 2, -1))
        return jnp.mean(jax.vmap(losses)(*rows))

    expected = jax.value_and_grad(right)(logits)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-8)


def test_gradients_inside_of_shard_map() -> None:
    """With vma checked, a rank that differentiates the global loss gets its part of the gradient,
    and a replicated router the whole. Without, JAX differentiates the sum of all ranks' copies."""
    logits, mask = logits_and_mask()
    mesh = jax.make_mesh((4,), ("rank",), axis_types=(AxisType.Auto,))

    def loss(offset: jax.Array, x: jax.Array, m: jax.Array, axis_name: str | None) -> jax.Array:
        x = x + offset[None, None]
        return route(x, K, mask=m, axis_name=axis_name).load_balance_loss

    def on_rank(offset: jax.Array, x: jax.Array, m: jax.Array) -> Any:
        return jax.grad(loss, argnums=(0, 1))(offset, x, m, "rank")

    specs = {"in_specs": (P(), P("rank"), P("rank")), "out_specs": (P(), P("rank"))}
    offset = jnp.linspace(0, 1, E)
    expected = jax.grad(loss, argnums=(0, 1))(offset, logits, mask, None)
    found = jax.jit(jax.shard_map(on_rank, mesh=mesh, **specs))(offset, logits, mask)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    unchecked = jax.shard_map(on_rank, mesh=mesh, check_vma=False, **specs)
    _, of_copies = jax.jit(unchecked)(offset, logits, mask)
    np.testing.assert_allclose(of_copies, 4 * expected[1], rtol=1e-5, atol=1e-7)


def test_a_named_vmap_is_an_axis() -> None:
    logits, mask = logits_and_mask()
    mapped = jax.vmap(lambda x, m: route(x, K, mask=m, axis_name="rows"), axis_name="rows")
    routing = mapped(logits, mask)
    expected = route(logits, K, mask=mask)
    for name in ("load", *LOSSES):
        each = np.asarray(getattr(routing, name))
        for one in each:
            np.testing.assert_allclose(one, getattr(expected, name), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", [np.int32, np.int16, np.int8])
def test_the_bias_moves_against_the_load(dtype: Any) -> None:
    load = jnp.asarray([0, 4, 5, 10, 5, 6], dtype)  # 30 choices of 6 experts
    bias = jnp.asarray([0.1, -0.2, 0.3, 0.0, 0.0, 0.5], jnp.float32)
    moved = jax.jit(lambda b, n: update_selection_bias(b, n, 0.01))(bias, load)
    signs = np.array([1, 1, 0, -1, 0, -1], np.float32)
    np.testing.assert_array_equal(moved, np.asarray(bias) + np.float32(0.01) * signs)
    assert moved.dtype == jnp.float32


@pytest.mark.parametrize(
    ("load", "signs"),
    [
        ([1, 2, 2], [1, -1, -1]),  # a mean of 5/3, between 1 and 2
        ([1, 1, 2], [1, 1, -1]),
        ([0, 0, 0], [0, 0, 0]),
        ([2**24 + 1, 2**24, 2**24], [-1, 1, 1]),  # equal in float32
        ([2**31 - 1, 0, 0], [-1, 1, 1]),
    ],
)
def test_the_mean_load_is_exact(load: list[int], signs: list[int]) -> None:
    moved = update_selection_bias(jnp.zeros(3), jnp.asarray(load, jnp.int32), 1.0)
    np.testing.assert_array_equal(moved, np.array(signs, np.float32))


def test_the_update_balances_a_skewed_router() -> None:
    """An expert that every token prefers: the bias alone brings its load down to the mean."""
    config = RouterConfig(scores="sigmoid", selection_bias=True)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(512, 8)) + np.linspace(2, -2, 8)[None], jnp.float32)

    @jax.jit
    def step(bias: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        load = route(logits, 2, config, selection_bias=bias).load
        return update_selection_bias(bias, load, jnp.float32(5e-3)), load

    _, loads = jax.lax.scan(step, jnp.zeros(8), length=400)
    loads = np.asarray(loads)
    assert loads[0].max() > 2.5 * 128
    assert np.abs(loads[-1] - 128).max() < 0.1 * 128
    np.testing.assert_array_equal(loads.sum(-1), 512 * 2)


ZEROS, LOAD = jnp.zeros(4), jnp.arange(4)
UPDATE_REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str, str, str]] = {
    "bias bf16": (
        {"bias": jnp.zeros(4, jnp.bfloat16)},
        TypeError,
        "bias",
        "bfloat16",
        "float32",
    ),
    "bias a list": ({"bias": [0.0]}, TypeError, "bias", "a list", "jax.Array"),
    "bias of others": ({"bias": jnp.zeros(3)}, ValueError, "bias", r"\(3,\)", r"\[E\] = \(4,\)"),
    "load a float": ({"load": ZEROS}, TypeError, "load", "float32", "signed integer"),
    "load unsigned": (
        {"load": LOAD.astype(jnp.uint32)},
        TypeError,
        "load",
        "uint32",
        "signed integer",
    ),
    "load of layers": ({"load": LOAD[None]}, ValueError, "load", r"\(1, 4\)", r"\[E\]"),
    "load of none": ({"load": LOAD[:0]}, ValueError, "load", r"\(0,\)", r"\[E\]"),
    "speed negative": ({"speed": -0.1}, ValueError, "speed", "-0.1", "at least 0"),
    "speed NaN": ({"speed": float("nan")}, ValueError, "speed", "nan", "finite"),
    "speed beyond float32": ({"speed": 1e39}, ValueError, "speed", r"1e\+39", "as a float32"),
    "speed beyond float64": ({"speed": 10**400}, ValueError, "speed", "1000", "finite"),
    "speed a string": ({"speed": "fast"}, TypeError, "speed", "str", "a float"),
    "speed an array": ({"speed": ZEROS}, TypeError, "speed", "Array", "shape ()"),
}


@pytest.mark.parametrize("name", UPDATE_REFUSALS)
def test_refusals_of_the_update(name: str) -> None:
    change, error, argument, was, may_be = UPDATE_REFUSALS[name]
    arguments: dict[str, Any] = {"bias": ZEROS, "load": LOAD, **change}
    with refusal(error, argument, was, may_be):
        update_selection_bias(**arguments)
