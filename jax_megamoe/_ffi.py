"""The custom calls of the CUDA backend: their registration, their operands and their results.

Lowering a call needs neither a GPU nor the extension module; running one needs both.
"""

import atexit
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import threading
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe._call_arrays import backward_results, forward_results, plan_results, trace_result
from jax_megamoe.activation import gated_unit
from jax_megamoe.config import WAIT_DEADLINE_S, Dims, MegaMoEConfig
from jax_megamoe.memory import ArraySize, check_backward_fits, check_fits, cuda_devices
from jax_megamoe.plan import Plan, Step, backward_steps, forward_steps
from jax_megamoe.quantization import QuantizedExperts, QuantizedMatrix

PLAN = "jax_megamoe_plan"
FORWARD = "jax_megamoe_forward"
FORWARD_FP8 = "jax_megamoe_forward_fp8"
BACKWARD = "jax_megamoe_backward"
BACKWARD_FP8 = "jax_megamoe_backward_fp8"
PEER_PROBE = "jax_megamoe_peer_probe"

# Of the arrays of the experts, those before the biases.
NUM_WEIGHTS = 3

AxisName = str | tuple[str, ...] | None

# What cuda/host/device.cc asks of a device, too.
KERNEL_COMPUTE_CAPABILITY = "9.0"
# The generations before it that people train on.
_OLDER = {"8.0": "Ampere", "8.6": "Ampere", "8.7": "Ampere", "8.9": "Ada"}

# The parts of each launch, as in cuda/shared/part.h. Forward: dispatch, gate_up, down, combine,
# finish, which is nothing on one rank.
FUSED = (1 | 2 | 4 | 8 | 512,)
UNFUSED = (1, 2, 4, 8, 512)
# Backward: dispatch, dgrad_down, dgrad_gate_up, combine, finish, wgrad_down, wgrad_gate_up.
BACKWARD_FUSED = (1 | 32 | 64 | 8 | 512 | 128 | 256,)
BACKWARD_UNFUSED = (1, 32, 64, 8, 512, 128, 256)


@functools.cache
def extension() -> tuple[ModuleType | None, str]:
    """The extension module and "", or None and why there is none. Creates no CUDA context.

    JAX_MEGAMOE_EXTENSION names another build of it than "_cuda"; a test build is one.
    """
    name = os.environ.get("JAX_MEGAMOE_EXTENSION", "_cuda")
    try:
        return importlib.import_module(f"jax_megamoe.{name}"), ""
    except ImportError as error:
        return None, f"the CUDA part of jax_megamoe is not in this installation ({error})"


def missing() -> str:
    """What this process lacks to run the kernels; "" for nothing."""
    module, reason = extension()
    if module is None:
        return reason
    devices = cuda_devices()
    others = [d for d in devices if d.compute_capability != KERNEL_COMPUTE_CAPABILITY]
    if devices and not others:
        return ""
    found = "JAX sees no CUDA device"
    if others:
        older = older_generation(others[0].compute_capability)
        found = f"JAX sees a {others[0].device_kind}{older} too"
    return f"the kernels run on H100, H200 and GH200 only; {found}"


def older_generation(compute_capability: str) -> str:
    """ " (Ampere)" or " (Ada)" for a device of these; "" for any other."""
    name = _OLDER.get(compute_capability)
    return f" ({name})" if name else ""


_registration_lock = threading.Lock()


@functools.cache
def _register_once() -> None:
    module, _ = extension()
    if module is not None:
        for target, stages in module.registrations().items():
            jax.ffi.register_ffi_target(target, stages, platform="CUDA")
        # Runs before what JAX does at exit, which it registered on import.
        atexit.register(_at_exit, module, os.getpid())


def _at_exit(module: ModuleType, pid: int) -> None:
    """Not in a forked child, which has neither the threads nor the calls of its parent."""
    if os.getpid() == pid:
        module.at_exit()


def register() -> None:
    """Registers the targets of the extension, if there is one; only the first call does work."""
    with _registration_lock:
        _register_once()


def check_faults() -> None:
    """Raises what calls of this process have failed with and no later call has raised yet.

    A call of the kernels that fails, since a GPU of its expert group does not come or its process
    has ended, makes the next call of that group raise; the results in between are void. The last
    call has no next one: behind the end of a training loop, and before a checkpoint is written, do

        jax.block_until_ready(state)
        jax_megamoe.check_faults()

    It costs a few microseconds and waits for nothing, so it sees only calls whose results are
    ready. What nobody has raised when the interpreter exits is printed on standard error.

    Raises:
      RuntimeError: naming the rank that waited and the one it waited for, with its process and GPU,
        the phase, expert, block and epoch. The group of the call refuses all later ones.
    """
    module, _ = extension()
    texts = module.take_faults() if module is not None else []
    if texts:
        raise RuntimeError("jax_megamoe: " + "; and ".join(texts))


