"""How the doctor gathers facts, from stand-ins of the NVIDIA driver, nvidia-smi, nvcc and JAX."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jax_megamoe import _ffi, _machine
from jax_megamoe._machine import Driver, Gpu

IDENTITIES = [uuid.UUID(int=number) for number in (7, 8, 9)]
UUIDS = [f"GPU-{identity}" for identity in IDENTITIES]
# As nvidia-smi writes it, tabs and escapes included; its order is not CUDA's.
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\n"
    "GPU1\tNV18\t X \tPHB\tSYS\t0-47\t0\n"
    "GPU2\tSYS\tPHB\t X \tSYS\t0-47\t0\n"
    "\nLegend:\n\n  X    = Self\n"
)


class FakeCuda:
    """libcuda with three GPUs, of which the last reaches nobody; `fails`: what returns an error."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            if name == self.fails:
                return 100
            getattr(type(self), f"_{name}", lambda *_: None)(self, *arguments)
            return 0

        function.__name__ = name
        return function

    def _cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = 13020

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = 3

    def _cuDeviceGet(self, device: Any, ordinal: int) -> None:
        device._obj.value = 10 + ordinal

    def _cuDeviceGetName(self, name: Any, size: int, device: int) -> None:
        name.value = f"GPU {device}"[: size - 1].encode()

    def _cuDeviceGetUuid_v2(self, identity: Any, device: int) -> None:
        identity._obj[:] = IDENTITIES[device - 10].bytes

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> None:
        value._obj.value = {75: 9, 76: device - 10}[attribute]

    def _cuDeviceCanAccessPeer(self, can: Any, device: int, peer: int) -> None:
        assert device != peer
        can._obj.value = device != 12


def test_driver() -> None:
    gpus = tuple(
        Gpu(name=f"GPU {10 + i}", compute_capability=f"9.{i}", uuid=UUIDS[i]) for i in range(3)
    )
    peers = ((True, True, True), (True, True, True), (False, False, True))
    assert _machine.ask_driver(FakeCuda) == Driver(cuda_version="13.2", gpus=gpus, peers=peers)


def test_no_driver_and_a_driver_that_fails() -> None:
    def absent() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    assert _machine.ask_driver(absent).error == "there is no NVIDIA driver (libcuda.so.1)"
    assert _machine.ask_driver(lambda: FakeCuda("cuInit")) == Driver(
        error="cuInit of the NVIDIA driver fails with error 100", cuda_version="13.2"
    )
    failed = _machine.ask_driver(lambda: FakeCuda("cuDriverGetVersion"))
    assert failed.cuda_version == "" and "cuDriverGetVersion" in failed.error


def test_links_are_in_the_order_of_cuda() -> None:
    smi = "\n".join(reversed(UUIDS)) + "\n"  # GPU0 of nvidia-smi is the last of CUDA
    assert _machine.links(UUIDS, smi, TOPOLOGY) == (
        ("X", "PHB", "SYS"),
        ("PHB", "X", "NV18"),
        ("SYS", "NV18", "X"),
    )
    assert _machine.links(UUIDS[1:], smi, TOPOLOGY) == (("X", "NV18"), ("NV18", "X"))


@pytest.mark.parametrize(("smi", "topology"), [("", ""), ("", TOPOLOGY), ("GPU-1\n", TOPOLOGY)])
def test_links_that_nobody_knows(smi: str, topology: str) -> None:
    assert _machine.links(UUIDS[:2], smi, topology) == (("", ""), ("", ""))


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_output_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path, "says", "echo $1")
    program(tmp_path, "fails", "echo no; exit 1")
    (tmp_path / "broken").write_bytes(b"\x7fELF")
    (tmp_path / "broken").chmod(0o755)
    assert _machine.output("says", "a") == "a\n"
    for name in ("fails", "broken", "absent"):
        assert _machine.output(name) == ""
    assert _machine.first_line(" \n580.65 \n580.65\n") == "580.65"


def test_nvcc_is_looked_for_where_a_build_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def output(name: str, *_: str) -> str:
        asked.append(name)
        return "Cuda compilation tools, release 13.1, V13.1.1" if name in found else ""

    monkeypatch.setattr(_machine, "output", output)
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    everywhere = ["nvcc", "/opt/cuda/bin/nvcc", "/usr/local/cuda/bin/nvcc"]
    for place in everywhere:
        found = [place]
        assert _machine.nvcc_release() == "13.1"
    found, asked[:] = [], []
    assert _machine.nvcc_release() == "" and asked == everywhere


def test_jax_and_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(hardware_id: int | None, stats: Any) -> Any:
        return SimpleNamespace(
            local_hardware_id=hardware_id,
            device_kind="NVIDIA H200",
            compute_capability="9.0",
            memory_stats=lambda: stats,
            client=SimpleNamespace(platform_version="PJRT C API\ncuda 13000"),
        )

    stats = {"bytes_limit": 10, "bytes_in_use": 3}
    found = [device(4, stats), device(None, None)]
    monkeypatch.setattr(jax, "local_devices", lambda backend: found)
    devices, error, runtime = _machine.ask_jax()
    assert (error, runtime) == ("", "PJRT C API cuda 13000")
    assert [(d.ordinal, d.bytes_limit, d.bytes_in_use) for d in devices] == [
        (4, 10, 3),
        (1, None, None),
    ]

    def fail(backend: str) -> Any:
        raise RuntimeError("Unable to initialize backend 'cuda': no\nand more")

    monkeypatch.setattr(jax, "local_devices", fail)
    assert _machine.ask_jax() == ((), "Unable to initialize backend 'cuda': no", "")


@pytest.mark.parametrize("setting", [None, "true"])
def test_jax_takes_no_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch, setting: str | None) -> None:
    """Unless the environment says so; what the report says of the environment is the user's."""
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.delenv(name, raising=False)
    if setting:
        monkeypatch.setenv(name, setting)
    seen = []

    def ask() -> Any:
        seen.append(os.environ.get(name))
        return (), "none", ""

    monkeypatch.setattr(_machine, "ask_jax", ask)
    facts = _machine.gather()
    assert seen == [setting or "false"]
    assert facts.settings.get(name) == os.environ.get(name) == setting


def test_facts_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX is kept to the CPU by the tests; the extension is made up."""
    monkeypatch.setattr(_ffi, "extension", lambda: (None, "no CUDA part"))
    facts = _machine.gather()
    assert (facts.extension, facts.targets, facts.devices) == ("", (), ())
    assert facts.missing == "no CUDA part" and "cuda" in facts.jax_error
    assert facts.versions["jax"] == jax.__version__
    assert facts.settings["JAX_PLATFORMS"] == "cpu"
    module = SimpleNamespace(
        __file__="_cuda.so", registrations=lambda: {"b": {}, "a": {}}, set_fault=None
    )
    monkeypatch.setattr(_ffi, "extension", lambda: (module, ""))
    facts = _machine.gather()
    assert (facts.extension, facts.targets, facts.test_build) == ("_cuda.so", ("a", "b"), True)
    assert facts.missing.endswith("JAX sees no CUDA device")


def test_version_of_a_package_that_is_not_there() -> None:
    assert _machine.version("no-such-package-of-anyone") == _machine.NOT_INSTALLED
