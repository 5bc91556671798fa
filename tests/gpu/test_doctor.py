"""The doctor on a machine that the other GPU tests run on."""

import json
import subprocess
import sys

import jax
import pytest

from jax_megamoe import doctor

pytestmark = pytest.mark.gpu


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Beside this process, which may hold most of the GPU's memory."""
    return subprocess.run(
        [sys.executable, "-m", "jax_megamoe.doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_kernels_run_here() -> None:
    result = run("--json")
    assert result.returncode == doctor.KERNELS_RUN, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["diagnosis"]["runs"] == "kernels"
    devices = jax.local_devices(backend="cuda")
    seen = [(d["ordinal"], d["kind"]) for d in found["facts"]["devices"]]
    assert seen == [(d.local_hardware_id, d.device_kind) for d in devices]
    driver = found["facts"]["driver"]
    assert driver["error"] == "" and driver["cuda_version"]
    of_driver = [(gpu["name"], gpu["compute_capability"]) for gpu in driver["gpus"]]
    assert of_driver == [(d.device_kind, d.compute_capability) for d in devices]


def test_why_it_does_not_run_them() -> None:
    result = run("--hidden", "96")
    assert result.returncode == doctor.KERNELS_DO_NOT_RUN, result.stdout + result.stderr
    assert "  - H = 96 and I = 768 are not both multiples of 64" in result.stdout
