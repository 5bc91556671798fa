"""The house rules that a reader relies on, checked on the sources: directions, sizes, paths.

Each check is a function of paths and texts, so that each is also shown to fail on a violation.
"""

import ast
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 120

# Folders of cuda/ by what they may include besides themselves. plan and roles meet only in shared/.
_BASE = {"ptx", "shared"}
CUDA_MAY_INCLUDE: dict[str, set[str]] = {
    "ptx": set(),
    "shared": set(),
    "comm": _BASE,
    "plan": _BASE | {"comm"},
    "pipeline": _BASE | {"comm"},
    "roles": _BASE | {"comm", "pipeline"},
    "kernel": _BASE | {"comm", "pipeline", "roles"},
    "host": _BASE | {"comm", "pipeline", "roles", "kernel", "plan"},
    "ffi": _BASE | {"comm", "pipeline", "roles", "kernel", "plan", "host"},
}

# Modules of jax_megamoe by which others they may import; those in a folder by its name and theirs.
# Nothing imports the package itself, which re-exports, nor models, but models and the program that
# trains them.
_BASE_MODULES = {"config", "validation", "_guard", "_ids", "activation"}
_QUANTIZED = {"quantization", "_quantized_checks"}
_LEAVES = _BASE_MODULES | _QUANTIZED | {"plan", "_call_arrays", "memory", "reference", "_ffi"}
_CALL = _LEAVES | {"_backend", "ops", "sharding"}
_ROUTER = {"_router_checks", "_router_losses", "presets", "router"}
_LAYER = {"_layer", "_layer_checks"}
_QWEN3_PARTS = {"models.qwen3_config", "models.qwen3_layers"}
_TRAINING = {"models.training_config", "models.training"}
_MODULES = _CALL | _ROUTER | _LAYER | {"nnx", "linen"}
PYTHON_MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "validation": {"config"},
    "_guard": {"config"},
    "_ids": set(),
    "plan": {"config"},
    "plan_check": {"config", "plan"},
    "_arrays": {"config"},
    "_call_arrays": {"config", "plan", "_arrays"},
    "memory": {"config", "validation", "_arrays", "_call_arrays"},
    "activation": {"config"},
    "quantization": {"config", "validation"},
    "_quantized_checks": {"config", "validation", "quantization"},
    "_recipe": {"quantization"},
    "reference": {"config", "activation", "quantization", "_recipe"},
    "_ffi": {"config", "activation", "plan", "_call_arrays", "memory", "quantization"},
    "presets": {"config"},
    "_router_checks": {"config", "validation"},
    "_router_losses": set(),
    "router": {"config", "_router_checks", "_router_losses"},
    "_backend": {"config", "_call_arrays", "quantization", "reference", "_ffi"},
    "ops": {"config", "validation", "_guard", "_ids", "_backend"} | _QUANTIZED,
    "sharding": _LEAVES | {"ops"},
    "_layer": _CALL | _ROUTER,
    "_layer_checks": {"config", "validation", "_quantized_checks", "_router_checks", "_layer"},
    "nnx": {"config", "validation", "quantization"} | _LAYER,
    "linen": {"config", "quantization"} | _LAYER,
    "layouts": {"validation"},
    "weights": {"config", "validation", "layouts"},
    "models.__init__": set(),
    "models.qwen3_config": {"config", "validation"},
    "models.storage": {"validation"},
    "models.qwen3_layers": {"config", "presets", "quantization", "nnx", "models.qwen3_config"},
    "models.qwen3_checks": {"validation"} | _QWEN3_PARTS,
    "models.qwen3_moe": {"config", "validation", "quantization", "nnx"}
    | {"models.storage", "models.qwen3_checks"}
    | _QWEN3_PARTS,
    "models.qwen3_weights": {"validation", "layouts", "weights", "models.qwen3_moe"} | _QWEN3_PARTS,
    "models.safetensors": {"validation"},
    "models.flops": {"models.qwen3_config"},
    "models.training_config": {"config", "validation"} | _QWEN3_PARTS,
    "models.loss": {"nnx", "models.qwen3_moe"},
    "models.training": {"config", "validation", "_backend", "ops", "router", "nnx"}
    | {"models.qwen3_moe", "models.training_config", "models.loss"},
    "compare": {"validation"} | _TRAINING,
    "__init__": _MODULES,
    "_machine": {"_ffi"},
    "_diagnosis": _LEAVES | {"_backend", "_machine"},
    "doctor": _LEAVES | {"_machine", "_diagnosis"},
}

