"""The Qwen3-MoE example through its command line: what it leaves, and what it goes on with."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_megamoe.models.training_config import from_dict
from tests import processes
from tests.training import ROOT, final_state, rows, train, write_text

sys.path.insert(0, str(ROOT / "examples"))
script = importlib.import_module("train_qwen3_moe")

SMALL = ROOT / "examples" / "qwen3" / "small.toml"
TINY = "--layers 1 --seq 16 --batch 16 --microbatches 2 --steps 6 --warmup 1 --expert-parallel 2"
TINY = f"{TINY} --checkpoint-every 2 --loss-chunk 8 --held-out-every 3".split()
WITHOUT_A_CACHE: dict[str, Any] = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder


def arguments(text: Path, out: Path) -> list[Any]:
    fixed = ["--config", SMALL, "--data", text, "--out", out, "--checkpoint", out / "run"]
    return [*fixed, *TINY]


def run(text: Path, out: Path, *others: Any) -> subprocess.CompletedProcess[str]:
    """Programs that are compiled once are kept beside the text, for the runs that go on."""
    cache = WITHOUT_A_CACHE | {
        "JAX_COMPILATION_CACHE_DIR": str(text.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    given = [*arguments(text, out), "--devices", 4, *others]
    return train(*given, script="train_qwen3_moe", **cache)


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outcome of a run of 6 steps, with its checkpoints in `run`."""
    out = tmp_path_factory.mktemp("whole")
    result = run(text, out)
    assert result.returncode == 0, result.stderr
    assert "'data': 1, 'fsdp': 2, 'expert': 2" in result.stdout
    assert "experts: the reference (JAX runs on the cpu)" in result.stdout
    assert re.search(r"loss of the last step: [\d.]+, held out [\d.]+ nats", result.stdout)
    assert re.search(r"held out [\d.]+, \d+ tokens/s a device", result.stderr)
    return out


def test_a_run_leaves_its_record_and_its_config(whole: Path) -> None:
    found = rows(whole, "run.csv")
    assert [row["step"] for row in found] == list("123456")
    assert float(found[-1]["loss"]) < float(found[0]["loss"])
    assert all(1 <= float(row["imbalance_0"]) <= 4 and not row["mfu"] for row in found)
    held_out = {row["step"]: float(row["held_out_loss"]) for row in found if row["held_out_loss"]}
    assert set(held_out) == {"3", "6"} and held_out["6"] < held_out["3"]
    assert (whole / "run.png").read_bytes().startswith(b"\x89PNG")
    config = from_dict(json.loads((whole / "run.json").read_text()))
    assert (config.seq, config.steps, config.model.num_hidden_layers) == (16, 6, 1)
    assert {path.name for path in (whole / "run").iterdir()} == {"4", "6"}  # the last two


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    whole: Path, text: Path, tmp_path: Path
) -> None:
    """Of what was saved behind step 4 while step 5 ran on the same arrays, and of the text."""
    shutil.copytree(whole / "run" / "4", tmp_path / "run" / "4")
    result = run(text, tmp_path, "--resume")
    assert result.returncode == 0, result.stderr
    assert "from step 5 on" in result.stdout
    found, expected = rows(tmp_path, "run.csv"), rows(whole, "run.csv")
    for row in [*found[4:], *expected[4:]]:
        del row["tokens_per_s_device"]
    assert found == expected
    state, expected_state = final_state(tmp_path, 6), final_state(whole, 6)
    assert len(state) > 40
    for a, b in zip(state, expected_state, strict=True):
        np.testing.assert_array_equal(a, b)


def test_two_processes_train_the_model_of_one(whole: Path, text: Path, tmp_path: Path) -> None:
    """With as many devices between them; the first one leaves the files, both the checkpoints."""
    given = [*map(str, arguments(text, tmp_path)), "--devices", "2"]
    environment = processes.ON_CPU | WITHOUT_A_CACHE
    pair = processes.run_pair(
        "tests.training_programs", "script", *given, timeout_s=600, **environment
    )
    assert [process.said for process in pair] == [["0"], ["0"]], pair
    assert "tokens/s a device" in pair[0].errors and "tokens/s" not in pair[1].errors
    found, expected = rows(tmp_path, "run.csv"), rows(whole, "run.csv")
    for name in ("loss", "held_out_loss", "gradient_norm"):
        values, right = ([float(row[name] or 0) for row in of] for of in (found, expected))
        assert values == pytest.approx(right, rel=1e-5)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"4", "6"}
    for a, b in zip(final_state(tmp_path, 6), final_state(whole, 6), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (["--resume", "--held-out", 300], "the run to resume had sha256 of the tokens"),
        (["--resume", "--held-out-every", 2], "the run to resume had held_out_every = 3"),
        ([], "holds a run up to step 4; add --resume"),
        (["--resume", "--seed", 1], "the run to resume had seed = 0, but this one has 1"),
        (["--resume", "--moe", "jax"], "the run to resume had moe = 'megamoe'"),
    ],
)
def test_what_does_not_fit_is_refused(
    whole: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    others: list[Any],
    message: str,
) -> None:
    shutil.copytree(whole / "run" / "4", tmp_path / "run" / "4")
    assert script.main([str(a) for a in (*arguments(text, tmp_path), *others)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["4"]
