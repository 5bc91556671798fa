"""The kernels on an emulated machine, for tests without a GPU.

tests/emulator/ says what is emulated and what is not. The kernels of both passes get the plan of
`plan.make_plan`; those of the plan run on their own. With ranks=R a batch is that of R ranks, which
have equal shares of tokens and experts and whose kernels run at once, on a device each; results are
those of all, one rank behind another.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
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
from jax_megamoe._arrays import code_row_bytes
from jax_megamoe._call_arrays import gate_up_array, peer_array_bytes, trace_result
from jax_megamoe.activation import gated_unit
from jax_megamoe.config import POOL_FACTOR, ClampedSwiGLU, Dims
from jax_megamoe.plan import (
    MAX_STEPS,
    Plan,
    Step,
    backward_steps,
    forward_steps,
    make_plan,
    plan_shapes,
)
from jax_megamoe.quantization import QuantizedExperts
from tests.cases import BF16, F32, Batch
from tests.failures import FAILED, Failures
from tests.gated import Biases

ROOT = Path(__file__).resolve().parents[1]
RANKS = ROOT / "tests" / "ranks"
# The ranks on one GPU; made with the test build.
ONE_GPU = ROOT / "build" / "one_gpu"
# Of an H200, a rank's of so many; some are left free.
MULTIPROCESSORS = {1: 132, 2: 64, 4: 32, 8: 16}
# The emulator's programs.
BUILT = ROOT / "build" / "emulator"
# By program, what it needs of cuda/host.
HOST_SOURCES = {
    "main": (
        *("backward", "backward_fp8", "forward", "forward_fp8", "layer"),
        *("peer_arrays", "tensor_map"),
    ),
    "peers": (
        *("exchange", "fault", "nccl", "peer_processes", "peer_records", "peers"),
        *("process", "process_watch"),
    ),
    "plan": (),
    "watch": ("process", "process_watch"),
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
def program(name: str) -> Path:
    """Compiles a program of the emulator, unless one of the same sources and options is in
    `BUILT`; skips the test without a compiler or CUDA's headers, unless the machine declares them
    (JAX_MEGAMOE_NVCC=1)."""
    compiler, headers = shutil.which("g++"), _cuda_headers()
    if not compiler or not headers:
        reason = "the emulated kernels need g++ and CUDA's headers"
        assert os.environ.get("JAX_MEGAMOE_NVCC") != "1", reason
        pytest.skip(reason)
    emulator = ROOT / "tests" / "emulator"
    sources = [emulator / f"{name}.cc", emulator / "machine.cc"]
    sources += (
        [emulator / "general.cc", emulator / "fp8.cc", RANKS / "calls.cc"] if name == "main" else []
    )
    sources += [ROOT / "cuda" / "host" / f"{source}.cc" for source in HOST_SOURCES[name]]
    includes = [f"-I{emulator}", f"-I{RANKS}", f"-I{ROOT / 'cuda'}", f"-isystem{headers}"]
    command = [compiler, "-std=c++20", "-O2", "-DMEGAMOE_FAULTS", *includes]
    # All that the compiler reads, with the paths of its own headers, which say its version.
    preprocessed = _compiled([*command, *map(str, sources), "-E"])
    key = hashlib.sha256(repr(command).encode() + preprocessed).hexdigest()[:16]
    program = BUILT / f"{name}-{key}"
    BUILT.mkdir(parents=True, exist_ok=True)
    # Of several processes one compiles, and the others wait for it.
    with (BUILT / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _compile(command, sources, program)
    return program


def _compile(command: Sequence[str], sources: Sequence[Path], program: Path) -> None:
    """Side by side, as many as there are cores; `program` is there when it is whole."""
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        # Numbered: sources of several folders have the same name.
        objects = [Path(folder) / f"{i}.o" for i in range(len(sources))]
        commands = [
            [*command, "-c", str(source), "-o", str(to)]
            for source, to in zip(sources, objects, strict=True)
        ]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_compiled, commands))
        unfinished = Path(folder) / program.name
        _compiled([*command, *map(str, objects), "-o", str(unfinished)])
        unfinished.rename(program)


def _compiled(command: Sequence[str]) -> bytes:
    """What a compiler prints."""
    result = subprocess.run(command, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()[-4000:]
    return result.stdout


def _output(program: Path, data: bytes) -> bytes:
    """What a program writes when it gets the data."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / end for end in ("in", "out")]
        paths[0].write_bytes(data)
        run = subprocess.run([program, *paths], capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, f"{run.returncode}: {run.stderr[-2000:]}"
        return paths[1].read_bytes()


# The same data give the same output, orders of events included; several tests compare with it.
_emulated_output = functools.lru_cache(maxsize=16)(_output)


def _bytes(arrays: Iterable[np.ndarray]) -> bytes:
    return b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)


