"""The parts of the Qwen3-MoE example that two processes do together, with two devices each."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_megamoe.models import safetensors
from tests.golden import qwen3_tensors
from tests.processes import ON_CPU, run_pair
from tests.training import ROOT
from tests.training_programs import ASKED_IN_STEP

sys.path.insert(0, str(ROOT / "examples"))
script = importlib.import_module("train_qwen3_moe")
DEVICES: dict[str, Any] = ON_CPU | {"JAX_NUM_CPU_DEVICES": "2"}


def run(*arguments: Any) -> list[list[str]]:
    """What either process has said."""
    pair = run_pair("tests.training_programs", *map(str, arguments), **DEVICES)
    assert [process.code for process in pair] == [0, 0], pair
    return [process.said for process in pair]


def test_weights_in_and_out(tmp_path: Path) -> None:
    """Neither process has all of a parameter, and one of them writes."""
    expected = qwen3_tensors.tensors("published")
    safetensors.write(tmp_path / "from", expected)
    assert run("weights", tmp_path / "from", tmp_path / "to") == [["{2} False"]] * 2
    found = safetensors.read(tmp_path / "to")
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_a_stop_and_a_refusal_are_of_both() -> None:
    """All know a step later that one was asked to stop."""
    refused = "process 1 has a text other than process 0."
    assert run("decide") == [[str(ASKED_IN_STEP + 1), refused]] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--process-id 0", "--num-processes and --process-id need --coordinator HOST:PORT"),
        ("--coordinator auto --num-processes 2", "--num-processes and --process-id need"),
        ("--coordinator here:1 --num-processes 2", "HOST:PORT needs --num-processes and"),
        (
            "--coordinator here:1 --num-processes 2 --process-id 2",
            "--process-id must be in 0..1, but it is 2",
        ),
    ],
)
def test_processes_that_could_not_meet_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    given = ["--config", str(ROOT / "examples" / "qwen3" / "small.toml"), *arguments.split()]
    assert script.main(given) == 2
    assert message in capsys.readouterr().err