CPP_SUFFIXES = {".cu", ".cuh", ".h", ".cc", ".in"}
TEXT_SUFFIXES = CPP_SUFFIXES | {".py", ".md", ".toml", ".yaml", ".sh", ".txt", ".json", ".csv", ""}
UNTRACKED_FOLDERS = {".venv", "build", "dist", "out", "__pycache__"}

Sources = Mapping[str, str]


def project_sources() -> dict[str, str]:
    """The project's text files by path from the root, found without git, as in an sdist; pictures
    are there without text."""
    paths = []
    for entry in sorted(ROOT.iterdir()):
        hidden = entry.name.startswith(".") and entry.name not in {".ci", ".clang-format"}
        if hidden or entry.name in UNTRACKED_FOLDERS:
            continue
        paths += [entry] if entry.is_file() else sorted(entry.rglob("*"))
    return {
        path.relative_to(ROOT).as_posix(): "" if path.suffix == ".png" else path.read_text()
        for path in paths
        if path.is_file()
        and path.suffix in {*TEXT_SUFFIXES, ".png"}
        and not UNTRACKED_FOLDERS & set(path.relative_to(ROOT).parts)
    }


def cpp_files(sources: Sources) -> dict[str, str]:
    """The C++ and CUDA files, by their path from cuda/."""
    return {
        path.removeprefix("cuda/"): text
        for path, text in sources.items()
        if path.startswith("cuda/") and posixpath.splitext(path)[1] in CPP_SUFFIXES
    }


