"""The forward inside what JAX does to programs: the same bits under every transformation."""

import functools
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_megamoe import mega_moe, memory_plan
from tests import cases, compare
from tests.forward import SIZES, forward, num_rows_that_differ, operands, random_batch
from tests.forward_programs import BATCHES, counted, load, results
from tests.process import run_on_gpu

pytestmark = pytest.mark.gpu

PROGRAM = ("-m", "tests.forward_programs")
COMMAND_BUFFERS = {
    "default": "",
    "off": "--xla_gpu_enable_command_buffer=",
    "on for all": "--xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,COLLECTIVES --xla_gpu_graph_min_graph_size=1",
    "added": "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
}


def layer(x: Any, *rest: Any) -> Any:
    """A residual layer: the op's result enters the next one's input."""
    return x + mega_moe(x, *rest, backend="cuda")


def stacked(num_layers: int) -> Any:
    def run(x: Any, *rest: Any) -> Any:
        for _ in range(num_layers):
            x = layer(x, *rest)
        return x

    return run


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "dots_saveable"])
@pytest.mark.parametrize("scanned", [False, True])
def test_remat_and_scan(policy: str, scanned: bool) -> None:
    x, *rest = operands(random_batch(SIZES[3], "distinct"))
    want = jax.jit(stacked(4))(x, *rest)
    save = getattr(jax.checkpoint_policies, policy)
    recomputed = jax.checkpoint(layer, policy=save)

    @jax.jit
    def run(x: Any, *rest: Any) -> Any:
        if scanned:
            return jax.lax.scan(lambda x, _: (recomputed(x, *rest), None), x, length=4)[0]
        return functools.reduce(lambda x, _: recomputed(x, *rest), range(4), x)

    compare.assert_bitwise(run(x, *rest), want, "y")


def test_counts_are_counted_once_under_remat() -> None:
    batch = random_batch(SIZES[5], "invalid")
    op = functools.partial(mega_moe, backend="cuda", return_counts=True)
    _, counts = jax.jit(jax.checkpoint(op))(*operands(batch))
    np.testing.assert_array_equal(counts, cases.counts(batch))


@pytest.mark.parametrize("y_first", [False, True])
def test_donation(y_first: bool) -> None:
    """Weights and x are donated, and come back changed beside y, in either order."""
    batch = random_batch(SIZES[3], "distinct")

    def step(weights: Any, x: Any, ids: Any, w: Any) -> Any:
        y = mega_moe(x, ids, w, *weights, backend="cuda")
        changed = tuple(a * 0.5 for a in weights)
        return (y, changed, x + y) if y_first else (changed, x + y, y)

    def arguments() -> Any:
        x, ids, w, *weights = operands(batch)
        return tuple(weights), x, ids, w

    want = jax.jit(step)(*arguments())
    donated = arguments()
    found = jax.jit(step, donate_argnums=(0, 1))(*donated)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        compare.assert_bitwise(a, b)
    assert all(a.is_deleted() for a in (*donated[0], donated[1]))
    assert not any(a.is_deleted() for a in donated[2:])


def test_many_layers_share_one_workspace() -> None:
    size = SIZES[5]
    arrays = operands(random_batch(size, "distinct"))
    sizes: dict[str, Any] = dict(zip("TKEHI", size, strict=True))
    workspace = memory_plan(**sizes).workspace_bytes

    def temp_bytes(num_layers: int) -> int:
        analysis = jax.jit(stacked(num_layers)).lower(*arrays).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    few, many = temp_bytes(2), temp_bytes(64)
    assert few >= workspace
    assert many < few + workspace // 2


def test_three_configurations_mixed_leave_no_memory_behind() -> None:
    device = jax.devices()[0]
    batches = [random_batch(size, "duplicates") for size in (SIZES[3], SIZES[6], SIZES[7])]
    want = [np.asarray(forward(*operands(b))[0]) for b in batches]

    def once() -> None:
        """A program of all three, made, run and thrown away."""
        arrays = [operands(b) for b in batches]
        program = jax.jit(lambda *all_: [mega_moe(*a, backend="cuda") for a in all_])
        for y, right in zip(program(*arrays), want, strict=True):
            compare.assert_bitwise(y, right, "y")

    in_use = []
    for _ in range(21):
        once()
        in_use.append((device.memory_stats() or {})["bytes_in_use"])
    assert max(in_use) - in_use[0] <= 2**23


def test_two_threads_at_once() -> None:
    """Each of its own size, 1,000 calls, their dispatches interleaved."""
    batches = [random_batch(*BATCHES[0]), random_batch(*BATCHES[2])]
    arrays = [operands(b) for b in batches]
    want = [forward(*a)[0] for a in arrays]
    barrier = threading.Barrier(2)
    wrong: list[list[int]] = [[], []]

    def call(i: int) -> None:
        barrier.wait()
        found = [num_rows_that_differ(forward(*arrays[i])[0], want[i]) for _ in range(1000)]
        wrong[i] = [int(n) for n in found]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [[0] * 1000] * 2


def test_first_use_from_two_threads() -> None:
    result = run_on_gpu(*PROGRAM, "first_use_from_two_threads")
    assert result.returncode == 0, result.stderr
    assert counted(result.stdout) == {"calls": 40}


def test_a_fresh_process_finds_the_same_bits(tmp_path: Path) -> None:
    path = str(tmp_path / "y.npz")
    result = run_on_gpu(*PROGRAM, "save", path)
    assert result.returncode == 0, result.stderr
    assert counted(result.stdout) == {"batches": len(BATCHES)}
    for found, right in zip(load(path), results(), strict=True):
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("flags", sorted(COMMAND_BUFFERS))
def test_thousand_steps_with_command_buffers(flags: str) -> None:
    result = run_on_gpu(*PROGRAM, "steps", "1000", XLA_FLAGS=COMMAND_BUFFERS[flags])
    assert result.returncode == 0, result.stderr
    assert counted(result.stdout) == {"steps": 1000}
