"""What a machine runs of a given call, and why not: from facts alone, so that any machine is tried.

The words of each refusal are those of the code that refuses: `_backend.call_refusals`,
`_ffi.missing`, `memory` and `validation`.
"""

import dataclasses

from jax_megamoe import _call_arrays, memory
from jax_megamoe._backend import call_refusals
from jax_megamoe._ffi import KERNEL_COMPUTE_CAPABILITY, older_generation
from jax_megamoe._machine import NOT_INSTALLED, Device, Facts
from jax_megamoe._quantized_checks import check_fp8_kernels
from jax_megamoe.config import (
    INT32_MAX,
    MAX_CHOICES,
    MAX_EXPERTS,
    MAX_SLOTS,
    RANK_COUNTS,
    Dims,
    MegaMoEConfig,
)
from jax_megamoe.validation import (
    check_choice,
    check_config,
    check_flag,
    check_groups,
    check_size,
    refuse,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """The call that is asked about.

    Attributes:
      dims: its sizes, T tokens on each of R ranks, and the pool_factor of its config.
      config: its static choices.
      weights: the dtype of the parameters, "bfloat16" or "float32".
      expert_bias: whether the experts have biases.
    """

    dims: Dims
    config: MegaMoEConfig
    weights: str = "float32"
    expert_bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassBytes:
    """Bytes of GPU memory that a pass holds at once; workspace_bytes are among total_bytes."""

    total_bytes: int
    workspace_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """What the kernels take of each GPU, for any routing.

    Attributes:
      plan: of the forward, in parts.
      forward, backward: each with what `save` keeps, where it keeps something.
      kept_bytes: what a layer keeps between the two beside its inputs; counted in both.
    """

    plan: memory.MemoryPlan
    forward: PassBytes
    backward: PassBytes
    kept_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceVerdict:
    """A CUDA device of JAX, and why the call does not run the kernels on it; () if it does."""

    device: Device
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The answer to a question.

    Attributes:
      runs: "kernels"; "reference"; or "nothing", where the call raises an error.
      reasons: why it is not the kernels, all that hold.
      devices: the same for each CUDA device of the process.
      memory: of the kernels; None where they do not take the sizes, for `memory_error`.
      advice: what to do about it, for each thing that something can be done about.
    """

    runs: str
    reasons: tuple[str, ...]
    devices: tuple[DeviceVerdict, ...]
    memory: Memory | None
    memory_error: str
    advice: tuple[str, ...]


def check_question(question: Question) -> None:
    """Raises TypeError or ValueError, as the call would, for what no backend takes."""
    dims = question.dims
    check_config(question.config)
    check_choice("weights", question.weights, ("bfloat16", "float32"))
    check_flag("expert_bias", question.expert_bias)
    check_size("T", dims.T, INT32_MAX)
    check_size("E", dims.E, MAX_EXPERTS)
    check_size("K", dims.K, min(dims.E, MAX_CHOICES))
    check_size("H", dims.H, INT32_MAX)
    check_size("I", dims.I, INT32_MAX)
    if question.config.precision == "fp8_block":
        check_groups("H", H=dims.H)
        check_groups("I", I=dims.I)
    check_fp8_kernels(question.config, expert_bias=question.expert_bias)
    if dims.R not in RANK_COUNTS:
        refuse(ValueError, "R", str(dims.R), f"one of {', '.join(map(str, RANK_COUNTS))}")
    if dims.E % dims.R:
        refuse(ValueError, "E", str(dims.E), f"a multiple of R = {dims.R}")
    if (routes := dims.R * dims.T * dims.K) > MAX_SLOTS:
        refuse(ValueError, "T", f"of {routes} routes R T K", f"of at most {MAX_SLOTS} routes")


def diagnose(facts: Facts, question: Question) -> Diagnosis:
    """Raises TypeError and ValueError as `check_question`."""
    check_question(question)
    needed, memory_error = _memory(question)
    by_name = question.config.backend == "cuda"
    of_call = _of_call(question)
    of_machine = [facts.missing] if facts.missing else []
    if not facts.extension and not facts.devices:
        of_machine.append(f"JAX sees no CUDA device ({facts.jax_error})")
    devices = tuple(
        DeviceVerdict(
            device=device,
            reasons=tuple([*of_call, *_of_device(facts, device), *_too_much(device, needed)]),
        )
        for device in facts.devices
    )
    too_much = [reason for d in facts.devices for reason in _too_much(d, needed)]
    unreached = _unreached(facts, question.dims.R)
    if of_call or of_machine:
        runs = "nothing" if by_name else "reference"
    else:
        # `auto` does not look at what follows: the call raises.
        runs = "nothing" if too_much or (by_name and unreached) else "kernels"
    reasons = tuple(dict.fromkeys([*of_call, *of_machine, *too_much, *unreached]))
    return Diagnosis(
        runs=runs,
        reasons=reasons,
        devices=devices,
        memory=needed,
        memory_error=memory_error,
        advice=tuple(_advice(facts, question, bool(too_much))),
    )


def _of_call(question: Question) -> list[str]:
    """Why no machine runs the kernels for the call."""
    return _refusals(question, by_name=question.config.backend == "cuda")


def _refusals(question: Question, by_name: bool) -> list[str]:
    dims, config = question.dims, question.config
    # By name they run over several ranks, too.
    sizes = {"H": dims.H, "I": dims.I, "R": 1 if by_name else dims.R}
    return call_refusals(config, **sizes, expert_bias=question.expert_bias)


def _of_device(facts: Facts, device: Device) -> list[str]:
    """Why a device runs no kernels of ours at all."""
    reasons = [] if facts.extension else [facts.missing]
    if device.compute_capability != KERNEL_COMPUTE_CAPABILITY:
        older = older_generation(device.compute_capability)
        reasons.append(
            f"its compute capability is {device.compute_capability}{older}; the kernels run on "
            f"{KERNEL_COMPUTE_CAPABILITY}"
        )
    elif facts.missing and facts.extension:
        reasons.append(facts.missing)
    return reasons


def _too_much(device: Device, needed: Memory | None) -> list[str]:
    """As `memory.check_fits` refuses: more than JAX may ever take of the device."""
    if needed is None or device.bytes_limit is None:
        return []
    return [
        f"the {name} needs {of_pass.total_bytes} bytes at once; JAX may take {device.bytes_limit} "
        f"of GPU {device.ordinal}"
        for name, of_pass in (("forward", needed.forward), ("backward", needed.backward))
        if of_pass.total_bytes > device.bytes_limit
    ]


def _unreached(facts: Facts, num_ranks: int) -> list[str]:
    """Pairs of GPUs of this process that do not reach each other, where experts are split."""
    if num_ranks == 1:
        return []
    peers = facts.driver.peers
    return [
        f"GPU {a} does not reach the memory of GPU {b} (no peer access)"
        for a in range(len(peers))
        for b in range(len(peers))
        if not peers[a][b]
    ]


def _memory(question: Question) -> tuple[Memory | None, str]:
    """What the kernels take, or why they take no such sizes."""
    dims, config = question.dims, question.config
    keeps, bias = config.save == "gate_up", question.expert_bias
    try:
        sizes = dataclasses.asdict(dims)
        how = {"combine_dtype": config.combine_dtype, "expert_bias": bias}
        plan = memory.memory_plan(**sizes, **how, precision=config.precision)
        of_backward = (keeps, bias, config.precision)
        operands = _call_arrays.backward_operands(dims, *of_backward)
        dtype = question.weights if config.trainable_experts else None
        results = _call_arrays.backward_results(dims, dtype, *of_backward)
    except ValueError as error:
        return None, str(error)
    gradients = ("dx", "dw", "dw_gate", "dw_up", "dw_down", "db_gate", "db_up", "db_down")
    workspace = sum(a.num_bytes for a in results if a.name not in gradients)
    kept_bytes = plan.gate_up_bytes if keeps else 0
    return Memory(
        plan=plan,
        forward=PassBytes(
            total_bytes=plan.total_bytes + kept_bytes, workspace_bytes=plan.workspace_bytes
        ),
        backward=PassBytes(
            total_bytes=sum(a.num_bytes for a in (*operands, *results)), workspace_bytes=workspace
        ),
        kept_bytes=kept_bytes,
    ), ""


def _advice(facts: Facts, question: Question, too_much: bool) -> list[str]:
    lines = []
    gpus, devices = facts.driver.gpus, facts.devices
    hoppers = [g for g in gpus if g.compute_capability == KERNEL_COMPUTE_CAPABILITY]
    refusals = _refusals(question, by_name=True)
    if refusals:
        lines.append("No machine runs the kernels for this call: change what its reasons name.")
    elif not gpus and not devices and question.config.backend == "cuda":
        lines.append('Run this call on a machine with an H100, H200 or GH200, or backend="auto".')
    elif not gpus and not devices:
        lines.append(
            "Nothing is wrong here without a GPU: the reference runs everything, at the speed of "
            "the CPU. Run this program again on the machine with the H100, H200 or GH200."
        )
    if gpus and not devices:
        lines.append(_see_gpus(facts))
    if hoppers and not facts.extension:
        lines.append(_build(facts))
    if hoppers and len(hoppers) < len(gpus):
        uuids = ",".join(gpu.uuid for gpu in hoppers)
        lines.append(f"CUDA_VISIBLE_DEVICES={uuids} hides the GPUs that are no Hopper.")
    if question.dims.R > 1 and question.config.backend == "auto" and not refusals:
        lines.append('backend="cuda" runs the kernels over several GPUs by name.')
    if 0 < len(devices) < question.dims.R:
        lines.append(
            f"{question.dims.R} ranks need as many GPUs; this process has {len(devices)}: others "
            "have to bring the rest (jax.distributed.initialize)."
        )
    if too_much:
        lines.append(
            f"Split the batch, or raise {' or '.join(memory.FRACTIONS)}; "
            'save="none" keeps nothing between the passes.'
        )
    return lines


def _see_gpus(facts: Facts) -> str:
    """How JAX gets to see the GPUs that the driver shows."""
    if facts.versions["jax-cuda13-plugin"] == NOT_INSTALLED:
        return "JAX has no CUDA plugin: pip install 'jax_megamoe[cuda13]', or 'jax[cuda13]'."
    platforms = facts.settings.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"JAX_PLATFORMS={platforms} keeps JAX from the GPUs: leave it unset."
    return f"JAX does not take the GPUs: {facts.jax_error}"


def _build(facts: Facts) -> str:
    if not facts.nvcc or int(facts.nvcc.partition(".")[0]) < 13:
        found = f"found is {facts.nvcc}" if facts.nvcc else "none is found"
        return (
            f"Building the CUDA part needs nvcc >= 13.0 on PATH, in CUDA_HOME or in "
            f"/usr/local/cuda; {found}."
        )
    return "The CUDA part can be built here: pip install . in the sources, or make build."