def without_comments(cpp: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", cpp, flags=re.DOTALL)


def include_faults(sources: Sources) -> list[str]:
    """Includes against the order of the layers, between roles, or of XLA where it may not be."""
    files = cpp_files(sources)
    faults = []
    for path, text in files.items():
        layer = posixpath.dirname(path)
        if layer not in CUDA_MAY_INCLUDE:
            faults.append(f"cuda/{path} lies in no known layer")
            continue
        for header in re.findall(r'#\s*include\s*["<]([^">]+)[">]', without_comments(text)):
            if header.startswith("xla/") and layer != "ffi":
                faults.append(f"cuda/{path} includes {header}: XLA is for ffi/")
            beside = posixpath.normpath(posixpath.join(layer, header))
            target = posixpath.dirname(beside if beside in files else header)
            if target == layer and layer == "roles":
                faults.append(f"cuda/{path} includes {header}: roles do not include each other")
            if target in CUDA_MAY_INCLUDE and target not in CUDA_MAY_INCLUDE[layer] | {layer}:
                faults.append(f"cuda/{path} includes {header}: {layer} lies below {target}")
    return faults


def assembly_faults(sources: Sources) -> list[str]:
    """Inline assembly outside ptx/."""
    return [
        f"cuda/{path} has inline assembly: it belongs in cuda/ptx/"
        for path, text in cpp_files(sources).items()
        if not path.startswith("ptx/") and re.search(r"\b(__)?asm(__)?\b", without_comments(text))
    ]


def imported_modules(module: str, tree: ast.Module) -> set[str]:
    """The modules of jax_megamoe that one of them imports, anywhere in it."""
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                origin = f"jax_megamoe.{origin}".rstrip(".")
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        for package, *path in parts:
            if package == "jax_megamoe":
                path += ["__init__", "__init__"]
                imported.add(f"models.{path[1]}" if path[0] == "models" else path[0])
    return imported - {module}


def import_faults(sources: Sources) -> list[str]:
    """Imports inside jax_megamoe against the direction of its modules."""
    faults = []
    for path, text in sources.items():
        if not re.fullmatch(r"jax_megamoe/.*\.py", path):
            continue
        module = path.removeprefix("jax_megamoe/").removesuffix(".py").replace("/", ".")
        if module not in PYTHON_MAY_IMPORT:
            faults.append(f"{path} has no place in the order of imports")
            continue
        wrong = imported_modules(module, ast.parse(text)) - PYTHON_MAY_IMPORT[module]
        faults += [f"{path} imports {name}: against the order" for name in sorted(wrong)]
    return faults


def size_faults(sources: Sources) -> list[str]:
    """Sources over the line limits, which hold for code and not for locks and prose."""
    faults = []
    for path, text in sources.items():
        suffix = posixpath.splitext(path)[1]
        num_lines = len(text.splitlines())
        if suffix in CPP_SUFFIXES | {".py"} and num_lines > MAX_FILE_LINES:
            faults.append(f"{path} has {num_lines} lines, more than {MAX_FILE_LINES}")
        if suffix != ".py":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    faults.append(f"{path}: {node.name} has {length} lines")
    return faults


def machine_path_faults(sources: Sources) -> list[str]:
    """Absolute paths of somebody's machine."""
    pattern = re.compile(r"(?<![\w.~/$}-])/(?:root|home/\w+|Users/\w+)/[\w.]")
    return [
        f"{path}:{number} names a path of one machine: {line.strip()}"
        for path, text in sources.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def prose_faults(sources: Sources) -> list[str]:
    """Links in prose to files that are not there, and placeholders that were never filled in."""
    faults = []
    for path, text in sources.items():
        if not path.endswith(".md"):
            continue
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if "://" in target:
                continue
            file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if file not in sources:
                faults.append(f"{path} links to {target}, which is not there")
        faults += [f"{path} holds {word}" for word in re.findall(r"\b[A-Z]+_TABLE\b", text)]
    return faults


CHECKS = [
    include_faults,
    assembly_faults,
    import_faults,
    size_faults,
    machine_path_faults,
    prose_faults,
]


@pytest.mark.parametrize("check", CHECKS)
def test_project_keeps_the_rule(check: Callable[[Sources], list[str]]) -> None:
    sources = project_sources()
    assert {"Makefile", ".ci/run", "jax_megamoe/config.py"} <= set(sources)
    assert not check(sources)


_LONG_FUNCTION = "def long():\n" + "    pass\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (include_faults, "cuda/comm/wait.cuh", '#include "pipeline/ring.cuh"\n'),
        (include_faults, "cuda/comm/wait.cuh", '#  include "../pipeline/ring.cuh"\n'),
        (include_faults, "cuda/ptx/tma.cuh", '#include "shared/plan.h"\n'),
        (include_faults, "cuda/shared/plan.h", '#include "ptx/tma.cuh"\n'),
        (include_faults, "cuda/roles/load.cuh", '#include "plan/plan.h"\n'),
        (include_faults, "cuda/roles/load.cuh", '#include "roles/finish.cuh"\n'),
        (include_faults, "cuda/roles/load.cuh", '#include "finish.cuh"\n'),
        (include_faults, "cuda/plan/plan.cu", '#include "pipeline/ring.cuh"\n'),
        (include_faults, "cuda/kernel/forward.cuh", '#include "host/launch.h"\n'),
        (include_faults, "cuda/host/launch.cc", '#include "ffi/handlers.h"\n'),
        (include_faults, "cuda/host/launch.cc", "#include <xla/ffi/api/ffi.h>\n"),
        (include_faults, "cuda/shared/plan.h", '#include "xla/ffi/api/ffi.h"\n'),
        (include_faults, "cuda/misc/tool.h", ""),
        (assembly_faults, "cuda/roles/load.cuh", 'void f() { asm volatile("fence;"); }\n'),
        (assembly_faults, "cuda/comm/wait.cuh", '__asm__("fence;");\n'),
        (import_faults, "jax_megamoe/config.py", "from jax_megamoe.plan import build\n"),
        (import_faults, "jax_megamoe/plan.py", "from jax_megamoe import reference\n"),
        (import_faults, "jax_megamoe/ops.py", "def f():\n    from .sharding import wrap\n"),
        (import_faults, "jax_megamoe/ops.py", "from . import nnx\n"),
        (import_faults, "jax_megamoe/ops.py", "import jax_megamoe.linen\n"),
        (import_faults, "jax_megamoe/sharding.py", "from jax_megamoe import mega_moe\n"),
        (import_faults, "jax_megamoe/nnx.py", "import jax_megamoe\n"),
        (import_faults, "jax_megamoe/nnx.py", "from jax_megamoe.linen import MegaMoE\n"),
        (import_faults, "jax_megamoe/router.py", "from jax_megamoe import ops\n"),
        (import_faults, "jax_megamoe/misc.py", ""),
        (import_faults, "jax_megamoe/models/misc.py", ""),
        (
            import_faults,
            "jax_megamoe/nnx.py",
            "from jax_megamoe.models.qwen3_moe import Qwen3Moe\n",
        ),
        (import_faults, "jax_megamoe/nnx.py", "from jax_megamoe import models\n"),
        (import_faults, "jax_megamoe/models/qwen3_config.py", "from jax_megamoe import nnx\n"),
        (import_faults, "jax_megamoe/models/safetensors.py", "import jax_megamoe.models\n"),
        (size_faults, "jax_megamoe/ops.py", "\n" * (MAX_FILE_LINES + 1)),
        (size_faults, "cuda/plan/plan.cu", "\n" * (MAX_FILE_LINES + 1)),
        (size_faults, "tests/cpu/test_ops.py", _LONG_FUNCTION),
        (machine_path_faults, "README.md", "see `" + "/home/" + "me/moe`\n"),
        (machine_path_faults, "Makefile", "PY := " + "/root/" + "bin/python\n"),
        (prose_faults, "docs/guide.md", "see [the plan](plan.md#rows)\n"),
        (prose_faults, "docs/guide.md", "figures:\n" + "SPEED" + "_TABLE\n"),
    ],
)
def test_each_violation_is_found(
    check: Callable[[Sources], list[str]], path: str, text: str
) -> None:
    others = {"cuda/roles/finish.cuh": "", "cuda/pipeline/ring.cuh": ""}
    assert check(others) == []
    assert len(check(others | {path: text})) == 1


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (include_faults, "cuda/roles/load.cuh", '// #include "plan/plan.h"\n'),
        (include_faults, "cuda/ffi/forward.cc", '#include "xla/ffi/api/ffi.h"\n'),
        (include_faults, "cuda/plan/plan.cu", '#include "plan.h"\n#include <cuda_runtime.h>\n'),
        (assembly_faults, "cuda/ptx/sync.cuh", 'asm volatile("fence;");\n'),
        (import_faults, "jax_megamoe/_layer.py", "from jax_megamoe import ops, router\n"),
        (import_faults, "jax_megamoe/ops.py", "import jax\nfrom jax_megamoe.config import Dims\n"),
        (
            import_faults,
            "jax_megamoe/models/qwen3_layers.py",
            "from jax_megamoe import presets\nfrom jax_megamoe.models import qwen3_config\n",
        ),
        (size_faults, ".ci/locks/cpu.txt", "\n" * (MAX_FILE_LINES + 1)),
        (machine_path_faults, "README.md", "jax_megamoe/root/x and ~/home/me/x\n"),
        (prose_faults, "docs/guide.md", "[here](guide.md#top), [there](https://jax.dev/x)\n"),
    ],
)
def test_what_is_allowed_passes(
    check: Callable[[Sources], list[str]], path: str, text: str
) -> None:
    assert check({path: text}) == []
