"""What the doctor knows of a machine: a record of facts, and how they are gathered.

What is not there is a fact too, so gathering raises nothing. It asks the NVIDIA driver itself
(libcuda, which makes no context by being asked), then JAX, which takes GPUs only where it finds
some; nvidia-smi is asked where it is installed.
"""

import ctypes
import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jax_megamoe import _ffi

# The first is the package itself; the last two come with jax[cuda13].
PACKAGES = (
    "jax_megamoe",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "jax-cuda13-plugin",
    "nvidia-nccl-cu13",
)
NOT_INSTALLED = "not installed"
# What decides which devices JAX sees and what it takes of them, and which build of the CUDA part.
SETTINGS = (
    "JAX_PLATFORMS",
    "CUDA_VISIBLE_DEVICES",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_FLAGS",
    "JAX_MEGAMOE_EXTENSION",
)
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
# CUdevice_attribute of cuda.h.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that the driver shows this process; uuid as nvidia-smi writes it."""

    name: str
    compute_capability: str
    uuid: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Driver:
    """What libcuda says.

    Attributes:
      error: why it says nothing; "" where it works.
      cuda_version: the newest CUDA that the driver runs, such as "13.0"; "" without one.
      gpus: in CUDA's order, within CUDA_VISIBLE_DEVICES.
      peers: [a][b], whether GPU a reaches the memory of GPU b.
    """

    error: str = ""
    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A CUDA device as JAX sees it; ordinal: its place among the GPUs of the driver."""

    ordinal: int
    kind: str
    compute_capability: str
    bytes_limit: int | None
    bytes_in_use: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """All that a diagnosis is made of.

    Attributes:
      versions: of Python and of `PACKAGES`, or `NOT_INSTALLED`.
      settings: the environment variables of `SETTINGS` that are set.
      extension: the file of the CUDA part; "" where it is not built.
      targets: the custom calls that it registers.
      test_build: the extension can delay its kernels or seed faults.
      nvcc: what the compiler says of its release; "" where there is none.
      driver: see `Driver`.
      driver_version: of the kernel driver, by nvidia-smi; "" where it is not known.
      links: [a][b], how GPUs a and b are connected, as `nvidia-smi topo -m` abbreviates it; ""
        where it is not known.
      devices: the CUDA devices of this process.
      jax_error: why JAX has none; "" where it has some.
      cuda_runtime: what JAX's CUDA client says of itself; "" without one.
      missing: what this process lacks to run the kernels, "" for nothing.
    """

    versions: Mapping[str, str]
    settings: Mapping[str, str]
    extension: str
    targets: tuple[str, ...]
    test_build: bool
    nvcc: str
    driver: Driver
    driver_version: str
    links: tuple[tuple[str, ...], ...]
    devices: tuple[Device, ...]
    jax_error: str
    cuda_runtime: str
    missing: str


def gather() -> Facts:
    """The facts of this process. Initialises JAX's backends; takes no share of a GPU's memory."""
    driver = ask_driver(_libcuda)
    module, _ = _ffi.extension()
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    with _without_preallocation():
        devices, jax_error, cuda_runtime = ask_jax()
        missing = _ffi.missing()
    return Facts(
        versions={"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
        settings=settings,
        extension="" if module is None else str(module.__file__),
        targets=() if module is None else tuple(sorted(module.registrations())),
        test_build=hasattr(module, "set_delay_seed") or hasattr(module, "set_fault"),
        nvcc=nvcc_release(),
        driver=driver,
        driver_version=first_line(output("nvidia-smi", "--query-gpu=driver_version", *_CSV)),
        links=links(
            [gpu.uuid for gpu in driver.gpus],
            output("nvidia-smi", "--query-gpu=uuid", *_CSV),
            output("nvidia-smi", "topo", "-m"),
        ),
        devices=devices,
        jax_error=jax_error,
        cuda_runtime=cuda_runtime,
        missing=missing,
    )


_CSV = ("--format=csv,noheader",)


def version(package: str) -> str:
    """Of an installed package; the checkout's own where it is used without being installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def output(program: str, *arguments: str) -> str:
    """What a program prints; "" where it is not there, fails, or takes more than 20 s."""
    if shutil.which(program) is None:
        return ""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()


