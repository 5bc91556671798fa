"""The Python of the docs runs: each page's blocks in order, as one program of a user."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks(text: str) -> str:
    """The Python blocks of a page as one program, each line where the page has it."""
    lines, inside = [], False
    for line in text.splitlines():
        fence = re.match(r"```(\w*)", line)
        if fence:
            inside = fence[1] == "python"
        lines.append(line if inside and not fence else "")
    return "\n".join(lines)


PAGES = {
    path.relative_to(ROOT).as_posix(): program
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    if (program := blocks(path.read_text())).strip()
}


def run(program: str, name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program on 8 simulated devices, outside of the checkout; warnings are errors."""
    file = folder / name.replace("/", "_")
    file.write_text(program)
    flags = "--xla_force_host_platform_device_count=8"
    settings = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        cwd=folder,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_pages_with_programs_are_found() -> None:
    assert {"README.md", "docs/module.md", "docs/routing.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page: str, tmp_path: Path) -> None:
    result = run(PAGES[page], page, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_a_broken_block_is_found_at_its_line(tmp_path: Path) -> None:
    page = "text\n```python\nimport warnings\n```\n```\nno Python\n```\n```python\n1 / 0\n```\n"
    result = run(blocks(page), "page.md", tmp_path)
    assert result.returncode == 1
    assert 'page.md", line 9' in result.stderr and "ZeroDivisionError" in result.stderr
