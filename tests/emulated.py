"""The kernels on an emulated machine, for tests without a GPU.

tests/emulator/ says what is emulated and what is not. The kernels of both passes get the plan of
`plan.make_plan`; those of the plan run on their own. With ranks=R a batch is that of R ranks, which
have equal shares of tokens and experts and whose kernels run at once, on a device each; results are
those of all, one rank behind another.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_megamoe import _ffi
from jax_megamoe.config import Dims
from jax_megamoe.memory import gate_up_array, peer_array_bytes
from jax_megamoe.plan import (
    MAX_STEPS,
    Plan,
    Step,
    backward_steps,
    forward_steps,
    make_plan,
    plan_shapes,
    plan_sizes,
)
from tests.cases import BF16, F32, Batch

ROOT = Path(__file__).resolve().parents[1]
# By program, what it needs of cuda/host.
HOST_SOURCES = {
    "main": ("backward", "forward", "layer", "peer_arrays", "tensor_map"),
    "peers": ("exchange", "nccl", "peer_records", "peers"),
    "plan": (),
}


def _cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1]]
    for home in filter(None, (*homes, "/usr/local/cuda")):
        if (Path(home) / "include" / "cuda_runtime_api.h").exists():
            return Path(home) / "include"
    return None


# That the kernels have, see cuda/pipeline/seeded_faults.h; 0: none.
_fault = 0


@contextlib.contextmanager
def with_fault(number: int) -> Iterator[None]:
    """The calls inside have a seeded fault."""
    global _fault
    _fault = number
    try:
        yield
    finally:
        _fault = 0


@functools.cache
def _program(name: str) -> Path:
    """Compiles a program of the emulator, once a process; skips the test without a compiler or
    CUDA's headers, unless the machine declares them (JAX_MEGAMOE_NVCC=1)."""
    compiler, headers = shutil.which("g++"), _cuda_headers()
    if not compiler or not headers:
        reason = "the emulated kernels need g++ and CUDA's headers"
        assert os.environ.get("JAX_MEGAMOE_NVCC") != "1", reason
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp())
    emulator = ROOT / "tests" / "emulator"
    sources = [emulator / f"{name}.cc", emulator / "machine.cc"]
    sources += [ROOT / "cuda" / "host" / f"{source}.cc" for source in HOST_SOURCES[name]]
    includes = [f"-I{emulator}", f"-I{ROOT / 'cuda'}", f"-isystem{headers}"]
    command = [compiler, "-std=c++20", "-O2", "-DMEGAMOE_FAULTS", *includes, *map(str, sources)]
    program = folder / name
    result = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return program


