"""The training step of Qwen3-MoE: one run whatever the mesh, the microbatches and the layer."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType

from jax_megamoe import ops, update_selection_bias
from jax_megamoe.models import storage, training
from jax_megamoe.models.qwen3_moe import Qwen3Moe
from tests.modules import assert_bitwise, assert_close
from tests.qwen3_training import (
    BATCH,
    CHUNK,
    MODEL,
    SEQ,
    VOCABULARY,
    make_batch,
    make_config,
    trained,
)
from tests.refusals import refusal

# float32 sums of another order, four steps of AdamW on them.
ROUNDING = 2e-4
MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {"num_devices": 4},
    "experts, microbatches, plain JAX": {
        "num_devices": 4,
        "expert_parallel": 2,
        "microbatches": 2,
        "moe": "jax",
    },
}
FP8 = {
    "num_devices": 4,
    "expert_parallel": 4,
    "microbatches": 2,
    "precision": "fp8_block",
    "balance": "loss",
    "remat": "gate_up",
}


@pytest.fixture(autouse=True, scope="module")
def _quick_to_compile() -> Iterator[None]:
    """The programs are small, and compiled for some steps alone."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("case", MESHES)
def test_every_mesh_trains_the_model_of_one_device(case: str) -> None:
    one, found = trained(), trained(**MESHES[case])
    assert one.losses[-1] < one.losses[0] - 1
    assert_close(found.losses, one.losses, ROUNDING)
    assert_bitwise(found.metrics[0].load, one.metrics[0].load)
    assert_close(found.metrics[0].gradient_norm, one.metrics[0].gradient_norm, ROUNDING)


@pytest.mark.parametrize("case", MESHES)
def test_each_parameter_and_moment_is_stored_split(case: str) -> None:
    """A quarter of each array lies on each device, of the experts' too."""
    found = trained(**MESHES[case])
    split, whole = set(), set()
    for path, variable in found.state.items():
        value = variable[...]
        (local,) = {shard.data.size for shard in value.addressable_shards}
        (split if 4 * local == value.size else whole).add(path)
        assert value.dtype == jnp.float32 or not value.ndim, path
    of_model = {path[1:] for path in split if path[0] == 0}
    assert len(of_model) == 15 and {path[-1] for path in of_model} >= {"w_down", "query", "norm"}
    for moment in ("mu", "nu"):
        of_moment = {p[p.index(moment) + 1 :] for p in split if moment in p}
        assert of_moment == of_model
    assert {path[-1] for path in whole} == {"selection_bias", "count", "step"}
    spec = found.state[(0, "runs", 0, "mlp", "w_gate")].get_metadata("out_sharding")
    assert spec == (None, "expert", ("data", "fsdp"), None)


def test_fp8_experts_and_a_loss_for_the_load() -> None:
    """Other roundings and another balance, so the first steps are near, and no more."""
    found, one = trained(**FP8), trained()
    assert_close(found.losses, one.losses, 2e-2)
    assert not np.array_equal(found.losses, one.losses)
    assert all(path[-1] != "selection_bias" for path in found.state)
    assert found.state[(0, "runs", 0, "mlp", "w_gate")][...].dtype == jnp.float32


