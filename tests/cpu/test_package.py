"""The package as an installer and an importing program meet it."""

import email
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from scikit_build_core import build as backend

import jax_megamoe

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ["cpu", "cuda13"]

# JAX refuses this setting once a backend exists: the public way to see that none does.
_NO_BACKEND_YET = "jax.config.update('jax_num_cpu_devices', 2)"


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter, as a user of the checkout would."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_import_initialises_no_backend() -> None:
    result = run_python(f"import jax_megamoe, jax; {_NO_BACKEND_YET}")
    assert result.returncode == 0, result.stderr


def test_an_initialised_backend_would_be_seen() -> None:
    result = run_python(
        f"import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices(); {_NO_BACKEND_YET}"
    )
    assert "before backends are initialized" in result.stderr


def test_import_needs_no_package_of_examples_or_tests() -> None:
    unwanted = ["matplotlib", "tqdm", "jaxtyping", "beartype", "hypothesis", "pytest", "torch"]
    block = f"import sys; sys.modules.update(dict.fromkeys({unwanted}))"
    result = run_python(f"{block}; import jax_megamoe")
    assert result.returncode == 0, result.stderr


def test_import_loads_neither_optax_nor_flax() -> None:
    # flax imports optax: a program that uses the op alone should pay for neither.
    result = run_python(
        "import jax_megamoe, sys; print({'optax', 'flax', 'matplotlib'} & set(sys.modules))"
    )
    assert result.stdout.strip() == "set()", result.stdout + result.stderr


def test_version_is_that_of_the_metadata() -> None:
    assert jax_megamoe.__version__ == PYPROJECT["project"]["version"]


def test_metadata_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder = tmp_path / backend.prepare_metadata_for_build_wheel(str(tmp_path))
    metadata = email.message_from_string((folder / "METADATA").read_text())
    assert metadata["Name"] == "jax_megamoe"
    assert metadata["Version"] == PYPROJECT["project"]["version"]
    assert metadata["Requires-Python"] == ">=3.12"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {"cuda13", "examples", "text"}
    assert "Tag: cp312-abi3-" in (folder / "WHEEL").read_text()


def locked_versions(lock: str) -> dict[str, str]:
    """The version of each package that a lock installs on Linux."""
    text = (ROOT / ".ci" / "locks" / f"{lock}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, flags=re.MULTILINE))


def direct_requirements() -> Iterator[Requirement]:
    """What a checkout works with: run time, examples, development, and the build itself."""
    project = PYPROJECT["project"]
    yield from map(Requirement, project["dependencies"])
    yield from map(Requirement, project["optional-dependencies"]["examples"])
    yield from map(Requirement, PYPROJECT["dependency-groups"]["dev"])
    yield from map(Requirement, PYPROJECT["build-system"]["requires"])


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_meets_every_requirement(lock: str) -> None:
    versions = locked_versions(lock)
    for requirement in direct_requirements():
        version = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is locked at {version}"


def test_locks_agree() -> None:
    cpu, cuda = map(locked_versions, LOCKS)
    assert cpu.items() < cuda.items()
    assert cuda["jax-cuda13-plugin"] == cpu["jax"]


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_pins_hashes_and_names_no_host(lock: str) -> None:
    lines = (ROOT / ".ci" / "locks" / f"{lock}.txt").read_text().splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        assert re.match(r"#|[\w.-]+==[^:]+$|    --hash=sha256:[0-9a-f]{64}", line), line
        assert "==" not in line or following.startswith("    --hash="), line
