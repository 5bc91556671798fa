"""Qwen3-MoE against what transformers made of small random checkpoints, from a file."""

import dataclasses

import numpy as np
import pytest

from jax_megamoe.models import safetensors
from jax_megamoe.models.qwen3_moe import from_hugging_face
from tests import qwen3_golden
from tests.golden import qwen3_tensors

VERSIONS, GOLDEN = qwen3_golden.read(qwen3_golden.GOLDEN)


def test_the_file_says_what_made_it() -> None:
    assert set(VERSIONS) == {"torch", "transformers", "safetensors", "numpy", "python"}
    assert list(GOLDEN) == list(qwen3_tensors.CASES)


@pytest.mark.parametrize("name", GOLDEN)
def test_computes_what_transformers_does(name: str) -> None:
    qwen3_golden.check(GOLDEN[name])


@pytest.mark.parametrize("name", GOLDEN)
def test_the_config_of_transformers_says_the_same(name: str) -> None:
    """It has other names for some fields than published files, which the case is written in."""
    expected = from_hugging_face(qwen3_tensors.CASES[name])
    assert from_hugging_face(GOLDEN[name].fields) == expected


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("published", "norm_topk_prob", False),
        ("published", "rope_parameters", {"rope_theta": 10_000.0}),
        ("published", "rms_norm_eps", 1e-2),
        ("published", "num_experts_per_tok", 3),
    ],
)
def test_another_model_is_told_apart(name: str, field: str, value: object) -> None:
    case = GOLDEN[name]
    other = dataclasses.replace(case, fields=case.fields | {field: value})
    with pytest.raises(AssertionError):
        qwen3_golden.check(other)


def test_reads_what_the_safetensors_library_writes(tmp_path) -> None:
    with np.load(qwen3_golden.GOLDEN) as file:
        content = file["safetensors"].tobytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    found = safetensors.read(path)
    numbers = np.arange(6, dtype=np.float32)
    bf16 = found["bf16"].dtype
    expected = {
        "bytes": np.array([1, 2, 3], np.uint8),
        "bf16": (numbers.reshape(2, 3).astype(bf16) / np.array(7, bf16)),
        "f32": numbers / np.float32(7),
        "scalar": np.array(5),
        "nothing": np.zeros((0, 4), np.float32),
    }
    assert str(bf16) == "bfloat16" and set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        np.testing.assert_array_equal(found[name], value)
