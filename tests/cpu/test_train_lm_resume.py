"""The training example stopped and resumed: every number of a run that was never stopped."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training import final_state, rows, train, write_text

TINY = "--steps 12 --eval-every 4 --batch 8 --seq 16 --layers 2 --hidden 32 --intermediate 8"
TINY = f"{TINY} --experts 4 --learning-rate 0.01 --checkpoint-every 5".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outcome of a run of 12 steps on two devices, with its checkpoints in `run`."""
    out = tmp_path_factory.mktemp("whole")
    result = run(text, out, "--devices", 2)
    assert result.returncode == 0, result.stderr
    assert f"checkpoints: {out / 'run'}, from step 1 on" in result.stdout
    assert {path.name for path in (out / "run").iterdir()} == {"10", "12"}  # the last two
    return out


def run(text: Path, out: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return train("--data", text, "--out", out, "--checkpoint", out / "run", *TINY, *arguments)


def killed_after_step_10(whole: Path, out: Path) -> None:
    """What a run that was killed between steps 10 and 12 leaves."""
    shutil.copytree(whole / "run" / "10", out / "run" / "10")


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    whole: Path, text: Path, tmp_path: Path
) -> None:
    killed_after_step_10(whole, tmp_path)
    result = run(text, tmp_path, "--devices", 2, "--resume")
    assert result.returncode == 0, result.stderr
    assert "from step 11 on" in result.stdout
    assert "step 4:" not in result.stdout and "step 12:" in result.stdout
    assert len(rows(tmp_path)) == 12
    for row, expected in zip(rows(tmp_path), rows(whole), strict=True):
        if int(row["step"]) > 10:
            del row["tokens_per_s"], expected["tokens_per_s"]
        assert row == expected
    assert (tmp_path / "sample.txt").read_bytes() == (whole / "sample.txt").read_bytes()
    state, expected_state = final_state(tmp_path, 12), final_state(whole, 12)
    assert len(state) > 20
    for a, b in zip(state, expected_state, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_goes_on_with_other_devices(whole: Path, text: Path, tmp_path: Path) -> None:
    killed_after_step_10(whole, tmp_path)
    result = run(text, tmp_path, "--devices", 4, "--expert-parallel", 4, "--resume")
    assert result.returncode == 0, result.stderr
    for row, expected in zip(rows(tmp_path), rows(whole), strict=True):
        assert float(row["train_loss"]) == pytest.approx(float(expected["train_loss"]), abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "holds a run up to step 10; add --resume"),
        (["--resume", "--seed", 1], "the run to resume had seed = 0, but this one has 1"),
        (["--resume", "--checkpoint-every", 0], "--checkpoint-every must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    whole: Path, text: Path, tmp_path: Path, arguments: list[Any], message: str
) -> None:
    killed_after_step_10(whole, tmp_path)
    result = run(text, tmp_path, "--devices", 2, *arguments)
    assert result.returncode == 2
    assert re.search(f"^train_lm: .*{message}", result.stderr.strip().splitlines()[-1])
    assert not (tmp_path / "loss.csv").exists()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["10"]


def test_a_folder_is_needed_to_resume(text: Path, tmp_path: Path) -> None:
    result = train("--data", text, "--out", tmp_path / "out", *TINY, "--resume")
    assert result.returncode == 2
    assert "train_lm: --resume needs --checkpoint" in result.stderr
    file = tmp_path / "file"
    file.write_text("mine")
    result = train("--data", text, "--out", tmp_path / "out", *TINY, "--checkpoint", file)
    assert result.returncode == 2
    assert f"train_lm: --checkpoint {file} is no folder" in result.stderr
    assert file.read_text() == "mine"
