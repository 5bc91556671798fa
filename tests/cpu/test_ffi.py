"""The custom calls lower for CUDA on a machine without one, with or without the extension."""

import functools
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jax_megamoe
from jax_megamoe import ClampedSwiGLU, _ffi
from jax_megamoe.activation import gated_unit
from jax_megamoe.config import Dims, MegaMoEConfig
from jax_megamoe.plan import backward_steps, forward_steps

DIMS = Dims(T=16, K=2, E=8, R=1, H=64, I=32)


def operand_types(dims: Dims) -> tuple[jax.ShapeDtypeStruct, ...]:
    """x, expert_idx, expert_weight, w_gate, w_up, w_down of one rank."""
    experts = dims.experts_per_rank
    wide, narrow = (experts, dims.H, dims.I), (experts, dims.I, dims.H)
    types = (
        ((dims.T, dims.H), jnp.bfloat16),
        ((dims.T, dims.K), jnp.int32),
        ((dims.T, dims.K), jnp.float32),
        (wide, jnp.bfloat16),
        (wide, jnp.bfloat16),
        (narrow, jnp.bfloat16),
    )
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types)


def lowered(function, *types: jax.ShapeDtypeStruct) -> str:
    return jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",)).as_text()


def test_forward_lowers_to_one_custom_call_with_its_dimensions() -> None:
    types = operand_types(DIMS)

    def forward(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return _ffi.forward_call(*operands, dims=DIMS, config=MegaMoEConfig(), axis_name=None)

    y, counts = jax.eval_shape(forward, *types)
    assert (y.shape, y.dtype) == ((DIMS.T, DIMS.H), jnp.bfloat16)
    assert (counts.shape, counts.dtype) == ((DIMS.E,), jnp.int32)
    text = lowered(forward, *types)
    assert text.count("@jax_megamoe_forward") == 1
    for name in ("T", "K", "E", "R", "H", "I"):
        assert f"{name} = {getattr(DIMS, name)} : i64" in text
    assert f"num_blocks = {DIMS.num_blocks} : i64" in text
    assert 'precision = "bf16"' in text and "has_side_effect" not in text


def test_a_trace_is_one_more_result_of_the_same_call() -> None:
    def forward(*operands: jax.Array, trace: bool) -> tuple[jax.Array, ...]:
        options = {"dims": DIMS, "config": MegaMoEConfig(), "axis_name": None}
        return _ffi.forward_call(*operands, **options, trace=trace)

    types = operand_types(DIMS)
    plain = jax.eval_shape(functools.partial(forward, trace=False), *types)
    *same, records = jax.eval_shape(functools.partial(forward, trace=True), *types)
    assert [(r.shape, r.dtype) for r in same] == [(r.shape, r.dtype) for r in plain]
    assert records.dtype == jnp.int32 and records.shape[1] == 4
    # At least the items of an even routing, a tile an expert and one N-tile a step, and the tokens.
    assert records.shape[0] > 2 * DIMS.E + DIMS.T
    assert lowered(functools.partial(forward, trace=True), *types).count(_ffi.FORWARD) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("trainable", [True, False])
def test_backward_returns_weight_gradients_only_when_asked(trainable: bool, dtype: Any) -> None:
    """In the dtype of the weights: float32 ones straight from the sums."""
    config = MegaMoEConfig(trainable_experts=trainable)
    types = operand_types(DIMS)
    types = types[:3] + tuple(jax.ShapeDtypeStruct(t.shape, dtype) for t in types[3:])

    def backward(*operands: jax.Array, trace: bool = False) -> tuple[jax.Array, ...]:
        options = {"dims": DIMS, "config": config, "axis_name": None}
        return _ffi.backward_call(*operands, **options, trace=trace)

    shapes = [(r.shape, r.dtype) for r in jax.eval_shape(backward, types[0], *types)]
    want = [(types[0].shape, jnp.bfloat16), (types[2].shape, jnp.float32)]
    want += [(t.shape, dtype) for t in types[3:] if trainable]
    assert shapes == want
    text = lowered(backward, types[0], *types)
    assert text.count("@jax_megamoe_backward") == 1
    steps = backward_steps(DIMS, trainable_experts=trainable)
    fields = ", ".join(str(n) for s in steps for n in (s.tiles_m or 0, s.tiles_n, s.lag))
    assert f"steps = array<i64: {fields}>" in text or f"steps = dense<[{fields}]>" in text
    traced = functools.partial(backward, trace=True)
    *same, records = jax.eval_shape(traced, types[0], *types)
    assert [(r.shape, r.dtype) for r in same] == want
    assert records.dtype == jnp.int32 and records.shape[1] == 4


@pytest.mark.parametrize("trace", [True, False])
def test_what_is_kept_is_a_result_of_the_forward_and_an_operand_of_the_backward(
    trace: bool,
) -> None:
    config, types = MegaMoEConfig(), operand_types(DIMS)

    def forward(*operands: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
        return _ffi.forward_call(*operands, dims=DIMS, config=config, axis_name=None, **options)

    def backward(*operands: jax.Array) -> tuple[jax.Array, ...]:
        *arrays, gate_up = operands
        return _ffi.backward_call(
            *arrays, dims=DIMS, config=config, axis_name=None, gate_up=gate_up
        )

    plain = jax.eval_shape(functools.partial(forward, trace=trace), *types)
    run = functools.partial(forward, keep_gate_up=True, trace=trace)
    y, counts, gate_up, *records = jax.eval_shape(run, *types)
    found = [(r.shape, r.dtype) for r in (y, counts, *records)]
    assert found == [(r.shape, r.dtype) for r in plain]
    assert (gate_up.shape, gate_up.dtype) == ((DIMS.pool_rows, 2 * DIMS.I), jnp.bfloat16)
    assert lowered(run, *types).count("@jax_megamoe_forward") == 1
    text = lowered(backward, types[0], *types, jax.ShapeDtypeStruct(gate_up.shape, gate_up.dtype))
    (line,) = (line for line in text.splitlines() if "@jax_megamoe_backward" in line)
    operands = line.rsplit(": (", 1)[1].split(") ->")[0].split(", ")
    assert len(operands) == 8
    assert operands[-1] == f"tensor<{DIMS.pool_rows}x{2 * DIMS.I}xbf16>"


@pytest.mark.parametrize("activation", ["geglu", ClampedSwiGLU(alpha=1.5, limit=2.0)], ids=str)
def test_a_call_has_the_constants_of_its_activation(activation: Any) -> None:
    config = MegaMoEConfig(activation=activation)

    def forward(*operands: jax.Array) -> jax.Array:
        return _ffi.forward_call(*operands, dims=DIMS, config=config, axis_name=None)[0]

    text = lowered(forward, *operand_types(DIMS))
    for name, constant in gated_unit(activation)._asdict().items():
        (found,) = re.findall(rf"[ {{]{name} = ([^ ]+) : f32", text)
        # Infinity comes as its bits.
        bits = int(found, 16) if found.startswith("0x") else np.float32(found).view(np.uint32)
        assert bits == np.float32(constant).view(np.uint32)


@pytest.mark.parametrize("trainable", [True, False])
def test_biases_are_operands_of_both_passes_and_their_gradients_results(trainable: bool) -> None:
    """In float32, whatever the weights are; before what the forward has kept."""
    config, types = MegaMoEConfig(trainable_experts=trainable), operand_types(DIMS)
    shapes = [(DIMS.E, DIMS.I), (DIMS.E, DIMS.I), (DIMS.E, DIMS.H)]
    biases = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    gate_up = jax.ShapeDtypeStruct((DIMS.pool_rows, 2 * DIMS.I), jnp.bfloat16)
    how: dict[str, Any] = {"dims": DIMS, "config": config, "axis_name": None}

    def forward(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return _ffi.forward_call(*operands, **how)

    def backward(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return _ffi.backward_call(*operands[:-1], gate_up=operands[-1], **how)

    plain, biased = (jax.eval_shape(forward, *types, *b) for b in ([], biases))
    assert plain == biased
    operands = (types[0], *types, *biases, gate_up)
    gradients = [(r.shape, r.dtype) for r in jax.eval_shape(backward, *operands)]
    assert len(gradients) == (8 if trainable else 2)
    if trainable:
        assert gradients[5:] == [(shape, jnp.float32) for shape in shapes]
    for text, last in ((lowered(forward, *types, *biases), 9), (lowered(backward, *operands), 10)):
        (line,) = (line for line in text.splitlines() if "@jax_megamoe_" in line)
        found = line.rsplit(": (", 1)[1].split(") ->")[0].split(", ")[last - 3 : last]
        assert found == [f"tensor<{a}x{b}xf32>" for a, b in shapes]
        assert "biases = 1 : i64" in line
    assert "biases = 0 : i64" in lowered(forward, *types)


def test_ranks_agree_on_the_activation_and_on_whether_there_are_biases() -> None:
    dims = Dims(T=16, K=2, E=8, R=2, H=64, I=64)
    others = [("swiglu", False), ("geglu", False), ("swiglu", True), (ClampedSwiGLU(), False)]
    others += [(ClampedSwiGLU(limit=1.0), False)]
    found = [_ffi._configuration(dims, MegaMoEConfig(activation=a), b) for a, b in others]
    assert len(set(found)) == len(others)
    zeros = [MegaMoEConfig(activation=ClampedSwiGLU(alpha=a)) for a in (0.0, -0.0)]
    assert len({_ffi._configuration(dims, config, False) for config in zeros}) == 1


def test_a_backward_of_several_passes_rounds_its_gradients_behind_the_call() -> None:
    """To the dtype of the weights; what its arrays hold is said by one number."""
    dims = Dims(T=16, K=2, E=8, R=4, H=64, I=64, pool_factor=1.25)
    x, *rest = operand_types(dims)

    def backward(*operands: jax.Array) -> tuple[jax.Array, ...]:
        how = {"dims": dims, "config": MegaMoEConfig(), "axis_name": "expert"}
        return _ffi.backward_call(*operands, **how)

    mesh = jax.sharding.AbstractMesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("expert")
    sharded = jax.shard_map(backward, mesh=mesh, in_specs=spec, out_specs=spec)
    types = [jax.ShapeDtypeStruct((4 * t.shape[0], *t.shape[1:]), t.dtype) for t in (x, x, *rest)]
    assert [g.dtype for g in jax.eval_shape(sharded, *types)[2:]] == [jnp.bfloat16] * 3
    text = lowered(sharded, *types)
    (line,) = (line for line in text.splitlines() if "@jax_megamoe_backward_peers" in line)
    results = line.rsplit("-> (", 1)[1].split(", ")
    assert results[2:5] == ["tensor<2x64x64xf32>"] * 3
    assert f"pool_routes = {dims.pool_routes} : i64" in line


@pytest.mark.parametrize("axis", ["expert", "data", ("data", "expert")])
def test_rank_groups_follow_the_mesh(axis: str | tuple[str, ...]) -> None:
    mesh = jax.sharding.AbstractMesh(
        (2, 4), ("data", "expert"), axis_types=(AxisType.Auto, AxisType.Auto)
    )
    groups = {
        "expert": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "data": [[0, 4], [1, 5], [2, 6], [3, 7]],
        ("data", "expert"): [[0, 1, 2, 3, 4, 5, 6, 7]],
    }[axis]
    dims = Dims(T=16, K=2, E=8, R=len(groups[0]), H=64, I=32)

    def forward(*operands: jax.Array) -> jax.Array:
        return _ffi.forward_call(*operands, dims=dims, config=MegaMoEConfig(), axis_name=axis)[0]

    sharded = jax.shard_map(
        forward,
        mesh=mesh,
        in_specs=PartitionSpec(mesh.axis_names),
        out_specs=PartitionSpec(mesh.axis_names),
    )
    types = [
        jax.ShapeDtypeStruct((8 * t.shape[0], *t.shape[1:]), t.dtype) for t in operand_types(dims)
    ]
    text = lowered(sharded, *types)
    flat = ", ".join(str(i) for group in groups for i in group)
    assert f"groups = dense<[{flat}]>" in text


def test_calls_lower_and_the_plan_says_why_it_cannot_run_without_the_extension() -> None:
    """In a fresh process where the extension cannot be imported."""
    code = """
import sys
sys.modules["jax_megamoe._cuda"] = None
import jax
from tests.cpu import test_ffi as t
t.test_forward_lowers_to_one_custom_call_with_its_dimensions()
try:
    t._ffi.plan(jax.numpy.zeros((1, 16, 2), "int32"), t.DIMS, 0, t.forward_steps(t.DIMS))
except RuntimeError as error:
    assert "not in this installation" in str(error), error
else:
    raise SystemExit("the plan ran")
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_import_and_registration_create_no_cuda_context() -> None:
    code = """
from jax_megamoe import _ffi
_ffi.register()
maps = open("/proc/self/maps").read()
assert "libcuda.so" not in maps, "the CUDA driver was loaded"
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_plan_refuses_too_many_choices_by_name() -> None:
    dims = Dims(T=16, K=40, E=8, R=1, H=64, I=32)
    with pytest.raises(ValueError, match="K: was 40"):
        _ffi.plan(jnp.asarray(np.zeros((1, 16, 40), np.int32)), dims, 0, forward_steps(dims))


def with_extension(monkeypatch: pytest.MonkeyPatch, *faults: str) -> None:
    module = SimpleNamespace(take_faults=lambda: list(faults))
    monkeypatch.setattr(_ffi, "extension", lambda: (module, ""))


def test_check_faults_raises_all_that_nobody_has_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with_extension(monkeypatch, "rank 0 gave up", "rank 1 gave up")
    with pytest.raises(RuntimeError, match="^jax_megamoe: rank 0 gave up; and rank 1 gave up$"):
        jax_megamoe.check_faults()
    with_extension(monkeypatch)
    jax_megamoe.check_faults()
    monkeypatch.setattr(_ffi, "extension", lambda: (None, "not built"))
    jax_megamoe.check_faults()


def test_faults_are_told_at_exit_before_jax_ends() -> None:
    """The memory that the extension looks at goes with the backends. A child tells nothing."""
    code = """
import os, sys, types, warnings
warnings.simplefilter("ignore")  # JAX's of os.fork
from jax._src import api
api.clear_caches = lambda: print("JAX", flush=True)
module = types.ModuleType("_cuda")
module.registrations, module.at_exit = dict, lambda: print("the extension", flush=True)
sys.modules["jax_megamoe._cuda"] = module
from jax_megamoe import _ffi
_ffi.register()
_ffi.register()
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
else:
    api.clear_caches = lambda: None
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.stdout.splitlines() == ["the extension", "JAX"], result
