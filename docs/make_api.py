"""Writes docs/api.md, the API reference, from the docstrings; reads the sources, imports nothing.

    python docs/make_api.py [--check]

`--check` writes nothing, and ends with 1 if the file is not what it would write.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jax_megamoe"
PAGE = ROOT / "docs" / "api.md"
# Public modules besides the package itself, whose names are what its __init__.py re-exports.
MODULES = (
    "nnx",
    "linen",
    "presets",
    "layouts",
    "weights",
    "models.qwen3_moe",
    "models.qwen3_weights",
    "models.safetensors",
    "models.training_config",
    "models.training",
    "models.flops",
)
# Programs: what they say of themselves.
PROGRAMS = ("doctor", "compare")
HEAD = """\
# API reference

`make docs` writes this page from the docstrings. Guides: [README](../README.md#pages).
"""
# The module whose docstring has the letters of all shapes.
DIMENSIONS = "config"

Definition = ast.FunctionDef | ast.ClassDef


def page() -> str:
    """The whole of docs/api.md."""
    key = ast.get_docstring(_parsed(DIMENSIONS)[0]) or ""
    sections = [HEAD, f"## Dimensions\n\n{_fenced(key)}", *_package()]
    for module in MODULES:
        sections += _module(module)
    for program in PROGRAMS:
        doc = ast.get_docstring(_parsed(program)[0]) or ""
        sections.append(f"## python -m jax_megamoe.{program}\n\n{_fenced(doc)}")
    return "\n".join(sections)


def _parsed(module: str) -> tuple[ast.Module, list[str]]:
    source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text()
    return ast.parse(source), source.splitlines()


def _package() -> Iterator[str]:
    """What `import jax_megamoe` gives."""
    tree, _ = _parsed("__init__")
    yield f"## jax_megamoe\n\n{ast.get_docstring(tree)}\n"
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from _re_exports("jax_megamoe", node)


def _re_exports(importer: str, node: ast.ImportFrom) -> Iterator[str]:
    """The definitions that `from module import name as name` makes part of the importer."""
    names = [alias.name for alias in node.names if alias.asname == alias.name]
    if names:
        source = str(node.module).removeprefix("jax_megamoe.")
        tree, lines = _parsed(source)
        described = {d.name: _entry(importer, d) for d in _definitions(tree)}
        for member in tree.body:
            if isinstance(member, ast.Assign) and (text := _constant(member, lines)) is not None:
                described[ast.unparse(member.targets[0])] = text
        yield from (described[name] for name in names)


def _module(module: str) -> Iterator[str]:
    tree, lines = _parsed(module)
    yield f"## jax_megamoe.{module}\n\n{_fenced(ast.get_docstring(tree) or '')}"
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from _re_exports(f"jax_megamoe.{module}", node)
        elif isinstance(node, Definition) and not node.name.startswith("_"):
            yield _entry(f"jax_megamoe.{module}", node)
        elif isinstance(node, ast.Assign):
            if (constant := _constant(node, lines)) is not None:
                yield constant


def _definitions(tree: ast.Module) -> Iterator[Definition]:
    return (node for node in tree.body if isinstance(node, Definition))


def _constant(node: ast.Assign, lines: list[str]) -> str | None:
    """A public constant that a comment describes, with it; None for any other assignment."""
    target = node.targets[0]
    if not isinstance(target, ast.Name) or target.id.startswith("_"):
        return None
    first = node.lineno - 1
    start = first
    while start and lines[start - 1].startswith("# "):
        start -= 1
    if start == first:
        return None
    comment = " ".join(line.removeprefix("# ") for line in lines[start:first])
    return f"### {target.id}\n\n{comment}\n\n{_fenced(ast.unparse(node))}"


def _entry(module: str, node: Definition) -> str:
    """A function or class with what is public of it."""
    parts = [f"### {node.name}\n"]
    if isinstance(node, ast.FunctionDef):
        return "\n".join([*parts, _function(f"{module}.{node.name}", node)])
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    head = f"class {module}.{node.name}" + (f"({bases})" if bases else "")
    fields = [f"    {ast.unparse(f)}" for f in node.body if _is_field(f)]
    doc = ast.get_docstring(node) or ""
    parts.append(_fenced("\n".join([head, *fields, "", doc])))
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and _is_public(member):
            parts.append(_function(f"{node.name}.{member.name}", member))
    return "\n".join(parts)


def _is_field(member: ast.stmt) -> bool:
    """A public field of a dataclass or a NamedTuple."""
    return isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_")


def _is_public(member: ast.FunctionDef) -> bool:
    """Methods that users call and that say something of themselves."""
    is_named = not member.name.startswith("_") or member.name in ("__init__", "__call__")
    return is_named and ast.get_docstring(member) is not None


def _function(name: str, node: ast.FunctionDef) -> str:
    is_property = any(ast.unparse(d) == "property" for d in node.decorator_list)
    signature = "" if is_property else f"({_arguments(node.args)})"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return _fenced(f"{name}{signature}{returns}\n\n{ast.get_docstring(node) or ''}")


def _arguments(arguments: ast.arguments) -> str:
    """One a line where there are several."""
    text = ast.unparse(arguments)
    parts: list[str] = []
    for part in text.split(", "):
        # A comma inside brackets separates no arguments.
        if parts and parts[-1].count("[") + parts[-1].count("(") > (
            parts[-1].count("]") + parts[-1].count(")")
        ):
            parts[-1] += f", {part}"
        else:
            parts.append(part)
    parts = [part for part in parts if part != "self"]
    joined = ", ".join(parts)
    return joined if len(joined) < 60 else "\n    " + ",\n    ".join(parts) + ",\n"


def _fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print("docs/api.md is not that of the docstrings: make docs", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
