"""compute-sanitizer: where it is, how it runs a program, and what its summary says."""

import os
import re
import shutil
import site
from pathlib import Path

from tests.forward_programs import counted
from tests.process import run_on_gpu

SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (?P<errors>\d+) errors?", re.MULTILINE)
# The tool's own failures, such as a device or a driver that it does not support.
FAILURE = re.compile(r"^=+ (Error|Internal Sanitizer Error|Target application)\b.*$", re.MULTILINE)


def find() -> str:
    """The path of compute-sanitizer; AssertionError saying where it was looked for."""
    places = [Path(p) for p in os.environ.get("PATH", "").split(os.pathsep) if p]
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    toolkits += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    for toolkit in filter(None, toolkits):
        places += [Path(toolkit) / "bin", Path(toolkit) / "compute-sanitizer"]
    for packages in site.getsitepackages():
        places += sorted(Path(packages).glob("nvidia/*/bin"))
        places += sorted(Path(packages).glob("nvidia/*/compute-sanitizer"))
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, places)))
    assert found is not None, f"compute-sanitizer is in none of {sorted(set(map(str, places)))}"
    return found


def command(tool: str) -> list[str]:
    """What runs a program under the tool, which prints its first findings.

    Failed calls of the CUDA API are left out: XLA asks a driver for functions it may not have, and
    each call of this library is checked where it is made.
    """
    options = ["--tool", tool, "--print-limit", "20", "--show-backtrace", "device"]
    return [find(), *options, "--report-api-errors", "no"]


def num_errors(output: str) -> int:
    """The findings, by the tool's summary; AssertionError for no summary or a tool that failed."""
    summaries = SUMMARY.findall(output)
    assert len(summaries) == 1, f"{len(summaries)} summaries in: {output[-4000:]}"
    failures = [match[0] for match in FAILURE.finditer(output)]
    assert not failures, f"the tool failed: {failures}"
    return int(summaries[0])


def assert_clean(
    tool: str, programs: str, program: str, *, num_calls: int, timeout_s: float
) -> None:
    """Runs a program of the module `programs` under the tool, which must find nothing.

    XLA's arrays are allocations of their own, so that the tool knows where each ends.
    """
    result = run_on_gpu(
        "-m",
        programs,
        program,
        under=command(tool),
        timeout_s=timeout_s,
        XLA_PYTHON_CLIENT_ALLOCATOR="platform",
    )
    output = result.stdout + result.stderr
    assert num_errors(output) == 0, output
    printed = [line for line in result.stdout.splitlines() if not line.startswith("=")]
    assert result.returncode == 0, output
    assert counted("\n".join(printed)) == {"calls": num_calls}