def nvcc_release() -> str:
    """Of the nvcc that a build would take: on PATH, of CUDA_HOME, or of /usr/local/cuda."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    for program in ("nvcc", *(os.path.join(home, "bin", "nvcc") for home in homes if home)):
        if found := re.search(r"release ([\d.]+)", output(program, "--version")):
            return found[1]
    return ""


def links(uuids: Sequence[str], smi_uuids: str, topology: str) -> tuple[tuple[str, ...], ...]:
    """How each two GPUs are connected, "" where nvidia-smi does not say.

    Args:
      uuids: of the GPUs in CUDA's order; nvidia-smi has an order of its own, and more of them.
      smi_uuids: `nvidia-smi --query-gpu=uuid --format=csv,noheader`.
      topology: `nvidia-smi topo -m`.
    """
    names = {u.strip(): f"GPU{i}" for i, u in enumerate(smi_uuids.split("\n"))}
    rows = [line.split("\t") for line in re.sub(r"\x1b\[\d*m", "", topology).split("\n")]
    header = [cell.strip() for cell in rows[0]]
    table = {
        (row[0].strip(), column): cell.strip()
        for row in rows[1:]
        for column, cell in zip(header, row, strict=False)
    }
    # A GPU that nvidia-smi does not know has no name, and nothing is in the table under "".
    places = [names.get(u, "") for u in uuids]
    return tuple(tuple(table.get((a, b), "") if a and b else "" for b in places) for a in places)


def ask_jax() -> tuple[tuple[Device, ...], str, str]:
    """The CUDA devices of this process, why there are none, and the version of JAX's client."""
    try:
        found: list[Any] = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        return (), first_line(str(error)), ""
    devices = []
    for place, device in enumerate(found):
        stats = device.memory_stats() or {}
        ordinal = device.local_hardware_id
        devices.append(
            Device(
                ordinal=place if ordinal is None else ordinal,
                kind=device.device_kind,
                compute_capability=device.compute_capability,
                bytes_limit=stats.get("bytes_limit"),
                bytes_in_use=stats.get("bytes_in_use"),
            )
        )
    return tuple(devices), "", " ".join(found[0].client.platform_version.split())


@contextmanager
def _without_preallocation() -> Iterator[None]:
    """JAX takes memory as it needs it, unless the environment says more: others may run here."""
    if _PREALLOCATE in os.environ:
        yield
        return
    os.environ[_PREALLOCATE] = "false"
    try:
        yield
    finally:
        del os.environ[_PREALLOCATE]


def _libcuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class _CudaError(Exception):
    pass


def ask_driver(load: Callable[[], Any]) -> Driver:
    """load: returns libcuda as ctypes loads it, or raises OSError."""
    try:
        cuda = load()
    except OSError:
        return Driver(error="there is no NVIDIA driver (libcuda.so.1)")
    cuda_version = ""
    try:
        newest = _integer(cuda.cuDriverGetVersion)
        cuda_version = f"{newest // 1000}.{newest % 1000 // 10}"
        _call(cuda.cuInit, 0)
        handles = [_integer(cuda.cuDeviceGet, i) for i in range(_integer(cuda.cuDeviceGetCount))]
        gpus = tuple(_gpu(cuda, handle) for handle in handles)
        peers = tuple(
            tuple(a == b or bool(_integer(cuda.cuDeviceCanAccessPeer, a, b)) for b in handles)
            for a in handles
        )
    except _CudaError as error:
        return Driver(error=str(error), cuda_version=cuda_version)
    return Driver(cuda_version=cuda_version, gpus=gpus, peers=peers)


def _gpu(cuda: Any, handle: int) -> Gpu:
    name = ctypes.create_string_buffer(256)
    _call(cuda.cuDeviceGetName, name, len(name), handle)
    identity = (ctypes.c_ubyte * 16)()
    _call(cuda.cuDeviceGetUuid_v2, ctypes.byref(identity), handle)
    capability = [
        _integer(cuda.cuDeviceGetAttribute, attribute, handle)
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
    ]
    return Gpu(
        name=name.value.decode(errors="replace"),
        compute_capability=".".join(map(str, capability)),
        uuid=f"GPU-{uuid.UUID(bytes=bytes(identity))}",
    )


def _integer(function: Any, *arguments: int) -> int:
    """What a function of libcuda stores through its first argument."""
    value = ctypes.c_int()
    _call(function, ctypes.byref(value), *arguments)
    return value.value


def _call(function: Any, *arguments: Any) -> None:
    error = function(*arguments)
    if error:
        raise _CudaError(f"{function.__name__} of the NVIDIA driver fails with error {error}")
