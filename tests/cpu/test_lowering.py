"""Programs lowered for CUDA on a machine without one: how often they call which kernel.

One forward and one backward call per layer under every transformation, and no collective but the
sum of a replicated weight's gradient: the kernels do the rest themselves.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_megamoe import sharded_mega_moe
from tests import cases, layer
from tests.cases import ROUTINGS
from tests.lowering import count, lower_for_cuda

T, K, E, H, I = 16, 2, 8, 64, 64
BATCH = cases.normal(
    ROUTINGS["distinct"](tokens=T, choices=K, experts=E), num_experts=E, hidden=H, intermediate=I
)
X, IDS, W, *WEIGHTS, DY = map(jnp.asarray, BATCH)
ONE_EACH = {"forward": 1, "backward": 1}

op = layer.bind(backend="cuda")


def loss(x: Any, w: Any, *weights: Any) -> Any:
    return jnp.sum(jnp.square(op(x, IDS, w, *weights)))


def grad(f: Callable[..., Any]) -> Any:
    return jax.jit(jax.grad(f, argnums=tuple(range(5))))


def mesh_of(data: int, expert: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(jax.devices()[: data * expert]).reshape(data, expert)
    return Mesh(devices, ("data", "expert"), axis_types=(axis_type,) * 2)


def test_a_forward_pass_is_one_call() -> None:
    text = lower_for_cuda(jax.jit(op), *BATCH[:6])
    assert count(text) == {"forward": 1}


@pytest.mark.parametrize("return_counts", [False, True])
def test_a_gradient_is_one_call_each(return_counts: bool) -> None:
    def with_counts(*args: Any) -> Any:
        y, counts = layer.bind(backend="cuda", return_counts=True)(args[0], IDS, *args[1:])
        return jnp.sum(jnp.square(y)), counts

    f = jax.grad(with_counts, has_aux=True) if return_counts else jax.grad(loss)
    assert count(lower_for_cuda(jax.jit(f), X, W, *WEIGHTS)) == ONE_EACH


def test_calls_have_no_side_effect() -> None:
    """So XLA drops a forward whose y nobody reads: the residuals are the inputs."""
    assert "has_side_effect" not in lower_for_cuda(grad(loss), X, W, *WEIGHTS)


def test_donation_changes_no_call() -> None:
    def step(weights: list[Any]) -> Any:
        gradients = jax.grad(lambda ws: loss(X, W, *ws))(weights)
        return [w - g for w, g in zip(weights, gradients, strict=True)]

    text = lower_for_cuda(jax.jit(step, donate_argnums=0), WEIGHTS)
    assert count(text) == ONE_EACH
    assert text.count("tf.aliasing_output") == 3


def test_nested_jit_changes_no_call() -> None:
    inner = jax.jit(loss)
    text = lower_for_cuda(grad(jax.jit(lambda *args: inner(*args))), X, W, *WEIGHTS)
    assert count(text) == ONE_EACH


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_over_layers_is_one_call_each(remat: bool) -> None:
    def block(x: Any, weights: Any) -> Any:
        return x + op(jnp.tanh(x), IDS, W, *weights), None

    def of_stack(stack: Any) -> Any:
        return jnp.sum(
            jnp.square(jax.lax.scan(jax.checkpoint(block) if remat else block, X, stack)[0])
        )

    stack = [jnp.stack([w] * 3) for w in WEIGHTS]
    assert count(lower_for_cuda(jax.jit(jax.grad(of_stack)), stack)) == ONE_EACH


def _linear_block(x: Any, *rest: Any) -> Any:
    return x + op(jnp.tanh(x), IDS, *rest)


def _nonlinear_block(x: Any, *rest: Any) -> Any:
    return x + jnp.tanh(op(jnp.tanh(x), IDS, *rest))


def _two_blocks(x: Any, *rest: Any) -> Any:
    """The second layer's input is a residual that needs the first layer's y."""
    return _linear_block(_linear_block(x, *rest), *rest)


POLICIES = jax.checkpoint_policies


@pytest.mark.parametrize(
    ("block", "policy", "right"),
    [
        (_linear_block, None, {"forward": 1, "backward": 1}),
        (_nonlinear_block, None, {"forward": 2, "backward": 1}),
        (_two_blocks, None, {"forward": 3, "backward": 2}),
        (_linear_block, POLICIES.everything_saveable, {"forward": 1, "backward": 1}),
        (_nonlinear_block, POLICIES.everything_saveable, {"forward": 1, "backward": 1}),
        (_nonlinear_block, POLICIES.dots_saveable, {"forward": 2, "backward": 1}),
    ],
)
def test_remat_recomputes_only_what_a_nonlinear_use_needs(
    block: Any, policy: Any, right: dict[str, int]
) -> None:
    remat = jax.checkpoint(block, policy=policy)
    text = lower_for_cuda(grad(lambda *a: jnp.sum(jnp.square(remat(*a)))), X, W, *WEIGHTS)
    assert count(text) == right


def test_remat_saves_a_named_result() -> None:
    """With the name of y in the policy a nonlinear use needs no second forward either."""

    def block(x: Any, *rest: Any) -> Any:
        y = checkpoint_name(op(jnp.tanh(x), IDS, *rest), "moe")
        return x + jnp.tanh(y)

    remat = jax.checkpoint(block, policy=POLICIES.save_only_these_names("moe"))
    text = lower_for_cuda(grad(lambda *a: jnp.sum(jnp.square(remat(*a)))), X, W, *WEIGHTS)
    assert count(text) == ONE_EACH


@pytest.mark.parametrize("trainable", [True, False])
def test_frozen_experts_ask_for_no_weight_gradients(trainable: bool) -> None:
    run = layer.compiled(backend="cuda", trainable_experts=trainable)
    text = lower_for_cuda(run, *BATCH)
    (line,) = (line for line in text.splitlines() if "@jax_megamoe_backward" in line)
    results = line.rsplit("->", 1)[1].strip(" ()").split(", ")
    small = [f"tensor<{T}x{H}xbf16>", f"tensor<{T}x{K}xf32>"]
    weight = f"tensor<{E}x{H}x{I}xf32>"
    gradients = small + [weight] * (3 if trainable else 0)
    # The workspace follows.
    assert results[: len(gradients)] == gradients
    assert results.count(weight) == len(gradients) - len(small)
    assert count(text) == ONE_EACH


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_shard_map_adds_no_collective(num_ranks: int, check_vma: bool) -> None:
    text = lower_for_cuda(layer.compiled(num_ranks, check_vma=check_vma, backend="cuda"), *BATCH)
    assert count(text) == ONE_EACH
    assert text.count(f"R = {num_ranks} : i64") == 2


def test_weights_replicated_over_data_sum_their_gradients_once() -> None:
    """Inside shard_map with check_vma: one all_reduce per weight, over the data axis alone."""
    mesh = mesh_of(2, 4)
    tokens, experts = PartitionSpec(("data", "expert")), PartitionSpec("expert")
    specs = (tokens,) * 3 + (experts,) * 3
    run = jax.shard_map(
        layer.results_and_pullback(layer.bind(backend="cuda", axis_name="expert")),
        mesh=mesh,
        in_specs=(*specs, tokens),
        out_specs=cases.Results(tokens, tokens, tokens, experts, experts, experts),
    )
    text = lower_for_cuda(jax.jit(run), *BATCH)
    assert count(text) == {**ONE_EACH, "all_reduce": 3}
    axes = re.findall(r"all_reduce.*?replica_groups = .*?axes = \[(.*?)\]", text)
    assert axes == ['#stablehlo.axis_ref<name = "data">'] * 3


@pytest.mark.parametrize("return_counts", [False, True])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_entry_sums_over_data_only(axis_type: AxisType, return_counts: bool) -> None:
    mesh = mesh_of(2, 4, axis_type)
    entry = functools.partial(
        sharded_mega_moe,
        expert_axis="expert",
        data_axes=("data",),
        backend="cuda",
        return_counts=return_counts,
    )

    def gradients(x: Any, ids: Any, *rest: Any) -> Any:
        def of_floats(x: Any, *rest: Any) -> Any:
            result: Any = entry(x, ids, *rest)
            y, counts = result if return_counts else (result, None)
            return jnp.sum(jnp.square(y)), counts

        return jax.grad(of_floats, argnums=tuple(range(5)), has_aux=True)(x, *rest)

    tokens = NamedSharding(mesh, PartitionSpec(("data", "expert")))
    experts = NamedSharding(mesh, PartitionSpec("expert"))
    args = [
        jax.device_put(a, s) for a, s in zip(BATCH[:6], [tokens] * 3 + [experts] * 3, strict=True)
    ]
    with jax.set_mesh(mesh):
        text = lower_for_cuda(jax.jit(gradients), *args)
    assert count(text) == {**ONE_EACH, "all_reduce": 4 if return_counts else 3}


def test_sharded_entry_inside_a_shard_map_over_data() -> None:
    """Partly manual: data is manual outside, the entry makes the expert axis manual too."""
    mesh = mesh_of(2, 4)

    def per_data_shard(x: Any, ids: Any, w: Any, *weights: Any) -> Any:
        def of_floats(x: Any, w: Any, *weights: Any) -> Any:
            result: Any = sharded_mega_moe(
                x, ids, w, *weights, expert_axis="expert", data_axes=("data",), backend="cuda"
            )
            return jax.lax.psum(jnp.sum(jnp.square(result)), "data")

        return jax.grad(of_floats, argnums=tuple(range(5)))(x, w, *weights)

    data, whole = PartitionSpec("data"), PartitionSpec()
    run = jax.shard_map(
        per_data_shard,
        mesh=mesh,
        in_specs=(data,) * 3 + (whole,) * 3,
        out_specs=(data,) * 2 + (whole,) * 3,
        axis_names={"data"},
    )
    assert count(lower_for_cuda(jax.jit(run), *BATCH[:6])) == {**ONE_EACH, "all_reduce": 3}


def test_lowering_the_kernels_for_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="backend was 'cuda' in a computation for the platform 'c"):
        jax.jit(op).trace(*BATCH[:6]).lower(lowering_platforms=("cpu",))


def test_lowering_for_both_platforms_is_refused() -> None:
    with pytest.raises(ValueError, match="platform 'cpu'; it may be 'reference' or 'auto' there"):
        jax.jit(op).trace(*BATCH[:6]).lower(lowering_platforms=("cuda", "cpu"))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_the_reference_lowers_for_both_platforms(backend: str) -> None:
    run = jax.jit(layer.bind(backend=backend)).trace(*BATCH[:6])
    text = run.lower(lowering_platforms=("cuda", "cpu")).as_text()
    assert "jax_megamoe" not in text


EXPORT = functools.partial(jax.export.export, platforms=("cuda",))


def test_export_needs_its_check_of_custom_calls_disabled() -> None:
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"jax_megamoe_{name}")
        for name in ("forward", "backward")
    ]
    exported = EXPORT(grad(loss), disabled_checks=checks)(X, W, *WEIGHTS)
    assert exported.platforms == ("cuda",)
    assert count(exported.mlir_module()) == ONE_EACH


def test_export_raises_the_error_of_jax_otherwise() -> None:
    with pytest.raises(ValueError, match="Cannot serialize code with custom calls"):
        EXPORT(grad(loss))(X, W, *WEIGHTS)
