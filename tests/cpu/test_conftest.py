"""The test run's own promises: GPU tests are left out aloud; on a GPU nothing is skipped, and what
hangs ends."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests import conftest

TESTS_DIR = Path(__file__).resolve().parents[1]

SUITE = """
import pytest

def test_anywhere(): pass

@pytest.mark.gpu
def test_one_gpu(): pass

@pytest.mark.multi_gpu(2)
def test_two_gpus(): pass
"""

INI = """
[pytest]
markers =
  gpu: one
  multi_gpu(count): several
  limit(seconds): at most
  transformers: needs it
"""

TRANSFORMERS_SUITE = """
import pytest

def test_anywhere(): pass

@pytest.mark.transformers
def test_needs_it(): import a_library_that_is_not_there
"""

HANGING_SUITE = """
import signal
import time

import pytest

@pytest.mark.limit(60)
def test_quick(): pass

@pytest.mark.limit(1)
@pytest.mark.parametrize("seconds", [0, 100])
def test_hangs(seconds):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(seconds)

def test_behind(): pass
"""


def run_suite(folder: Path, *options: str, suite: str = SUITE) -> subprocess.CompletedProcess[str]:
    """Runs a suite under a copy of this conftest, with no GPU in sight."""
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text(INI)
    (folder / "tests" / "test_suite.py").write_text(suite)
    shutil.copy(TESTS_DIR / "conftest.py", folder / "tests")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("options", "passed"), [((), "1 passed, 2 deselected"), (("-n", "2"), "1 passed")]
)
def test_gpu_tests_are_left_out_with_a_notice(
    tmp_path: Path, options: tuple[str, ...], passed: str
) -> None:
    """One, also of two workers."""
    result = run_suite(tmp_path, *options)
    assert result.returncode == 0, result.stdout
    assert passed in result.stdout
    assert result.stdout.count("NOTICE 2 GPU tests not run") == 1


@pytest.mark.parametrize("declared", [False, True])
def test_transformers_is_declared_or_its_tests_are_left_out(
    tmp_path: Path, declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_MEGAMOE_TRANSFORMERS", str(int(declared)))
    result = run_suite(tmp_path, suite=TRANSFORMERS_SUITE)
    assert result.returncode == declared, result.stdout
    notice = "NOTICE 1 tests against transformers not run"
    assert (notice in result.stdout) is not declared
    assert ("1 failed, 1 passed" if declared else "1 passed, 1 deselected") in result.stdout


@pytest.mark.parametrize(("built", "reason"), [(False, "not built"), (True, "finds no GPU")])
def test_a_gpu_run_fails_without_extension_or_gpu(tmp_path: Path, built: bool, reason: str) -> None:
    (tmp_path / "jax_megamoe").mkdir()
    if built:
        (tmp_path / "jax_megamoe" / "_cuda.abi3.so").touch()
    result = run_suite(tmp_path, "-m", "gpu")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR, result.stdout
    assert reason in result.stderr


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("gpu", True),
        ("multi_gpu", True),
        ("gpu and not multi_gpu", True),
        ("", False),
        ("not gpu", False),
        ("not gpu and not multi_gpu", False),
        ("gpufoo", False),
    ],
)
def test_what_asks_for_a_gpu(expression: str, expected: bool) -> None:
    assert conftest.asks_for_gpu(expression) is expected


def test_a_skip_becomes_a_failure() -> None:
    report = pytest.TestReport(
        nodeid="tests/gpu/test_x.py::test_x",
        location=("", None, ""),
        keywords={},
        outcome="skipped",
        longrepr=("test_x.py", 1, "no peer access"),
        when="call",
    )
    conftest.reject_skip(report)
    assert report.failed
    assert "no peer access" in str(report.longrepr)


def test_a_test_that_hangs_ends_the_process(tmp_path: Path) -> None:
    """Though signals do not reach it; its stack is seen though output is captured."""
    result = run_suite(tmp_path, "-v", suite=HANGING_SUITE)
    assert result.returncode == 1
    assert "test_quick PASSED" in result.stdout and "test_hangs[0] PASSED" in result.stdout
    assert "test_hangs[100] PASSED" not in result.stdout and "test_behind" not in result.stdout
    assert "Timeout" in result.stderr and "in test_hangs" in result.stderr


def test_a_worker_that_hangs_fails_the_run(tmp_path: Path) -> None:
    """It is replaced, and the others go on."""
    result = run_suite(tmp_path, "-v", "-n", "1", suite=HANGING_SUITE)
    assert result.returncode == 1
    assert "FAILED tests/test_suite.py::test_hangs[100]" in result.stdout
    assert "1 failed, 3 passed" in result.stdout
    assert "Timeout" in result.stderr and "in test_hangs" in result.stderr


def test_a_gpu_test_has_a_limit(request: pytest.FixtureRequest) -> None:
    assert conftest.limit_s(request.node) is None
    request.node.add_marker("gpu")
    assert conftest.limit_s(request.node) == conftest.GPU_LIMIT_S
    request.node.add_marker(pytest.mark.limit(None))
    assert conftest.limit_s(request.node) is None


def test_simulated_devices_and_strict_promotion() -> None:
    assert jax.device_count() == conftest.NUM_SIMULATED_DEVICES
    with pytest.raises(ValueError, match="dtype promotion"):
        jnp.add(jnp.ones(2, jnp.float32), jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.add(jnp.ones((2, 2)), jnp.ones(2))
