"""What every test runs under: devices, strict promotion, checked shapes, and which hardware.

Without `-m gpu` the tests run on 8 simulated CPU devices, also on a GPU machine. With it the GPU is
declared: its absence, the extension's absence and any skip are failures. JAX_MEGAMOE_GPUS says how
many GPUs are declared (default 1); tests that need more are left out with a notice. So are tests
against transformers, unless JAX_MEGAMOE_TRANSFORMERS=1 declares it and torch; then their absence
fails these tests.

A GPU test that takes too long ends the whole process, with its stack: a kernel that never ends
holds the call that waits for it, and neither a signal's handler nor an exception reaches that.

With pytest-xdist, which `make test` uses, all this is true of each worker; their notices are shown
once. Without it the tests run in one process.
"""

import faulthandler
import importlib
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

import pytest

PACKAGE_DIR = Path(__file__).resolve().parents[1] / "jax_megamoe"
NUM_SIMULATED_DEVICES = 8
# Of a GPU test with its fixtures, unless its mark `limit` says another. A wait of a kernel for
# flags that nobody raises would give up later.
GPU_LIMIT_S = 300

_notices = pytest.StashKey[list[str]]()
# Standard error as it is outside of tests, where pytest captures it.
_stderr = pytest.StashKey[TextIO]()


def asks_for_gpu(mark_expression: str) -> bool:
    """Whether a -m expression names the GPU marks other than after "not"."""
    positive = re.sub(r"\bnot\s+(multi_)?gpu\b", "", mark_expression)
    return re.search(r"\b(multi_)?gpu\b", positive) is not None


def declared_gpus(config: pytest.Config) -> int:
    """How many GPUs this run may rely on: 0 in a CPU run."""
    if not asks_for_gpu(config.option.markexpr):
        return 0
    return int(os.environ.get("JAX_MEGAMOE_GPUS", "1"))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_notices] = []
    config.stash[_stderr] = os.fdopen(os.dup(2), "w")
    if declared_gpus(config):
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = f"--xla_force_host_platform_device_count={NUM_SIMULATED_DEVICES}"
        flags = os.environ.get("XLA_FLAGS", "").split()
        # A worker inherits it.
        os.environ["XLA_FLAGS"] = " ".join([*(f for f in flags if f != flag), flag])

    # Not before: JAX reads these variables on import.
    jax = importlib.import_module("jax")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    _check_shapes(config)


def _check_shapes(config: pytest.Config) -> None:
    """Checks the shapes and dtypes in the package's annotations at every call."""
    try:
        importlib.import_module("beartype")
        jaxtyping = importlib.import_module("jaxtyping")
    except ImportError as error:
        config.stash[_notices].append(f"annotations are not checked: {error}")
        return
    jaxtyping.install_import_hook("jax_megamoe", "beartype.beartype")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_stderr].close()


def pytest_sessionstart(session: pytest.Session) -> None:
    num_declared = declared_gpus(session.config)
    if not num_declared:
        return
    if not any(PACKAGE_DIR.glob("*.so")):
        raise pytest.UsageError("GPU tests asked for, but the extension is not built: make build")
    try:
        num_visible = len(importlib.import_module("jax").devices("cuda"))
    except RuntimeError as error:
        raise pytest.UsageError(f"GPU tests asked for, but JAX finds no GPU: {error}") from error
    if num_visible < num_declared:
        raise pytest.UsageError(f"{num_declared} GPUs declared, but JAX sees {num_visible}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    num_declared = declared_gpus(config)
    left_out = [item for item in items if needed_gpus(item) > num_declared]
    for item in items:
        if item.get_closest_marker("multi_gpu"):
            item.add_marker("gpu")
    _leave_out(
        config,
        items,
        left_out,
        f"GPU tests not run: {num_declared} GPUs are declared (make test-gpu)",
    )
    if os.environ.get("JAX_MEGAMOE_TRANSFORMERS") != "1":
        left_out = [item for item in items if item.get_closest_marker("transformers")]
        notice = "tests against transformers not run: JAX_MEGAMOE_TRANSFORMERS=1 declares it"
        _leave_out(config, items, left_out, notice)


def _leave_out(
    config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item], notice: str
) -> None:
    """Takes tests out of `items` with a notice, which begins with their number."""
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
        config.stash[_notices].append(f"{len(left_out)} {notice}")


def needed_gpus(item: pytest.Item) -> int:
    """How many GPUs a test needs, from its marks."""
    if mark := item.get_closest_marker("multi_gpu"):
        return int(mark.args[0])
    return 1 if item.get_closest_marker("gpu") else 0


def limit_s(item: pytest.Item) -> float | None:
    """Seconds after which a test ends the process; None: never."""
    if mark := item.get_closest_marker("limit"):
        return mark.args[0]
    return GPU_LIMIT_S if needed_gpus(item) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    seconds = limit_s(item)
    if seconds is None:
        return (yield)
    # A thread without Python's lock waits, which the test may hold.
    faulthandler.dump_traceback_later(seconds, file=item.config.stash[_stderr], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def reject_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turns a skip into a failure: on declared hardware nothing may be left out unseen."""
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped on declared hardware: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if declared_gpus(item.config):
        reject_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if declared_gpus(collector.config):
        reject_skip(report)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker sends its notices to the process that shows them."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["notices"] = session.config.stash[_notices]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The end of a worker; one that crashed has sent nothing."""
    node.config.stash[_notices] += getattr(node, "workeroutput", {}).get("notices", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for notice in dict.fromkeys(terminalreporter.config.stash[_notices]):
        terminalreporter.write_line(f"NOTICE {notice}", yellow=True)
