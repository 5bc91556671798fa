#!/usr/bin/env python3
"""The compile lane: judges what nvcc and ptxas printed for every .cu file of the extension.

It reads the reports that a build with MEGAMOE_REPORT left beside its objects; no GPU is needed. A
kernel that spills, that keeps a stack frame, or whose wgmma pipeline ptxas gave up on is several
times slower and still right, so no test of values finds it; this does.
"""

import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

CUDA_DIR = Path(__file__).resolve().parent

# ptxas calls these remarks "info" and goes on: C7504 to C7507 a setmaxnreg it cannot honour, C7508
# one it ignores, C7509 to C7515 and C7520 wgmma instructions that it serialises.
FATAL_REMARKS = {*range(7504, 7516), 7520}

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_PROPERTIES = re.compile(r"Function properties for (?P<name>\S+)")
_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (?P<registers>\d+) registers")
_CUMULATIVE_STACK = re.compile(r"(?P<stack>\d+) bytes cumulative stack size")
_SHARED = re.compile(r"(?P<shared>\d+) bytes smem")
_REMARK = re.compile(r"\(C(?P<code>\d{4})\)")
# Of nvcc, of ptxas and of the host's compiler.
_WARNING = re.compile(r"\bwarning\b")


@dataclasses.dataclass
class Function:
    """What ptxas says of one function; sizes in bytes, registers per thread.

    A device function that was not inlined has no registers of its own: its callers hold them.
    """

    name: str
    is_kernel: bool
    registers: int | None = None
    static_shared_bytes: int = 0
    stack_bytes: int | None = None
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0


@dataclasses.dataclass
class Report:
    """The functions of one translation unit; ptxas's numbered remarks and all warnings, one line
    each."""

    functions: list[Function]
    remarks: list[str]
    warnings: list[str]


def parse(output: str) -> Report:
    """Reads what `nvcc -Xptxas -v` prints for one file and one architecture."""
    functions: dict[str, Function] = {}
    remarks: list[str] = []
    warnings: list[str] = []
    entry = current = None
    for line in output.splitlines():
        if _WARNING.search(line):
            warnings.append(line.strip())
        if match := _REMARK.search(line):
            remarks.append(line.strip())
        elif match := _ENTRY.search(line):
            entry = Function(match["name"], is_kernel=True)
            functions[entry.name] = entry
        elif match := _PROPERTIES.search(line):
            name = match["name"]
            current = functions.setdefault(name, Function(name, is_kernel=False))
        elif current and (match := _STACK.search(line)):
            current.stack_bytes = int(match["stack"])
            current.spill_store_bytes = int(match["stores"])
            current.spill_load_bytes = int(match["loads"])
        elif entry and (match := _REGISTERS.search(line)):
            entry.registers = int(match["registers"])
            if match := _SHARED.search(line):
                entry.static_shared_bytes = int(match["shared"])
            # A kernel without a frame of its own still pays for those of the functions it calls.
            if match := _CUMULATIVE_STACK.search(line):
                entry.stack_bytes = max(entry.stack_bytes or 0, int(match["stack"]))
    return Report(list(functions.values()), remarks, warnings)


def findings(report: Report) -> list[str]:
    """Why the lane fails for this report, one line each; empty when it passes."""
    found = []
    for function in report.functions:
        if function.stack_bytes is None or (function.is_kernel and function.registers is None):
            found.append(f"{function.name}: ptxas's report is incomplete")
        if function.spill_store_bytes or function.spill_load_bytes:
            found.append(
                f"{function.name}: spills registers, {function.spill_store_bytes} bytes stored, "
                f"{function.spill_load_bytes} loaded"
            )
        if function.is_kernel and function.stack_bytes:
            found.append(f"{function.name}: keeps {function.stack_bytes} bytes of stack")
    # Without this an unknown report format would read as "nothing wrong".
    if not any(function.is_kernel for function in report.functions):
        found.append("ptxas reported no kernel: kernels belong in .cu files, the rest in headers")
    fatal = [remark for remark in report.remarks if is_fatal(remark)]
    return list(dict.fromkeys([*found, *fatal, *report.warnings]))


def is_fatal(remark: str) -> bool:
    """Whether a numbered remark of ptxas fails the lane; the others are only shown."""
    match = _REMARK.search(remark)
    return match is not None and int(match["code"]) in FATAL_REMARKS


def table(functions: Iterable[Function], names: dict[str, str]) -> str:
    """One line per kernel; names maps the symbols to what is shown for them."""
    rows = [["registers", "smem", "stack", "spill st", "spill ld", "kernel"]]
    for function in functions:
        numbers = (
            function.registers,
            function.static_shared_bytes,
            function.stack_bytes,
            function.spill_store_bytes,
            function.spill_load_bytes,
        )
        if function.is_kernel:
            rows.append([*map(str, numbers), names.get(function.name, function.name)])
    return "\n".join("".join(f"{cell:>10}" for cell in row[:-1]) + f"  {row[-1]}" for row in rows)


def demangle(symbols: Sequence[str]) -> dict[str, str]:
    """Readable names for symbols, without their parameter lists; as they are without c++filt."""
    if not symbols or not (filt := shutil.which("c++filt")):
        return {}
    # "-p" drops the parameters, which repeat the template arguments.
    result = subprocess.run([filt, "-p", *symbols], capture_output=True, text=True, check=True)
    return dict(zip(symbols, result.stdout.splitlines(), strict=True))


def judge_file(name: str, output: str) -> list[str]:
    """Prints one file's table and remarks; returns its findings."""
    report = parse(output)
    print(f"== {name}")
    print(table(report.functions, demangle([f.name for f in report.functions])))
    for remark in report.remarks:
        print(f"   {remark}")
    return [f"{name}: {finding}" for finding in findings(report)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("objects", type=Path, help="the folder of a build that has cuda/*/*.cu.o")
    objects = parser.parse_args(arguments).objects
    sources = sorted(CUDA_DIR.rglob("*.cu"))
    found = []
    for source in sources:
        name = source.relative_to(CUDA_DIR).as_posix()
        report = objects / CUDA_DIR.name / f"{name}.o.report"
        if report.exists():
            found += judge_file(name, report.read_text())
        else:
            found.append(f"{name}: no report, so it is not built into the extension")
    if not sources:
        found.append(f"no .cu file under {CUDA_DIR.name}/: nothing was proved")
    for finding in found:
        print(f"FAILED {finding}")
    print(f"compile lane: {len(sources)} files, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