def plan(
    expert_idx: jax.Array, dims: Dims, rank: int, steps: Sequence[Step], pass_idx: int = 0
) -> Plan:
    """Runs the plan kernels; their arrays are those of `plan.make_plan`, as JAX arrays.

    Args:
      expert_idx: int32 [R, T, K], the routing of all ranks.
      rank: static; the rank whose plan it is.
      pass_idx: static; how many passes come before, whose plans are made, too.

    Raises:
      RuntimeError: without the extension.
      ValueError: for dimensions that a plan cannot hold.
    """
    results = _results(expert_idx, plan_results(dims, steps))
    module, reason = extension()
    if module is None:
        raise RuntimeError(reason)
    register()
    *arrays, _scratch = jax.ffi.ffi_call(PLAN, results)(
        expert_idx,
        experts=np.int64(dims.E),
        rank=np.int64(rank),
        pool_routes=np.int64(dims.pool_routes),
        num_plans=np.int64(pass_idx + 1),
        steps=_step_fields(steps),
    )
    return Plan(*arrays)


def _step_fields(steps: Sequence[Step]) -> np.ndarray:
    fields = [(step.tiles_m or 0, step.tiles_n, step.lag) for step in steps]
    return np.array(fields, np.int64).reshape(-1)


def forward_call(
    x: jax.Array,
    expert_idx: jax.Array,
    expert_weight: jax.Array,
    *experts: jax.Array,
    dims: Dims,
    config: MegaMoEConfig,
    axis_name: AxisName,
    quantized: QuantizedExperts | None = None,
    keep_gate_up: bool = False,
    launches: Sequence[int] = FUSED,
    deadline_s: float = WAIT_DEADLINE_S,
    trace: bool = False,
) -> tuple[jax.Array, ...]:
    """The forward custom call of one rank.

    Args: as `reference.forward`; what is not bfloat16 yet is cast to it, expert_weight and biases
      to float32.
      axis_name: the mesh axis or axes of the R ranks; None outside shard_map, when R is 1.
      quantized: with config.precision "fp8_block", what the kernels multiply with instead of the
        weights among `experts`; only for "swiglu" without biases.
      keep_gate_up: also returns what the backward then needs not compute again. The kernels are
        others than without.
      launches: the parts that each launch of the kernel does, see cuda/shared/part.h; UNFUSED
        does the same work one part at a time.
      deadline_s: how long a wait inside the kernel may last; then the kernel ends, and the next
        call on the device raises.
      trace: also records when each piece of the work ran and, with several ranks, what crossed
        NVLink.

    Returns:
      y [T, H] in the dtype of x and counts int32 [E/R], the rows of each local expert; with
      keep_gate_up also g and u of every pool row, bf16 [P, 2I], as cuda/kernel/gate_up.cuh lays
      them out, pads and rows that no expert has 0; with trace also the TraceRecords
      of cuda/shared/trace.h, int32 [1 + capacity, 4], with several ranks and its PeerTraffic.

    Raises:
      MemoryError, ValueError: as `memory.check_fits`.
    """
    register()
    expert_bias = len(experts) > NUM_WEIGHTS
    check_fits(dims, keep_gate_up, expert_bias, config.precision)
    results = forward_results(dims, keep_gate_up, config.precision)
    num_workspace = len(results) - 2 - keep_gate_up
    if trace:
        results.append(trace_result(dims, forward_steps(dims)))
    codes = _codes(config, quantized, expert_bias)
    target, weights = (FORWARD_FP8, ()) if codes else (FORWARD, experts)
    operands = _operands(x, expert_idx, expert_weight, *weights)
    y, counts, *rest = jax.ffi.ffi_call(_target(target, dims), _results(x, results))(
        *operands,
        *(a for m in codes for a in (m.transposed, m.scales)),
        **_attributes(dims, config, axis_name, expert_bias),
        **_work(dims, forward_steps(dims), keep_gate_up, launches, deadline_s),
    )
    # One source needs no sum, which would be a kernel of its own.
    counts = counts[0] if dims.R == 1 else counts.sum(axis=0, dtype=jnp.int32)
    return y.astype(x.dtype), counts, *rest[num_workspace:]


