"""The Makefile in a checkout, and with a Python, whose paths have spaces."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Says how it was called: with "-m pytest", which arguments and modules it saw.
PYTHON = '#!/bin/sh\necho "$0 ran $* for $PYTHONPATH"\n'

ON_EVERY_CORE = f"-n {len(os.sched_getaffinity(0))} --dist worksteal"


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Of the Makefile alone; making the environment is left out."""
    root = tmp_path / "a checkout"
    write_script(root / ".ci" / "make_env.sh", "#!/bin/sh\n")
    shutil.copy(ROOT / "Makefile", root)
    return root


def make_test(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A make that runs these tests must not pass its own variables on.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "--silent", "-C", str(checkout), *arguments, "ARGS=-k plan", "test"],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_own_environment(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    write_script(python, PYTHON)
    result = make_test(checkout)
    assert result.returncode == 0, result.stderr
    assert f"{python} ran -m pytest {ON_EVERY_CORE} -k plan for {checkout}" in result.stdout


@pytest.mark.parametrize("place", ["an environment/bin/python", "environment/bin/python"])
def test_given_environment(checkout: Path, tmp_path: Path, place: str) -> None:
    python = tmp_path / place
    write_script(python, PYTHON)
    result = make_test(checkout, f"PYTHON={python}")
    assert result.returncode == 0, result.stderr
    assert f"{python} ran -m pytest {ON_EVERY_CORE} -k plan for {checkout}" in result.stdout


@pytest.mark.parametrize("python", ["/nowhere/python", "/no where/python", "", "/"])
def test_a_given_python_that_does_not_run(checkout: Path, python: str) -> None:
    result = make_test(checkout, f"PYTHON={python}")
    assert result.returncode != 0
    assert f"PYTHON={python} does not run" in result.stderr
