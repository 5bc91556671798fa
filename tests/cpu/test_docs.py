"""The Python of the docs runs, each page's blocks in order, as one program of a user; the API
reference is that of the docstrings.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def make_api() -> Any:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_reference_is_that_of_the_docstrings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = make_api()
    assert api.page() == (ROOT / "docs" / "api.md").read_text(), "make docs"
    monkeypatch.setattr(api, "PAGE", tmp_path / "api.md")
    monkeypatch.setattr(sys, "argv", ["make_api.py", "--check"])
    assert api.main() == 1 and "make docs" in capsys.readouterr().err
    (tmp_path / "api.md").write_text("of yesterday")
    assert api.main() == 1
    monkeypatch.setattr(sys, "argv", ["make_api.py"])
    assert api.main() == 0
    monkeypatch.setattr(sys, "argv", ["make_api.py", "--check"])
    assert api.main() == 0


def test_the_api_reference_has_every_public_name() -> None:
    page = make_api().page()
    init = ast.parse((ROOT / "jax_megamoe" / "__init__.py").read_text())
    for node in ast.walk(init):
        if isinstance(node, ast.ImportFrom):
            assert f"### {node.names[0].asname}\n" in page
    for name in ("QWEN3_MOE", "MegaMoE", "import_weights", "Layout"):
        assert f"### {name}\n" in page
    for text in (
        "MegaMoE.__call__(\n    x: jax.Array,\n",
        "axis_name: str | None=None,",
        "    num_groups: int = 1\n",
    ):
        assert text in page
    assert "_Sizes" not in page and "KW_ONLY" not in page
