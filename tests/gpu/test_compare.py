"""`python -m jax_megamoe.compare` on a GPU: the kernels beside the reference in one training."""

import json
from pathlib import Path

import jax
import pytest

from jax_megamoe import compare
from tests.qwen3_training import MODEL, RUN

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("remat", ["full", "gate_up"])
def test_training_with_the_kernels_has_the_losses_of_the_reference(
    remat: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.json"
    batch = 8 * jax.device_count()
    changes = {"batch": batch, "precision": "bf16", "remat": remat, "learning_rate": 1e-3}
    config.write_text(json.dumps({**RUN, "model": MODEL, **changes}))
    few = ["--skip", "2", "--measure", "4", "--rounds", "1", "--json", str(tmp_path / "found.json")]
    assert compare.main(["--config", str(config), *few]) == compare.AGREE, capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["runs_on"][0] == "the CUDA kernels"
    assert 0 < found["largest_difference"]