def backward_call(
    dy: jax.Array,
    x: jax.Array,
    expert_idx: jax.Array,
    expert_weight: jax.Array,
    *experts: jax.Array,
    dims: Dims,
    config: MegaMoEConfig,
    axis_name: AxisName,
    quantized: QuantizedExperts | None = None,
    gate_up: jax.Array | None = None,
    launches: Sequence[int] = BACKWARD_FUSED,
    deadline_s: float = WAIT_DEADLINE_S,
    trace: bool = False,
) -> tuple[jax.Array, ...]:
    """The backward custom call of one rank; operands and options as for `forward_call`, dy [T, H].

    gate_up: what `forward_call` kept of the same arrays, the last operand; None: the kernel
    computes g and u again. With config.precision "fp8_block" of the weights only the dtype is read.

    Returns:
      dx [T, H] in the dtype of x, dw float32 [T, K] and, with config.trainable_experts, the
      gradients of w_gate, w_up and w_down in the dtype of w_gate, rounded once from float32 sums,
      those of several passes from the sum over these, and with biases those of b_gate, b_up and
      b_down, float32; with trace also the TraceRecords.

    Raises:
      MemoryError, ValueError: as `memory.check_fits`.
    """
    register()
    steps = backward_steps(dims, trainable_experts=config.trainable_experts)
    expert_bias = len(experts) > NUM_WEIGHTS
    dtype = experts[0].dtype if config.trainable_experts else None
    sizes = (gate_up is not None, expert_bias, config.precision)
    check_backward_fits(dims, dtype, *sizes)
    results = backward_results(dims, dtype, *sizes)
    if trace:
        results.append(trace_result(dims, steps))
    codes = _codes(config, quantized, expert_bias)
    target, weights = (BACKWARD_FP8, ()) if codes else (BACKWARD, experts)
    dx, *rest = jax.ffi.ffi_call(_target(target, dims), _results(x, results))(
        jnp.asarray(dy, jnp.bfloat16),
        *_operands(x, expert_idx, expert_weight, *weights),
        *_backward_codes(codes),
        *(() if gate_up is None else (gate_up,)),
        **_attributes(dims, config, axis_name, expert_bias),
        **_work(dims, steps, gate_up is not None, launches, deadline_s),
    )
    dw, *d_experts = rest[: 1 + len(experts) if config.trainable_experts else 1]
    d_weights = (d.astype(dtype) for d in d_experts[:NUM_WEIGHTS])
    d_biases = d_experts[NUM_WEIGHTS:]
    return dx.astype(x.dtype), dw, *d_weights, *d_biases, *(rest[-1:] if trace else ())


def _work(
    dims: Dims,
    steps: Sequence[Step],
    keep_gate_up: bool,
    launches: Sequence[int],
    deadline_s: float,
) -> dict[str, object]:
    """The attributes that say what the kernel of a pass does.

    keep_gate_up: the forward returns g and u, and the backward takes them.
    """
    return {
        "steps": _step_fields(steps),
        "pool_routes": np.int64(dims.pool_routes),
        "num_blocks": np.int64(dims.num_blocks),
        "keep_gate_up": np.int64(keep_gate_up),
        "launches": np.array(launches, np.int64),
        "deadline_ns": np.int64(deadline_s * 1e9),
    }


def _codes(
    config: MegaMoEConfig, quantized: QuantizedExperts | None, expert_bias: bool
) -> tuple[QuantizedMatrix, ...]:
    """The weights of a pass in FP8, refused where its kernels do not take the call; in bf16 ()."""
    if config.precision != "fp8_block":
        return ()
    if config.activation != "swiglu" or expert_bias or quantized is None:
        raise ValueError(
            f"precision is {config.precision!r} with activation {config.activation!r}, "
            f"{'' if expert_bias else 'no '}biases and "
            f"{'no ' if quantized is None else ''}quantised weights; its kernels take 'swiglu', "
            "no biases and quantised weights"
        )
    return quantized


def _backward_codes(codes: Sequence[QuantizedMatrix]) -> list[jax.Array]:
    """Those that a backward reads: no product of it sums over the rows of w_down."""
    if not codes:
        return []
    gate, up, down = codes
    return [*gate, *up, down.natural, down.scales]


def _target(of_one_rank: str, dims: Dims) -> str:
    """The target of a pass: calls over several ranks have stages of their own."""
    return of_one_rank if dims.R == 1 else f"{of_one_rank}_peers"


def _operands(
    x: jax.Array, expert_idx: jax.Array, expert_weight: jax.Array, *experts: jax.Array
) -> list[jax.Array]:
    bf16 = [jnp.asarray(a, jnp.bfloat16) for a in (x, *experts[:NUM_WEIGHTS])]
    biases = [jnp.asarray(a, jnp.float32) for a in experts[NUM_WEIGHTS:]]
    return [bf16[0], expert_idx, jnp.asarray(expert_weight, jnp.float32), *bf16[1:], *biases]