def test_weights_are_quantised_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call quantises for itself; without what the step gives them, each would."""

    def refused(*_: Any) -> Any:
        raise AssertionError("quantised by a call")

    monkeypatch.setattr(ops, "quantize_expert_weights", refused)
    # Of another seed than elsewhere, so that it is traced here.
    config = make_config(precision="fp8_block", microbatches=2, seed=5)
    with jax.set_mesh(training.make_mesh(config, jax.devices()[:1])):
        model, optimizer = nnx.eval_shape(lambda: training.create(config))
        nnx.eval_shape(
            lambda m, o, b: training.train_step(m, o, b, config), model, optimizer, make_batch(2)
        )
        with pytest.raises(AssertionError, match="quantised by a call"):
            nnx.eval_shape(lambda m: m.hidden(jnp.zeros((4, 8), jnp.int32))[0], model)


def test_given_quantised_weights_are_those_that_are_multiplied() -> None:
    config = make_config(precision="fp8_block")
    with jax.set_mesh(training.make_mesh(config, jax.devices()[:1])):
        model, _ = training.create(config)
        tokens = jnp.asarray(make_batch().tokens[0])
        quantized = nnx.jit(Qwen3Moe.quantize_experts)(model)
        run = nnx.jit(lambda m, q: m.hidden(tokens, quantized_experts=q)[0])
        right = run(model, None)
        assert_bitwise(run(model, quantized), right)
        of_other_layers = jax.tree.map(lambda a: a[::-1], quantized)
        assert not np.array_equal(run(model, of_other_layers), right)
        with refusal(ValueError, "quantized_experts", "of length 2", "one for each of 1 runs"):
            model.hidden(tokens, quantized_experts=[None, None])


def test_the_selection_bias_follows_the_load() -> None:
    found = trained(num_steps=1)
    bias = found.state[(0, "runs", 0, "mlp", "selection_bias")][...]
    load = found.metrics[0].load
    assert load.sum() == 2 * 2 * (BATCH * SEQ - 7)  # layers, choices, positions but padding
    for of_layer, right in zip(bias, load, strict=True):
        assert_bitwise(of_layer, update_selection_bias(jnp.zeros(8), jnp.asarray(right), 1e-3))


def test_the_loss_is_the_mean_over_what_is_predicted() -> None:
    """Of the first step, by the logits of all positions at once."""
    config, batch = make_config(), make_batch()
    with jax.set_mesh(training.make_mesh(config, jax.devices()[:1])):
        model, _ = training.create(config)
        tokens, ids = (jnp.asarray(a[0]) for a in batch)
        logits, _ = nnx.jit(lambda m: m(tokens[:, :-1], ids[:, :-1]))(model)
    log_p = np.asarray(jax.nn.log_softmax(logits))
    nll = -np.take_along_axis(log_p, np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    is_target = np.asarray((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0))
    assert 0.5 < is_target.mean() < 0.95
    assert_close(trained().losses[0], nll[is_target].mean(), 1e-5)


def test_evaluating_gives_the_loss_of_the_step_and_changes_nothing() -> None:
    config, batch = make_config(), make_batch()
    with jax.set_mesh(training.make_mesh(config, jax.devices()[:1])):
        model, _ = training.create(config)
        before = jax.tree.map(np.array, nnx.state(model))
        found = training.evaluate(model, batch, config)
        jax.tree.map(assert_bitwise, jax.tree.map(np.asarray, nnx.state(model)), before)
    ids = batch.segment_ids
    assert found.num_targets == ((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] > 0)).sum()
    assert_close(float(found.nll) / int(found.num_targets), trained().losses[0], 1e-6)


def test_logits_are_never_whole() -> None:
    """No array of the program holds the logits of more than a chunk of each sequence."""
    config = make_config()
    with jax.set_mesh(training.make_mesh(config, jax.devices()[:1])):
        model, optimizer = nnx.eval_shape(lambda: training.create(config))
        program = training.train_step.lower(model, optimizer, make_batch(), config).as_text()
    shapes = re.findall(rf"tensor<((?:\d+x)+){VOCABULARY}xf32>", program)
    rows = {np.prod([int(n) for n in shape.split("x")[:-1]]) for shape in shapes}
    assert BATCH * CHUNK in rows
    assert max(rows - {128}) == BATCH * CHUNK  # 128: the output matrix, [H, V]


def test_the_gradient_of_the_output_matrix_is_summed_over_devices_once() -> None:
    """Not for each chunk of positions: no loop of the loss or its backward has a sum of it."""
    config = make_config()
    with jax.set_mesh(training.make_mesh(config, jax.devices()[:4])):
        model, _ = nnx.eval_shape(lambda: training.create(config))
        graph, parameters, state = nnx.split(model, nnx.Param, ...)

        def loss(parameters: Any, hidden: jax.Array) -> jax.Array:
            ones = jnp.ones((BATCH, SEQ), jnp.int32)
            model = nnx.merge(graph, parameters, state)
            return training.summed_loss(model, hidden, ones, ones > 0, CHUNK)

        hidden = jax.ShapeDtypeStruct((BATCH, SEQ, 128), jnp.float32)
        program = jax.make_jaxpr(jax.grad(loss))(parameters, hidden)
    sums = list(sums_over_devices(program.jaxpr, in_loop=False))
    assert [in_loop for shape, in_loop in sums if len(shape) == 2] == [False]


def test_only_parameters_are_gathered_outside_of_the_layer() -> None:
    """No device gets the tokens of others, or their logits, but where it has the experts."""
    config = make_config(expert_parallel=2, model={**MODEL, "num_hidden_layers": 1})
    mesh = training.make_mesh(config, jax.devices()[:4])
    rows = jax.NamedSharding(mesh, training.BATCH_SPEC)
    with jax.set_mesh(mesh):
        model, optimizer = nnx.eval_shape(lambda: training.create(config))
        batch = jax.device_put(make_batch(), rows)
        program = training.train_step.lower(model, optimizer, batch, config).compile().as_text()
    assert program is not None
    shapes = [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    parameters = {*shapes, *(shape[1:] for shape in shapes), (4, 128, 128)}  # experts of a device
    lines = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(.*op_name=\"(.*?)\"", program)
    gathered = [dims.removeprefix("1,") for dims, where in lines if "shard_map" not in where]
    found = {tuple(map(int, dims.split(","))) for dims in gathered}
    assert found and found <= parameters, found - parameters


def sums_over_devices(jaxpr: Any, in_loop: bool) -> Iterator[tuple[tuple[int, ...], bool]]:
    """The shape of each, and whether it is in a loop."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name.startswith("psum"):
            yield from ((v.aval.shape, in_loop) for v in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sums_over_devices(inner, in_loop or name == "scan")


@pytest.mark.parametrize(
    ("changes", "num_devices", "argument", "was"),
    [
        ({"data_parallel": 3}, 4, "data_parallel, fsdp and expert_parallel", r"\(3, 1, 1\)"),
        ({"fsdp": 2}, 4, "data_parallel, fsdp and expert_parallel", r"\(1, 2, 1\)"),
        ({"microbatches": 4}, 4, "batch", "8 in 4 microbatches"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(
    changes: dict[str, Any], num_devices: int, argument: str, was: str
) -> None:
    config = make_config(**changes)
    with refusal(ValueError, argument, was, f"{num_devices}"):
        training.make_mesh(config, jax.devices()[:num_devices])


def make_mesh(of_experts: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("fsdp", "expert"), axis_types=(AxisType.Auto, of_experts))


@pytest.mark.parametrize(
    ("axes", "error", "was"),
    [
        ("fsdp", TypeError, "'fsdp'"),
        (("nothing",), ValueError, "nothing"),
        (("fsdp", "fsdp"), ValueError, "fsdp"),
        (("expert",), ValueError, "expert"),
    ],
)
def test_axes_of_storage_are_refused_by_name(axes: Any, error: type[Exception], was: str) -> None:
    with jax.set_mesh(make_mesh(AxisType.Auto)), refusal(error, "fsdp_axes", was, "ax[ei]s"):
        storage.check_fsdp_axes(axes, "expert")


def test_storage_is_split_on_automatic_meshes_alone() -> None:
    with refusal(ValueError, "fsdp_axes", "fsdp", "jax.set_mesh"):
        storage.check_fsdp_axes(("fsdp",), None)
    with jax.set_mesh(make_mesh(AxisType.Explicit)):
        storage.check_fsdp_axes((), "expert")
        with refusal(ValueError, "fsdp_axes", "Explicit", "automatic"):
            storage.check_fsdp_axes(("fsdp",), "expert")


def test_which_backend_runs_the_experts() -> None:
    sizes = {"H": 128, "I": 128, "R": 1}
    assert training.experts_run_on(make_config().experts, **sizes) == (
        "the reference (JAX runs on the cpu)"
    )
    asked = make_config(precision="bf16", backend="cuda").experts
    with refusal(ValueError, "backend", "'cuda', but JAX runs on the cpu", "'auto'"):
        training.experts_run_on(asked, **sizes)


def test_kernels_of_several_gpus_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    reason = lambda moe, *, H, I, R: "not on several" if R > 1 else ""  # noqa: E731
    monkeypatch.setattr(training, "reason_for_reference", reason)
    sizes = {"H": 128, "I": 128, "R": 2}
    for precision in ("bf16", "fp8_block"):
        auto, by_name = (
            make_config(precision=precision, backend=b).experts for b in ("auto", "cuda")
        )
        assert training.experts_run_on(auto, **sizes) == "the reference (not on several)"
        assert training.experts_run_on(by_name, **sizes) == "the CUDA kernels"
