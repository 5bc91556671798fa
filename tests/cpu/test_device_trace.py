"""The judgement of a profile, on planes of each kind; and that an empty trace is no success."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from tests import device_trace

KERNELS = [("void megamoe::ForwardKernel(int)", start, 80) for start in (100, 200, 300)]


def plane(name: str, line: str, events: list[tuple[str, float, float]]) -> Any:
    shaped = [SimpleNamespace(name=n, start_ns=s, duration_ns=d) for n, s, d in events]
    return SimpleNamespace(name=name, lines=[SimpleNamespace(name=line, events=shaped)])


def found(
    on_device: list[tuple[str, float, float]] = (),  # type: ignore[assignment]
    on_host: list[tuple[str, float, float]] = (),  # type: ignore[assignment]
) -> list[str]:
    trace = device_trace.read(
        [
            plane("/device:GPU:0", "Stream #7(Compute,MemcpyD2H)", KERNELS + list(on_device)),
            plane("/device:GPU:0", "XLA Ops", [("MemcpyD2H of an op's name", 150, 10)]),
            plane("/host:CPU", "thread", list(on_host)),
        ]
    )
    return [e.name for e in device_trace.synchronisations(trace, "ForwardKernel", 3)]


@pytest.mark.parametrize("name", ["MemcpyD2H", "Memcpy DtoH (Device -> Pinned)"])
def test_a_copy_to_the_host_is_found(name: str) -> None:
    assert found(on_device=[(name, 190, 5)]) == [name]
    assert found(on_device=[(name, 90, 5), (name, 390, 5)]) == []


@pytest.mark.parametrize(
    "name",
    ["cuStreamSynchronize", "cudaDeviceSynchronize", "cuEventSynchronize", "cuMemcpyDtoH_v2"],
)
def test_a_wait_that_ends_between_kernels_is_found(name: str) -> None:
    assert found(on_host=[(name, 20, 170)]) == [name]
    # Before the step, and the step's own end.
    assert found(on_host=[(name, 20, 70), (name, 250, 200)]) == []


def test_other_work_is_no_synchronisation() -> None:
    assert found([("MemcpyD2D", 190, 5), ("Memset", 190, 5)], [("cuLaunchKernelEx", 150, 9)]) == []


def test_too_few_kernels_fail() -> None:
    with pytest.raises(AssertionError, match="0 of 3 kernels"):
        device_trace.synchronisations(device_trace.read([]), "ForwardKernel", 3)


def test_a_profile_of_this_process_is_read(tmp_path: Path) -> None:
    trace = device_trace.record(lambda: jnp.ones(8).block_until_ready(), tmp_path)
    assert trace.on_device == [] and trace.on_host
