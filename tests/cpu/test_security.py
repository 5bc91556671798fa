"""What other users and other people's data can do here: nothing that is theirs is executed, no name
can be guessed, and no id leads out of the memory of a call."""

import ast
import re
from collections.abc import Callable

import numpy as np
import pytest

from jax_megamoe.plan import backward_steps, forward_steps, make_plan
from tests import emulated
from tests.cases import Batch, normal_of
from tests.cpu.test_process_watch import processes
from tests.cpu.test_structure import Sources, cpp_files, project_sources, without_comments
from tests.forward import dims_of

EXECUTING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
EXECUTING_CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "unsafe_load"}
# Arguments that make a harmless call execute what it is given.
EXECUTING_ARGUMENTS = {"allow_pickle", "shell"}
SHARED_FOLDERS = re.compile(r"/(?:var/)?tmp\b|/dev/shm\b|/run\b")
# Calls that make something with a name which others can look up or be before.
NAMING_CALLS = re.compile(
    r"\b(shm_open|sem_open|mq_open|mkfifo|mknod|mktemp|tmpnam|tempnam|ftok)\b"
)


def package(sources: Sources) -> dict[str, str]:
    return {path: text for path, text in sources.items() if path.startswith("jax_megamoe/")}


def execution_faults(sources: Sources) -> list[str]:
    """Where the package would execute what it reads or is given."""
    faults = []
    for path, text in package(sources).items():
        for node in ast.walk(ast.parse(text)) if path.endswith(".py") else ():
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            wrong = {name.split(".")[0] for name in names} & EXECUTING_MODULES
            if isinstance(node, ast.Call):
                called = node.func
                # Of modules such as re, compile makes no code.
                bare = called.id if isinstance(called, ast.Name) else ""
                method = called.attr if isinstance(called, ast.Attribute) else ""
                wrong |= {bare} & EXECUTING_CALLS | {method} & (EXECUTING_CALLS - {"compile"})
                wrong |= {k.arg for k in node.keywords if k.arg} & EXECUTING_ARGUMENTS
            faults += [f"{path}:{getattr(node, 'lineno', 0)}: {name}" for name in sorted(wrong)]
    return faults


def naming_faults(sources: Sources) -> list[str]:
    """Where a name in a folder or a space that users share is used."""
    python = {path: text for path, text in package(sources).items() if path.endswith(".py")}
    cuda = {f"cuda/{p}": without_comments(text) for p, text in cpp_files(sources).items()}
    return [
        f"{path}: {found[0]}"
        for path, text in {**python, **cuda}.items()
        for pattern in (SHARED_FOLDERS, NAMING_CALLS)
        for found in pattern.finditer(text)
    ]


CHECKS = [execution_faults, naming_faults]


@pytest.mark.parametrize("check", CHECKS)
def test_the_sources_keep_the_rule(check: Callable[[Sources], list[str]]) -> None:
    assert check(project_sources()) == []


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (execution_faults, "jax_megamoe/weights.py", "import pickle\n"),
        (execution_faults, "jax_megamoe/weights.py", "from marshal import loads\n"),
        (execution_faults, "jax_megamoe/weights.py", "def f(a):\n    return eval(a)\n"),
        (execution_faults, "jax_megamoe/weights.py", "import os\nos.system('ls')\n"),
        (execution_faults, "jax_megamoe/weights.py", "np.load(a, allow_pickle=True)\n"),
        (execution_faults, "jax_megamoe/doctor.py", "subprocess.run(a, shell=True)\n"),
        (naming_faults, "jax_megamoe/doctor.py", "open('/tmp/jax_megamoe')\n"),
        (naming_faults, "cuda/host/peers.cc", 'open("/dev/shm/jax_megamoe", O_RDWR);\n'),
        (naming_faults, "cuda/host/peers.cc", "shm_open(name, O_CREAT, 0600);\n"),
    ],
)
def test_each_violation_is_found(
    check: Callable[[Sources], list[str]], path: str, text: str
) -> None:
    assert len(check({path: text})) == 1
    assert check({path: 'import re\nre.compile("a")\n'}) == []


def sockets() -> set[str]:
    """The abstract names of this network namespace."""
    with open("/proc/net/unix") as file:
        return {line.split()[-1] for line in file if "@jax_megamoe" in line}


def test_names_of_lifelines_are_random() -> None:
    """64 bits of the system's random device, so that nobody has the name before its owner."""
    before = sockets()
    with processes(3) as found:
        assert all(process.ask("lifeline") == "opened" for process in found)
        names = sockets() - before
        assert names == {f"@jax_megamoe-{p.card.identity:016x}" for p in found}
    source = project_sources()["cuda/host/identity.cc"]
    assert "std::random_device random;" in source
    assert "uint64_t{random()} << 32 | random()" in source


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Ids all over int32, most of them no expert."""
    size = (150, 4, 6, 64, 64)
    rng = np.random.default_rng(0)
    ids = rng.integers(-(2**31), 2**31, size[:2], np.int32)
    near = rng.integers(-9, 16, size[:2], np.int32)
    edges = rng.choice(np.array([-(2**31), 2**31 - 1, -(2**30), 2**30, 2**16], np.int32), size[:2])
    kind = rng.integers(3, size=size[:2])
    return normal_of(size, np.choose(kind, [ids, near, edges]).astype(np.int32))


def without_wrong_ids(batch: Batch) -> Batch:
    ids = batch.expert_idx
    valid = (ids >= 0) & (ids < batch.num_experts)
    assert 0.05 < valid.mean() < 0.5
    return batch._replace(expert_idx=np.where(valid, ids, np.int32(-1)))


def test_any_id_stays_in_the_memory_of_the_plan(batch: Batch) -> None:
    dims = dims_of(batch)
    for steps in (forward_steps(dims), backward_steps(dims)):
        found = emulated.plan(batch.expert_idx[None], dims, 0, steps)
        right = make_plan(without_wrong_ids(batch).expert_idx[None], dims, 0, steps)
        for a, b in zip(found, right, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_id_stays_in_the_memory_of_a_call(batch: Batch, ranks: int) -> None:
    """Straight into the kernels, which the op gives -1 instead."""
    clean = without_wrong_ids(batch)
    right = [emulated.forward(clean, ranks=ranks), *emulated.backward(clean, ranks=ranks)]
    found = [emulated.forward(batch, ranks=ranks), *emulated.backward(batch, ranks=ranks)]
    for a, b in zip(found, right, strict=True):
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))
