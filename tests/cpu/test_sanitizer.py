"""The sanitizer's output is judged by its summary: none, and a tool that failed, are no success."""

from pathlib import Path

import pytest

from tests import sanitizer

CLEAN = """\
========= COMPUTE-SANITIZER
done: {"calls": 42}
========= ERROR SUMMARY: 0 errors
"""
FOUND = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at ForwardKernel+0x1230 in combine.cuh:100
========= ERROR SUMMARY: 3 errors
"""
UNSUPPORTED = """\
========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section
========= ERROR SUMMARY: 0 errors
"""


def test_summary_is_read() -> None:
    assert sanitizer.num_errors(CLEAN) == 0
    assert sanitizer.num_errors(FOUND) == 3


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "0 summaries"),
        (CLEAN.replace("ERROR SUMMARY", "SUMMARY"), "0 summaries"),
        (CLEAN + CLEAN, "2 summaries"),
        (UNSUPPORTED, "Device not supported"),
    ],
)
def test_no_verdict_is_no_success(output: str, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        sanitizer.num_errors(output)


def test_tool_is_found_on_path_or_named_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setattr(sanitizer.site, "getsitepackages", lambda: [])
    monkeypatch.setattr(sanitizer.Path, "glob", lambda *_: [])
    with pytest.raises(AssertionError, match=f"none of .*{tmp_path}"):
        sanitizer.find()
    for folder in ("toolkit/compute-sanitizer", "."):
        tool = tmp_path / folder / "compute-sanitizer"
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.touch(mode=0o755)
        assert sanitizer.command("memcheck")[:3] == [str(tool), "--tool", "memcheck"]