def _output(name: str, arrays: Iterable[np.ndarray]) -> bytes:
    """What a program writes when it gets the arrays."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / end for end in ("in", "out")]
        paths[0].write_bytes(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays))
        command = [_program(name), *paths]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, f"{run.returncode}: {run.stderr[-2000:]}"
        return paths[1].read_bytes()


def _split(raw: bytes, results: list[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
    found = []
    for shape, dtype in results:
        size = int(np.prod(shape)) * dtype.itemsize
        found.append(np.frombuffer(raw[:size], dtype).reshape(shape))
        raw = raw[size:]
    assert raw == b""
    return found


# Words that the plan clears on the side.
NUM_CLEARED = 1000


def plan(
    expert_idx: np.ndarray, dims: Dims, rank: int, steps: Sequence[Step], *, seed: int = 0
) -> Plan:
    """As `plan.make_plan`, by the kernels of the plan; seed: of the order of warps and blocks."""
    header = [dims.T, dims.K, dims.E, dims.R, rank, len(steps), seed, NUM_CLEARED]
    for step in steps:
        header += [step.tiles_m or 0, step.tiles_n, step.lag]
    header += [0] * 3 * (MAX_STEPS - len(steps))
    shapes = [*plan_shapes(dims, steps), (NUM_CLEARED,)]
    raw = _output("plan", (np.array(header, np.int32), expert_idx))
    *arrays, cleared = _split(raw, [(shape, np.dtype(np.int32)) for shape in shapes])
    assert not cleared.any()
    return Plan(*arrays)


def peers(num_ranks: int, *arguments: str) -> list[list[str]]:
    """What each call of each rank returned, [step][rank]; the arguments are those of
    tests/emulator/peers.cc."""
    command = [_program("peers"), str(num_ranks), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, f"{run.returncode}: {run.stderr[-2000:]}"
    texts = [line.split(" ", 2)[2] for line in run.stdout.splitlines()]
    return [texts[i : i + num_ranks] for i in range(0, len(texts), num_ranks)]


def forward(batch: Batch, *, ranks: int = 1, **options: Any) -> np.ndarray:
    """y [R T, H], bf16; options as for `_run`."""
    dims = _dims_of(batch, ranks)
    (y,) = _run(batch, dims, forward_steps(dims), [((dims.T, dims.H), BF16)], False, **options)
    return y


def forwards(batches: Sequence[Batch], *, ranks: int, **options: Any) -> list[np.ndarray]:
    """y [R T, H] of each of several calls; a rank may begin one while others end the one before."""
    dims = _dims_of(batches[0], ranks)
    found = _run_all(
        batches, dims, forward_steps(dims), [((dims.T, dims.H), BF16)], False, **options
    )
    return [y for (y,) in found]


def backwards(batches: Sequence[Batch], *, ranks: int, **options: Any) -> list[list[np.ndarray]]:
    """The gradients of each of several calls, as `forwards`."""
    dims = _dims_of(batches[0], ranks)
    results = [((dims.T, dims.H), BF16), ((dims.T, dims.K), F32)]
    weights = (batches[0].w_gate, batches[0].w_up, batches[0].w_down)
    results += [((dims.experts_per_rank, *w.shape[1:]), BF16) for w in weights]
    return _run_all(batches, dims, backward_steps(dims), results, True, **options)


def forward_keeping(
    batch: Batch, *, ranks: int = 1, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """y and what save="gate_up" keeps, bf16 [R P, 2I]; options as for `_run`."""
    dims = _dims_of(batch, ranks)
    kept = gate_up_array(dims)
    results = [((dims.T, dims.H), BF16), (kept.shape, kept.dtype)]
    y, gate_up = _run(batch, dims, forward_steps(dims), results, False, keep=True, **options)
    return y, gate_up


def backward(
    batch: Batch,
    *,
    ranks: int = 1,
    weight_dtype: np.dtype = BF16,
    trainable: bool = True,
    gate_up: np.ndarray | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """The gradients as the custom call gives them; options as for `_run`.

    gate_up: what `forward_keeping` kept; None: g and u are computed again.
    """
    dims = _dims_of(batch, ranks)
    results = [((dims.T, dims.H), BF16), ((dims.T, dims.K), F32)]
    if trainable:
        weights = (batch.w_gate, batch.w_up, batch.w_down)
        results += [((dims.experts_per_rank, *w.shape[1:]), weight_dtype) for w in weights]
    steps = backward_steps(dims, trainable_experts=trainable)
    kept = {"keep": gate_up is not None, "kept": () if gate_up is None else (gate_up,)}
    return _run(batch, dims, steps, results, True, **kept, **options)


def _dims_of(batch: Batch, ranks: int) -> Dims:
    (tokens, hidden), choices = batch.x.shape, batch.expert_idx.shape[1]
    experts, _, intermediate = batch.w_gate.shape
    assert tokens % ranks == 0 and experts % ranks == 0
    return Dims(T=tokens // ranks, K=choices, E=experts, R=ranks, H=hidden, I=intermediate)


def _run(batch: Batch, *how: Any, **options: Any) -> list[np.ndarray]:
    """The results of one call, as `_run_all`."""
    return _run_all([batch], *how, **options)[0]


def _run_all(
    batches: Sequence[Batch],
    dims: Dims,
    steps: Sequence[Step],
    results: list[tuple[tuple[int, ...], np.dtype]],
    is_backward: bool,
    *,
    keep: bool = False,
    kept: tuple[np.ndarray, ...] = (),
    launches: tuple[int, ...] | None = None,
    multiprocessors: int = 4,
    seed: int = 0,
    has_failed: bool = False,
) -> list[list[np.ndarray]]:
    """Runs calls of the same sizes, one after another on every rank.

    Args:
      results: of a call of one rank.
      keep: the kernels of save="gate_up". kept: what they take.
      launches: as for the custom calls; None: fused.
      multiprocessors: the blocks of a device's kernel, all resident.
      seed: of the order in which everything happens.
      has_failed: every wait gives up soon, as after the first one of a call that did.

    Returns:
      For each call, each result of all ranks, one rank behind another.
    """
    if launches is None:
        launches = _ffi.BACKWARD_FUSED if is_backward else _ffi.FUSED
    is_float = results[-1][1] == F32
    header = [len(batches), dims.R, dims.T, dims.K, dims.E, dims.H, dims.I, dims.num_blocks]
    header += plan_sizes(dims, steps)
    header += [is_backward, len(steps), is_float, keep]
    header += [multiprocessors, seed, has_failed, _fault, peer_array_bytes(dims), len(launches)]
    header += [*launches, *[0] * (8 - len(launches))]
    arrays = [np.array(header, np.int32)]
    for batch in batches:
        ids = batch.expert_idx.astype(np.int32)
        operands = [ids, batch.expert_weight.astype(F32), batch.x.astype(BF16)]
        operands += [a.astype(BF16) for a in (batch.w_gate, batch.w_up, batch.w_down)]
        operands += [batch.dy.astype(BF16), *kept] if is_backward else []
        for rank in range(dims.R):
            plan = make_plan(ids.reshape(dims.R, dims.T, dims.K), dims, rank, steps)
            arrays += [*plan, *(np.split(a, dims.R)[rank] for a in operands)]
    found = _split(_output("main", arrays), results * dims.R * len(batches))
    of_call = len(results) * dims.R
    calls = [found[i : i + of_call] for i in range(0, len(found), of_call)]
    return [[np.concatenate(c[i :: len(results)]) for i in range(len(results))] for c in calls]