def _results(like: jax.Array, arrays: Sequence[ArraySize]):
    return [result_type(like, array.shape, array.dtype) for array in arrays]


def result_type(like: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike):
    """The type of a result that varies over the same manual mesh axes as `like`.

    Inside shard_map a bare ShapeDtypeStruct has no such axes and fails under check_vma. A result is
    of its dtype for good, also where `like` is weakly typed.
    """
    aval = jax.typeof(like)
    spec = jax.sharding.PartitionSpec(*[None] * len(shape))
    sharding = aval.sharding.update(spec=spec)
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _attributes(
    dims: Dims, config: MegaMoEConfig, axis_name: AxisName, expert_bias: bool
) -> dict[str, object]:
    attributes: dict[str, object] = {
        name: np.int64(getattr(dims, name)) for name in ("T", "K", "E", "R", "H", "I")
    }
    attributes["groups"] = _rank_groups(axis_name)
    attributes["precision"] = config.precision
    for name, constant in gated_unit(config.activation)._asdict().items():
        attributes[name] = np.float32(constant)
    attributes["biases"] = np.int64(expert_bias)
    if dims.R > 1:
        attributes["combine_dtype"] = config.combine_dtype
        attributes["configuration"] = _configuration(dims, config, expert_bias)
    return attributes


def _configuration(dims: Dims, config: MegaMoEConfig, expert_bias: bool) -> np.int64:
    """What the ranks of a group must agree on, in 64 bits: those of both passes of a layer."""
    sizes, unit = dataclasses.astuple(dims), gated_unit(config.activation)
    agreed = (*sizes, config.precision, *unit, expert_bias, config.combine_dtype)
    # Not repr: configs that are equal agree, whatever kind of str they hold.
    digest = hashlib.blake2b(json.dumps(agreed).encode(), digest_size=8).digest()
    return np.int64(int.from_bytes(digest, "little", signed=True))


def _rank_groups(axis_name: AxisName) -> np.ndarray:
    """int64 [devices], the flattened device ids of the mesh, R at a time: those of one group.

    Ids count the devices of the mesh in row-major order; a group holds its ranks in order.
    """
    if axis_name is None:
        return np.zeros(1, np.int64)
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    mesh = jax.sharding.get_abstract_mesh()
    ids = np.arange(mesh.size, dtype=np.int64).reshape(mesh.axis_sizes)
    places = [mesh.axis_names.index(axis) for axis in axes]
    ids = np.moveaxis(ids, places, range(-len(places), 0))
    return ids.reshape(-1)


def wait_probe(
    trigger: jax.Array, *, deadline_ns: int, release_ns: int, report: str
) -> tuple[jax.Array, jax.Array]:
    """Runs a kernel of one block that only waits for a flag, to test how a wait fails.

    Args:
      trigger: int32 [1], read by nothing; it orders the probe in a program.
      deadline_ns: how long the kernel waits.
      release_ns: when the kernel itself raises the flag; negative for never.
      report: how a failed wait becomes an exception, "future", "next_call" or "trap"
        (cuda/ffi/wait_probe.cc).

    Returns:
      int32 [1], 1 when the flag came and 0 when it did not; and the flag, int32 [1].
    """
    register()
    word = result_type(trigger, (1,), jnp.int32)
    call = jax.ffi.ffi_call(f"jax_megamoe_wait_probe_{report}", [word, word])
    came, flag = call(trigger, deadline_ns=np.int64(deadline_ns), release_ns=np.int64(release_ns))
    return came, flag


def peer_probe(
    row: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    configuration: int = 0,
    deadline_s: float = WAIT_DEADLINE_S,
) -> jax.Array:
    """`jax.lax.all_gather` by stores into the memory of the peers: a test of how they are found.

    Args:
      row: int32 [N], inside shard_map.
      axis_name: the mesh axis or axes of the R ranks.
      configuration: static, 64 bits; ranks whose configurations differ are refused.
      deadline_s: how long a rank waits for the others.

    Returns:
      int32 [R, N], the rows of all ranks.
    """
    register()
    num_ranks = jax.lax.axis_size(axis_name)
    (N,) = row.shape
    return jax.ffi.ffi_call(PEER_PROBE, result_type(row, (num_ranks, N), jnp.int32))(
        row,
        R=np.int64(num_ranks),
        N=np.int64(N),
        groups=_rank_groups(axis_name),
        configuration=np.int64(configuration),
        deadline_ns=np.int64(deadline_s * 1e9),
    )
