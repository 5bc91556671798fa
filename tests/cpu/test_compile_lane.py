"""The compile lane's judgement, on what nvcc 13.0 printed for small kernels of each kind."""

import importlib.util
import re
import stat
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("compile_lane", ROOT / "cuda" / "compile_lane.py")
assert _SPEC and _SPEC.loader
lane = importlib.util.module_from_spec(_SPEC)
sys.modules["compile_lane"] = lane  # dataclasses look their module up
_SPEC.loader.exec_module(lane)

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6scalePf' for 'sm_90a'
ptxas info    : Function properties for _Z6scalePf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 160 bytes smem
ptxas info    : Compile time = 6.924 ms
ptxas info    : Function properties for _Z5twicef
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z4copyPf' for 'sm_90a'
ptxas info    : Function properties for _Z4copyPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 400 bytes cmem[0]
"""

SPILLED = """\
ptxas error   : Registers are spilled to local memory in function '_Z5spillPf', 916 bytes spill \
stores, 960 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5spillPf' for 'sm_90a'
ptxas info    : Function properties for _Z5spillPf
    0 bytes stack frame, 916 bytes spill stores, 960 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""

STACK_FRAME = """\
ptxas info    : Compiling entry function '_Z5stackPfi' for 'sm_90a'
ptxas info    : Function properties for _Z5stackPfi
    256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers, 256 bytes cumulative stack size
"""

CALLEE_STACK = """\
ptxas info    : Compiling entry function '_Z4callPf' for 'sm_90a'
ptxas info    : Function properties for _Z4callPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers, 64 bytes cumulative stack size
ptxas info    : Function properties for _Z6calleef
    64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""

CALLEE_SPILL = """\
ptxas info    : Compiling entry function '_Z4callPf' for 'sm_90a'
ptxas info    : Function properties for _Z4callPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers
ptxas info    : Function properties for _Z6calleef
    0 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""

SERIALISED = (
    "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline in the function "
    "'_Z6scalePf'\n" + CLEAN
)
SETMAXNREG_IGNORED = (
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to "
    "determine register count at entry.\n" + CLEAN
)
ARRIVE_INJECTED = (
    "ptxas info    : (C7519) warpgroup.arrive is injected in around line 50 by compiler to allow "
    "use of registers in GMMA in function '_Z6scalePf'\n" + CLEAN
)

CMAKE = """\
set(CMAKE_CUDA_STANDARD 17)
target_compile_options(kernels PRIVATE
  $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo -DX=1>
  $<$<COMPILE_LANGUAGE:CXX>:-Wall>)
"""


def test_clean_output_is_read_whole_and_passes() -> None:
    report = lane.parse(CLEAN)
    scale, twice, copy = report.functions
    assert (scale.name, scale.is_kernel, scale.registers) == ("_Z6scalePf", True, 10)
    assert (scale.static_shared_bytes, scale.stack_bytes) == (160, 0)
    assert (twice.name, twice.is_kernel, twice.registers) == ("_Z5twicef", False, None)
    assert (copy.registers, copy.static_shared_bytes) == (8, 0)
    assert lane.findings(report) == []


@pytest.mark.parametrize(
    ("output", "finding"),
    [
        (SPILLED, "_Z5spillPf: spills registers, 916 bytes stored, 960 loaded"),
        (CALLEE_SPILL, "_Z6calleef: spills registers, 8 bytes stored, 8 loaded"),
        (STACK_FRAME, "_Z5stackPfi: keeps 256 bytes of stack"),
        (CALLEE_STACK, "_Z4callPf: keeps 64 bytes of stack"),
        (SERIALISED, "C7511"),
        (SETMAXNREG_IGNORED, "C7508"),
        ("", "no kernel"),
        (CLEAN.replace("Used", "Needs"), "_Z6scalePf: ptxas's report is incomplete"),
        (CLEAN.replace("stack frame", "frame"), "_Z5twicef: ptxas's report is incomplete"),
    ],
)
def test_each_kind_of_fault_is_found(output: str, finding: str) -> None:
    found = lane.findings(lane.parse(output))
    assert any(finding in line for line in found), found


@pytest.mark.parametrize("code", [*range(7504, 7511), *range(7512, 7516), 7520])
def test_the_whole_range_of_remarks_is_fatal(code: int) -> None:
    output = SERIALISED.replace("C7511", f"C{code}")
    assert len(lane.findings(lane.parse(output))) == 1


@pytest.mark.parametrize("code", [7503, 7516, 7519])
def test_other_remarks_are_kept_and_pass(code: int) -> None:
    report = lane.parse(ARRIVE_INJECTED.replace("C7519", f"C{code}"))
    assert len(report.remarks) == 1
    assert lane.findings(report) == []


def test_flags_are_those_of_the_build() -> None:
    flags = lane.build_flags((ROOT / "CMakeLists.txt").read_text())
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags
    assert lane.build_flags(CMAKE) == ["-std=c++17", "-O3", "-DNDEBUG", "-lineinfo", "-DX=1"]


@pytest.mark.parametrize("lost", ["CUDA>", "CMAKE_CUDA_STANDARD"])
def test_flags_that_are_not_found_are_an_error(lost: str) -> None:
    with pytest.raises(ValueError, match=r"CMakeLists\.txt states no CUDA"):
        lane.build_flags(CMAKE.replace(lost, ""))


def test_table_has_one_line_per_kernel() -> None:
    lines = lane.table(lane.parse(CLEAN).functions, {"_Z4copyPf": "copy"}).splitlines()
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[1:]] == [
        ["10", "160", "0", "0", "0", "_Z6scalePf"],
        ["8", "0", "0", "0", "0", "copy"],
    ]


def _fake_nvcc(folder: Path, output: str, status: int) -> str:
    """A compiler that prints a given report; the lane's own judgement is under test."""
    (folder / "report").write_text(output)
    script = folder / "nvcc"
    script.write_text(f"#!/bin/sh\ncat '{folder}/report' >&2\nexit {status}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


@pytest.fixture
def cuda_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cuda/ of a project whose CMakeLists.txt is CMAKE."""
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    folder = tmp_path / "cuda"
    folder.mkdir()
    monkeypatch.setattr(lane, "CUDA_DIR", folder)
    return folder


@pytest.mark.parametrize(
    ("output", "nvcc_status", "lane_status"),
    [(CLEAN, 0, 0), (STACK_FRAME, 0, 1), (SETMAXNREG_IGNORED, 0, 1), (CLEAN, 2, 1), ("", 0, 1)],
)
def test_exit_status(
    cuda_dir: Path, tmp_path: Path, output: str, nvcc_status: int, lane_status: int
) -> None:
    (cuda_dir / "kernel.cu").write_text("__global__ void scale(float*);\n")
    assert lane.main(["--nvcc", _fake_nvcc(tmp_path, output, nvcc_status)]) == lane_status


@pytest.mark.usefixtures("cuda_dir")
def test_no_source_fails(tmp_path: Path) -> None:
    assert lane.main(["--nvcc", _fake_nvcc(tmp_path, CLEAN, 0)]) == 1


def test_missing_nvcc_fails_unless_it_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert lane.main(["--nvcc", "no-such-nvcc"]) == 1
    assert lane.main(["--nvcc", "no-such-nvcc", "--allow-missing-nvcc"]) == 0
    assert capsys.readouterr().out == "compile lane not run: no no-such-nvcc on PATH\n" * 2