def _split(raw: bytes, results: list[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
    found = []
    for shape, dtype in results:
        size = int(np.prod(shape)) * dtype.itemsize
        found.append(np.frombuffer(raw[:size], dtype).reshape(shape))
        raw = raw[size:]
    assert raw == b""
    return found


I64, U8 = np.dtype(np.int64), np.dtype(np.uint8)
# Words that the plan clears on the side.
NUM_CLEARED = 1000
# What memory holds before.
GARBAGE = 0x7B7B7B7B


def plan(
    expert_idx: np.ndarray, dims: Dims, rank: int, steps: Sequence[Step], **options: Any
) -> Plan:
    """As `plan.make_plan`, by the kernels of the plan; options as for `plans`."""
    return plans(expert_idx, dims, rank, steps, num_plans=1, **options)[0]


def plans(
    expert_idx: np.ndarray,
    dims: Dims,
    rank: int,
    steps: Sequence[Step],
    *,
    num_plans: int,
    seed: int = 0,
    failed_pass: int = -1,
) -> list[Plan]:
    """What the arrays of the plan hold in each of the first passes of a call.

    Args:
      seed: of the order of warps and blocks.
      failed_pass: before which a wait of the call has given up, in 0 that for the routes; -1: none.
    """
    header = [dims.T, dims.K, dims.E, dims.R, rank, len(steps), seed, NUM_CLEARED, failed_pass]
    header += [num_plans, dims.pool_routes]
    for step in steps:
        header += [step.tiles_m or 0, step.tiles_n, step.lag]
    header += [0] * 3 * (MAX_STEPS - len(steps))
    shapes = [*plan_shapes(dims, steps), (NUM_CLEARED,)] * num_plans
    raw = _emulated_output(program("plan"), _bytes((np.array(header, np.int32), expert_idx)))
    arrays = _split(raw, [(shape, np.dtype(np.int32)) for shape in shapes])
    found = []
    for p in range(num_plans):
        *of_pass, cleared = arrays[p * len(arrays) // num_plans :][: len(arrays) // num_plans]
        found.append(Plan(*of_pass))
        # With the plan of every pass, and only with it.
        is_made = (failed_pass <= 0 or p < failed_pass) and p < found[-1].totals[2]
        assert not cleared.any() if is_made else np.all(cleared == GARBAGE)
    return found


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of either pass; its results are those of the custom call.

    Attributes:
      float_gradients: the weights' gradients come in float32; else in bf16, unless there may be
        several passes.
      trainable: there are such gradients.
      activation: as of `MegaMoEConfig`. biases: of all experts, or None.
      keep: the kernels of save="gate_up". kept: what a backward takes of its forward.
      launches: as for the custom calls; None: fused. trace: likewise.
      quantized: with precision="fp8_block", the weights as `quantize_expert_weights` gives them;
        the second result of a forward on one rank is then x as it was quantised, in the rows of
        cuda/shared/fp8.h.
    """

    batch: Batch
    is_backward: bool = False
    float_gradients: bool = False
    trainable: bool = True
    keep: bool = False
    kept: np.ndarray | None = None
    launches: tuple[int, ...] | None = None
    trace: bool = False
    activation: str | ClampedSwiGLU = "swiglu"
    biases: Biases | None = None
    quantized: QuantizedExperts | None = None

    def steps(self, dims: Dims) -> tuple[Step, ...]:
        if self.is_backward:
            return backward_steps(dims, trainable_experts=self.trainable)
        return forward_steps(dims)

    def results(self, dims: Dims) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Of one rank, in their order."""
        results = [((dims.T, dims.H), BF16)]
        if self.is_backward:
            results.append(((dims.T, dims.K), F32))
        elif self.quantized is not None and dims.R == 1:
            results.append(((dims.T, code_row_bytes(dims.H)), U8))
        if self.is_backward and self.trainable:
            dtype = F32 if self.float_gradients or dims.max_passes > 1 else BF16
            weights = (self.batch.w_gate, self.batch.w_up, self.batch.w_down)
            results += [((dims.experts_per_rank, *w.shape[1:]), dtype) for w in weights]
            biases = self.biases or ()
            results += [((dims.experts_per_rank, b.shape[1]), F32) for b in biases]
        others = [gate_up_array(dims)] if self.keep else []
        others += [trace_result(dims, self.steps(dims))] if self.trace else []
        return [*results, *((array.shape, array.dtype) for array in others)]

    def header(self, dims: Dims) -> bytes:
        launches = self.launches
        if launches is None:
            launches = _ffi.BACKWARD_FUSED if self.is_backward else _ffi.FUSED
        steps = self.steps(dims)
        keeps = self.keep or self.kept is not None
        trace = trace_result(dims, steps).shape[0] if self.trace else 0
        numbers = [self.is_backward, len(steps), self.float_gradients or dims.max_passes > 1]
        numbers += [keeps, len(launches), trace, self.biases is not None]
        unit = np.array(gated_unit(self.activation), F32)
        numbers += [*unit.view(np.int32).tolist(), self.quantized is not None]
        for of_steps in zip(*((s.tiles_m or 0, s.tiles_n, s.lag) for s in steps), strict=True):
            numbers += [*of_steps, *[0] * (MAX_STEPS - len(steps))]
        parts = [*launches, *[0] * (8 - len(launches))]
        return np.array(numbers, np.int32).tobytes() + np.array(parts, np.int64).tobytes()

    def operands(self) -> list[np.ndarray]:
        """Of all ranks, in their order."""
        b = self.batch
        operands = [b.expert_idx.astype(np.int32), b.expert_weight.astype(F32), b.x.astype(BF16)]
        operands += self._weights()
        operands += [b.dy.astype(BF16)] if self.is_backward else []
        operands += [bias.astype(F32) for bias in self.biases or ()]
        return operands if self.kept is None else [*operands, self.kept]

    def _weights(self) -> list[Any]:
        b, quantized = self.batch, self.quantized
        if quantized is None:
            return [a.astype(BF16) for a in (b.w_gate, b.w_up, b.w_down)]
        if not self.is_backward:
            return [a for m in quantized for a in (m.transposed, m.scales)]
        # No product of the backward sums over the rows of w_down.
        gate, up, down = quantized
        return [*gate, *up, down.natural, down.scales]


def forward(
    batch: Batch,
    *,
    ranks: int = 1,
    launches: tuple[int, ...] | None = None,
    activation: str | ClampedSwiGLU = "swiglu",
    biases: Biases | None = None,
    **options: Any,
) -> np.ndarray:
    """y [R T, H], bf16; options as for `run`."""
    call = Call(batch, launches=launches, activation=activation, biases=biases)
    return run([call], ranks=ranks, **options)[0][0]


def forward_keeping(
    batch: Batch,
    *,
    ranks: int = 1,
    launches: tuple[int, ...] | None = None,
    activation: str | ClampedSwiGLU = "swiglu",
    biases: Biases | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """y and what save="gate_up" keeps, bf16 [R P, 2I]; options as for `run`."""
    call = Call(batch, keep=True, launches=launches, activation=activation, biases=biases)
    ((y, gate_up),) = run([call], ranks=ranks, **options)
    return y, gate_up


def forward_fp8(
    batch: Batch,
    quantized: QuantizedExperts,
    *,
    ranks: int = 1,
    keep: bool = False,
    launches: tuple[int, ...] | None = None,
    trace: bool = False,
    **options: Any,
) -> list[np.ndarray]:
    """y, on one rank the quantised x and, with `keep`, what save="gate_up" keeps; options as for
    `run`."""
    call = Call(batch, keep=keep, launches=launches, trace=trace, quantized=quantized)
    return run([call], ranks=ranks, **options)[0]


def backward(
    batch: Batch,
    *,
    ranks: int = 1,
    weight_dtype: np.dtype = BF16,
    trainable: bool = True,
    gate_up: np.ndarray | None = None,
    launches: tuple[int, ...] | None = None,
    activation: str | ClampedSwiGLU = "swiglu",
    biases: Biases | None = None,
    **options: Any,
) -> list[np.ndarray]:
    """The gradients as the custom call gives them; options as for `run`.

    gate_up: what `forward_keeping` kept; None: g and u are computed again.
    """
    call = Call(
        batch,
        is_backward=True,
        float_gradients=weight_dtype == F32,
        trainable=trainable,
        kept=gate_up,
        launches=launches,
        activation=activation,
        biases=biases,
    )
    return run([call], ranks=ranks, **options)[0]


def backward_fp8(
    batch: Batch,
    quantized: QuantizedExperts,
    *,
    ranks: int = 1,
    weight_dtype: np.dtype = BF16,
    trainable: bool = True,
    gate_up: np.ndarray | None = None,
    launches: tuple[int, ...] | None = None,
    trace: bool = False,
    **options: Any,
) -> list[np.ndarray]:
    """As `backward`; gate_up: what `forward_fp8` kept."""
    call = Call(
        batch,
        is_backward=True,
        float_gradients=weight_dtype == F32,
        trainable=trainable,
        kept=gate_up,
        launches=launches,
        trace=trace,
        quantized=quantized,
    )
    return run([call], ranks=ranks, **options)[0]


def run(calls: Sequence[Call], *, ranks: int, **options: Any) -> list[list[np.ndarray]]:
    """Runs calls of the same sizes, one after another on every rank, in the same memory: a rank may
    begin one while others end the one before.

    Args:
      options: as for `_run`.

    Returns:
      For each call, each result of all ranks, one rank behind another.
    """
    results, failed = _run(calls, ranks, **options)
    assert options.get("failed_ranks") or not failed.epochs.any()
    return results


def failed_ranks(calls: Sequence[Call], *, ranks: int, **options: Any) -> list[int]:
    """The ranks of which a wait has given up; options as for `_run`."""
    return np.flatnonzero(failures(calls, ranks=ranks, **options).epochs).tolist()


def failures(calls: Sequence[Call], *, ranks: int, **options: Any) -> Failures:
    """What has come of the waits; options as for `_run`."""
    return _run(calls, ranks, **options)[1]


def dims_of(batch: Batch, ranks: int, pool_factor: float = POOL_FACTOR) -> Dims:
    (tokens, hidden), choices = batch.x.shape, batch.expert_idx.shape[1]
    experts, _, intermediate = batch.w_gate.shape
    assert tokens % ranks == 0 and experts % ranks == 0
    sizes = {"T": tokens // ranks, "K": choices, "E": experts, "H": hidden, "I": intermediate}
    return Dims(**sizes, R=ranks, pool_factor=pool_factor)


def _run(
    calls: Sequence[Call],
    ranks: int,
    *,
    pool_factor: float = POOL_FACTOR,
    multiprocessors: int = 4,
    one_gpu: bool = False,
    seed: int = 0,
    failed_ranks: Sequence[int] = (),
    deadline: int = 0,
    stall: tuple[int, int] = (-1, -1),
    combine_dtype: str = "float32",
    ended_ranks: Sequence[int] = (),
) -> tuple[list[list[np.ndarray]], Failures]:
    """What `run` and `failures` return.

    Args:
      pool_factor: as of `MegaMoEConfig`.
      multiprocessors: of each rank; the blocks of its kernel, all resident.
      one_gpu: not on the emulated machine but on a GPU, whose multiprocessors the ranks share.
      seed: of the order in which everything happens; on a GPU, of delays.
      failed_ranks: their waits give up soon in every call, as after the first one that did.
      deadline: after which a wait gives up, in turns of the machine, 0: never; on a GPU in ms, 0:
        10 s.
      stall: how many calls rank 0 makes, -1: all, and of the next one kernels before it stalls; -1:
        it shares no inputs.
      combine_dtype: as in `MegaMoEConfig`.
      ended_ranks: which the host has found to be gone.
    """
    dims = dims_of(calls[0].batch, ranks, pool_factor)
    header = [len(calls), dims.R, dims.T, dims.K, dims.E, dims.H, dims.I, dims.num_blocks]
    header += [dims.pool_routes, multiprocessors, seed, _fault]
    header += [sum(1 << rank for rank in failed_ranks), deadline]
    has_codes = any(call.quantized is not None for call in calls)
    precision = "fp8_block" if has_codes else "bf16"
    header += [peer_array_bytes(dims, combine_dtype, precision), combine_dtype == "bfloat16"]
    header += [sum(1 << rank for rank in ended_ranks), not one_gpu, has_codes, *stall]
    arrays: list[np.ndarray] = [np.array(header, np.int32)]
    results = []
    for call in calls:
        arrays.append(np.frombuffer(call.header(dims), np.uint8))
        ids = call.batch.expert_idx.astype(np.int32).reshape(dims.R, dims.T, dims.K)
        operands = call.operands()
        for rank in range(dims.R):
            for pass_idx in range(0 if one_gpu else dims.max_passes):
                arrays += make_plan(ids, dims, rank, call.steps(dims), pass_idx)
            arrays += [np.split(a, dims.R)[rank] for a in operands]
        results.append(call.results(dims))
    shapes = [result for of_call in results for result in of_call * dims.R]
    data = _bytes(arrays)
    raw = _output(ONE_GPU, data) if one_gpu else _emulated_output(program("main"), data)
    *found, failed, run_ns = _split(raw, [*shapes, ((dims.R,), FAILED), ((), I64)])
    found_by_call = []
    for of_call in results:
        own, found = found[: len(of_call) * dims.R], found[len(of_call) * dims.R :]
        by_result = [own[i :: len(of_call)] for i in range(len(of_call))]
        found_by_call.append([np.concatenate(of_ranks) for of_ranks in by_result])
    return found_by_call, Failures(failed["epoch"], failed["record"], float(run_ns) * 1e-9)
