"""What a training run may be, from where it comes, and what its FLOPs are."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.models import flops, training_config
from jax_megamoe.models.qwen3_moe import QWEN3_30B_A3B, to_hugging_face
from jax_megamoe.models.training_config import TrainingConfig, from_dict, to_dict
from tests.qwen3_training import MODEL, make_config
from tests.refusals import refusal


def of_command_line(*arguments: Any) -> TrainingConfig:
    parser = argparse.ArgumentParser()
    training_config.add_arguments(parser)
    return training_config.from_arguments(parser.parse_args([*map(str, arguments)]))


def test_a_run_comes_back_from_json() -> None:
    config = make_config(moe="jax", z_factor=0.5)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_files_name_a_model_in_four_ways(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    published = json.dumps(to_hugging_face(QWEN3_30B_A3B))
    (tmp_path / "checkpoint" / "config.json").write_text(published)
    four = dataclasses.replace(QWEN3_30B_A3B, num_hidden_layers=4)
    for text, model in {
        'model = "qwen3-30b-a3b"': QWEN3_30B_A3B,
        'model = "checkpoint"': QWEN3_30B_A3B,
        'model = "checkpoint/config.json"': QWEN3_30B_A3B,
        '[model]\nbase = "checkpoint"\nnum_hidden_layers = 4': four,
    }.items():
        (tmp_path / "run.toml").write_text(f"seq = 8192\n{text}\n")
        assert of_command_line("--config", tmp_path / "run.toml") == (
            TrainingConfig(model=model, seq=8192)
        )


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"model": MODEL, "seq": 32, "learning_rate": 0.5}))
    config = of_command_line("--config", file, "--seq", 64, "--layers", 3, "--moe", "jax")
    assert (config.seq, config.learning_rate, config.moe) == (64, 0.5, "jax")
    assert config.model.num_hidden_layers == 3 and config.model.hidden_size == 128
    assert of_command_line("--model", "qwen3-235b-a22b", "--layers", 2).model.hidden_size == 4096


def test_what_the_experts_are_told() -> None:
    asked = {"precision": "bf16", "backend": "cuda", "remat": "gate_up"}
    kernels = MegaMoEConfig(backend="cuda", save="gate_up")
    assert make_config(**asked).experts == kernels
    assert make_config(**asked, moe="jax").experts == (
        dataclasses.replace(kernels, backend="reference")
    )


@pytest.mark.parametrize(
    ("changes", "error", "argument", "was", "may_be"),
    [
        ({"sek": 8}, ValueError, "sek", "given", "one of seq, batch"),
        ({"model": {**MODEL, "hidden": 8}}, ValueError, "model.hidden", "given", "hidden_size"),
        ({"model": {"hidden_size": 8}}, ValueError, "model.vocab_size", "missing", "there"),
        ({"model": "qwen3-40b"}, ValueError, "model", "'qwen3-40b'", "qwen3-30b-a3b"),
        (
            {"model": {**MODEL, "mlp_only_layers": 3}},
            TypeError,
            "mlp_only_layers",
            "a int",
            "tuple",
        ),
        ({"model": 3}, TypeError, "model", "a int", "a name"),
        ({"seq": 0}, ValueError, "seq", "0", "in 1"),
        ({"seq": 18}, ValueError, "seq", "18", "a multiple of loss_chunk = 4"),
        ({"seq": 8.0}, TypeError, "seq", "8.0", "an int"),
        ({"batch": 6, "microbatches": 4}, ValueError, "batch", "6", "of microbatches = 4"),
        ({"expert_parallel": 3}, ValueError, "expert_parallel", "3", "1, 2, 4, 8"),
        ({"fsdp": -1}, ValueError, "fsdp", "-1", "in 0"),
        ({"moe": "off"}, ValueError, "moe", "'off'", "megamoe"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate", "0.0", "above 0"),
        ({"z_factor": -1.0}, ValueError, "z_factor", "-1.0", "at least 0"),
        ({"weight_decay": "0.1"}, TypeError, "weight_decay", "'0.1'", "a number"),
        ({"attention": "cudnn"}, ValueError, "attention", "float32", "'xla'"),
        (
            {"precision": "fp8_block", "model": {**MODEL, "moe_intermediate_size": 64}},
            ValueError,
            "model.moe_intermediate_size",
            "64",
            "a multiple of 128",
        ),
    ],
)
def test_what_is_no_run_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], argument: str, was: str, may_be: str
) -> None:
    with refusal(error, argument, was, may_be):
        make_config(**changes)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with refusal(ValueError, "model", "missing", "qwen3-30b-a3b"):
        of_command_line()
    with pytest.raises(OSError, match="missing.toml"):
        of_command_line("--config", tmp_path / "missing.toml")
    for name, content in {"run.toml": "seq: 3", "run.json": "seq = 3"}.items():
        (tmp_path / name).write_text(content)
        form = name.removeprefix("run.").upper()
        with refusal(ValueError, f".*{name}", f"no {form}: ", ".toml or .json"):
            of_command_line("--config", tmp_path / name)
    for content, error, was in (("{", ValueError, "no JSON: "), ("[]", TypeError, "a list")):
        (tmp_path / "config.json").write_text(content)
        with refusal(error, ".*config.json", was, "a "):
            of_command_line("--model", tmp_path)


def test_flops_of_a_step() -> None:
    """Six for each parameter that a token meets; Qwen3-30B-A3B has 3.3 billion with its embedding,
    whose rows are looked up and not multiplied."""
    assert flops.step_flops(QWEN3_30B_A3B, 1, 0) / 6 == pytest.approx(3.03e9, rel=0.01)
    of_pairs = flops.step_flops(QWEN3_30B_A3B, 0, 1)
    assert of_pairs == 3 * 48 * 2 * (2 * 32 * 128)  # q k and weights v, each pair in each head
    mixed = dataclasses.replace(QWEN3_30B_A3B, num_hidden_layers=2, mlp_only_layers=(1,))
    both = dataclasses.replace(mixed, mlp_only_layers=())
    less = flops.step_flops(both, 1, 0) - flops.step_flops(mixed, 1, 0)
    assert less / 6 == 2048 * (8 * 3 * 768 + 128 - 3 * 6144)


def test_pairs_of_packed_rows() -> None:
    ids = np.array([[1, 1, 2, 2, 2, 1], [3, 3, 3, 3, 3, 3]])
    assert flops.attended_pairs(ids) == (1 + 2) + (1 + 2 + 3) + 1 + 21


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("NVIDIA H200", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("cpu", None)],
)
def test_peaks_of_devices(kind: str, peak: float | None) -> None:
    assert flops.peak_flops(kind) == peak
