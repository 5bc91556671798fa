"""The router on a GPU against the routers of the installed transformers, on random weights."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import router_golden

pytestmark = [pytest.mark.gpu, pytest.mark.transformers]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the installed transformers decides; torch stays out of this process."""
    path = tmp_path_factory.mktemp("transformers") / "router.npz"
    command = [sys.executable, str(router_golden.MAKER), "--out", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return path


@pytest.mark.parametrize("name", router_golden.CASES)
def test_routes_as_the_installed_transformers_does(made: Path, name: str) -> None:
    versions, cases = router_golden.read(made)
    print(versions)
    router_golden.check(cases[name])
