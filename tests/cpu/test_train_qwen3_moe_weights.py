"""The Qwen3-MoE example from a checkpoint of Hugging Face, and back to one."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jax_megamoe.models import safetensors, training
from jax_megamoe.models.qwen3_moe import from_hugging_face, to_hugging_face
from tests.qwen3_training import make_config
from tests.training import ROOT, write_text

sys.path.insert(0, str(ROOT / "examples"))
weights, script = map(importlib.import_module, ("qwen3.weights", "train_qwen3_moe"))

MODEL = dataclasses.replace(make_config().model, vocab_size=288)  # bytes and an end of text
MESH = training.make_mesh(make_config(expert_parallel=2), jax.devices()[:4])
SMALL = ROOT / "examples" / "qwen3" / "small.toml"


@pytest.fixture(autouse=True, scope="module")
def _quick_to_compile() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_model(**changes: Any) -> Any:
    """On the mesh of four devices that is set."""
    config = dataclasses.replace(make_config(expert_parallel=2, **changes), model=MODEL)
    return nnx.jit(lambda: training.make_model(config))()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two layers, from a model that lies on four devices."""
    folder = tmp_path_factory.mktemp("weights")
    with jax.set_mesh(MESH):
        weights.export(make_model(seed=3), folder, "bfloat16")
    return folder


def test_a_run_starts_from_what_another_left(checkpoint: Path, tmp_path: Path) -> None:
    """Its first step has a learning rate of 0, so it leaves what it took: the first layer."""
    (tmp_path / "text").mkdir()
    write_text(tmp_path / "text")
    options = "--layers 1 --seq 16 --batch 8 --steps 1 --warmup 1 --expert-parallel 2 --held-out 0"
    paths = {"data": tmp_path / "text", "out": tmp_path, "weights": checkpoint}
    paths |= {"export": tmp_path / "to", "config": SMALL}
    given = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    assert script.main([*given, *options.split(), "--balance", "loss"]) == 0
    found, expected = safetensors.read(tmp_path / "to"), safetensors.read(checkpoint)
    assert {name for name in expected if ".layers.1." not in name} == set(found)
    for name, value in found.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, expected[name].astype(np.float32), err_msg=name)
    exported = from_hugging_face(json.loads((tmp_path / "to" / "config.json").read_text()))
    assert exported == dataclasses.replace(MODEL, num_hidden_layers=1)


def test_weights_lie_where_drawn_ones_do(checkpoint: Path) -> None:
    with jax.set_mesh(MESH):
        model = make_model()
        drawn = {path: v[...] for path, v in nnx.to_flat_state(nnx.state(model))}
        weights.load(model, checkpoint)
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        found, was = variable[...], drawn[path]
        assert found.sharding.is_equivalent_to(was.sharding, was.ndim) and found.dtype == was.dtype
        is_constant = "norm" in str(path[-1]) or path[-1] == "selection_bias"
        assert np.array_equal(found, was) == is_constant, path


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        ({"rope_theta": 5e5}, None, "rope_theta = 1000000.0, but the run's model has 500000.0"),
        ({"num_experts": 16}, None, "num_experts = 8, but the run's model has 16"),
        ({"num_hidden_layers": 1}, None, "num_hidden_layers = 2, .* has 1; --layers takes the fi"),
        ({"num_hidden_layers": 3}, 3, "num_hidden_layers = 2, but the run's model has 3"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(
    checkpoint: Path, changes: dict[str, Any], layers: int | None, message: str
) -> None:
    model = dataclasses.replace(MODEL, **changes)
    with pytest.raises(weights.UsageError, match=f"^--weights {checkpoint} has {message}"):
        weights.check_fits(checkpoint, model, layers)


def test_what_is_of_training_alone_may_differ(checkpoint: Path) -> None:
    weights.check_fits(checkpoint, dataclasses.replace(MODEL, router_aux_loss_coef=0.5), None)
    weights.check_fits(checkpoint, dataclasses.replace(MODEL, num_hidden_layers=1), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--weights EMPTY", "--weights EMPTY is no folder with a config.json"),
        ("--weights CHECKPOINT --model qwen3-30b-a3b", "has vocab_size = 288, but"),
        ("--weights SCALED", "rope_scaling: was "),
        ("--weights BROKEN", "BROKEN/config.json: was no JSON: "),
        ("--weights BROKEN --model qwen3-30b-a3b", "BROKEN/config.json: was no JSON: "),
        ("--export CHECKPOINT --balance none", "has a checkpoint already: model.safetensors"),
        ("--export EMPTY", "--export needs --balance loss or none"),
        ("--export CHECKPOINT/config.json --balance none", "config.json is no folder"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    folders = {"CHECKPOINT": checkpoint, "EMPTY": tmp_path / "empty", "SCALED": tmp_path / "scaled"}
    folders["BROKEN"] = tmp_path / "broken"
    for name in ("EMPTY", "SCALED", "BROKEN"):
        folders[name].mkdir()
    (folders["BROKEN"] / "config.json").write_text("{")
    fields = to_hugging_face(MODEL) | {"rope_scaling": {"rope_type": "yarn"}}
    (folders["SCALED"] / "config.json").write_text(json.dumps(fields))
    for name, path in folders.items():
        arguments, message = (text.replace(name, str(path)) for text in (arguments, message))
    assert script.main(["--config", str(SMALL), "--out", str(tmp_path), *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_without_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    safetensors.write(tmp_path, {"model.norm.weight": np.ones(MODEL.hidden_size, np.float32)})
    with jax.set_mesh(MESH):
        model = nnx.eval_shape(make_model)
    with pytest.raises(weights.UsageError, match="lm_head.weight: was missing among 1 tensors"):
        weights.load(model, tmp_path)
