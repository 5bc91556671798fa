"""The compile lane's judgement, on what nvcc 13.0 printed for small kernels of each kind."""

import importlib.util
import re
import subprocess
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

# Of nvcc's front end, of ptxas and of the host's compiler.
WARNINGS = (
    'kernel.cu(3): warning #177-D: variable "y" was declared but never referenced',
    "ptxas warning : Local memory used for function '_Z6scalePf'",
    "kernel.cu:7:5: warning: unused variable 'z' [-Wunused-variable]",
)


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
        *((f"{warning}\n{CLEAN}", warning) for warning in WARNINGS),
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


def test_table_has_one_line_per_kernel() -> None:
    lines = lane.table(lane.parse(CLEAN).functions, {"_Z4copyPf": "copy"}).splitlines()
    assert [re.split(r"\s{2,}", line.strip()) for line in lines[1:]] == [
        ["10", "160", "0", "0", "0", "_Z6scalePf"],
        ["8", "0", "0", "0", "0", "copy"],
    ]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an empty cuda/, where a build has its objects too."""
    (tmp_path / "cuda").mkdir()
    monkeypatch.setattr(lane, "CUDA_DIR", tmp_path / "cuda")
    return tmp_path


def _compile(project: Path, output: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a compiler that prints a given report, as the build runs nvcc."""
    (project / "cuda" / "kernel.cu").write_text("__global__ void scale(float*);\n")
    (project / "output").write_text(output)
    compiler = ["sh", "-c", f"cat output; exit {status}", "nvcc", "-c", "-o", "cuda/kernel.cu.o"]
    command = [ROOT / "cuda" / "keep_report.sh", *compiler, "-x", "cu"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("output", "lane_status"), [(CLEAN, 0), (STACK_FRAME, 1), (SETMAXNREG_IGNORED, 1), ("", 1)]
)
def test_exit_status(project: Path, output: str, lane_status: int) -> None:
    result = _compile(project, output)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert lane.main([str(project)]) == lane_status


def test_a_compiler_that_fails_is_heard(project: Path) -> None:
    result = _compile(project, "no such type", status=2)
    assert (result.returncode, result.stderr) == (2, "no such type")


def test_a_file_without_a_report_fails(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The build does not know it."""
    _compile(project, CLEAN)
    (project / "cuda" / "other.cu").touch()
    assert lane.main([str(project)]) == 1
    assert "FAILED other.cu: no report" in capsys.readouterr().out


def test_no_source_fails(project: Path) -> None:
    assert lane.main([str(project)]) == 1
