"""Qwen3-MoE on a GPU against the installed transformers, which reads checkpoints written here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jax_megamoe.models import safetensors
from jax_megamoe.models.qwen3_moe import from_hugging_face, to_hugging_face
from jax_megamoe.models.qwen3_weights import export_weights
from tests import qwen3_golden
from tests.golden import qwen3_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.transformers]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the installed transformers computes; torch stays out of this process."""
    folder = tmp_path_factory.mktemp("transformers")
    for name, fields in qwen3_tensors.CASES.items():
        tensors = export_weights(qwen3_golden.make_model(name))
        safetensors.write(folder / name, tensors, shard_bytes=50_000)
        config = to_hugging_face(from_hugging_face(fields))
        (folder / name / "config.json").write_text(json.dumps(config))
    path = folder / "qwen3.npz"
    command = [sys.executable, str(qwen3_golden.MAKER), "--checkpoints", str(folder)]
    result = subprocess.run(
        [*command, "--out", str(path)], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    return path


@pytest.mark.parametrize("name", qwen3_tensors.CASES)
def test_computes_what_the_installed_transformers_does(made: Path, name: str) -> None:
    versions, cases = qwen3_golden.read(made)
    print(versions)
    qwen3_golden.check(cases[name])
