"""The device memory of a call of the CUDA kernels, and whether a device can hold it.

Sizes are Python integers, so nothing wraps before it is compared with what 64 bits hold.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax

from jax_megamoe._arrays import ArraySize, up_to
from jax_megamoe._call_arrays import (
    backward_operands,
    backward_results,
    forward_operands,
    forward_pools,
    forward_results,
    gate_up_array,
    gradients,
    peer_array_bytes,
)
from jax_megamoe.config import (
    COMBINE_DTYPES,
    FP8_GROUP,
    INT32_MAX,
    KERNEL_MULTIPLE,
    KERNEL_PRECISIONS,
    POOL_FACTOR,
    Dims,
    lacking_in_fp8,
)
from jax_megamoe.validation import (
    check_choice,
    check_flag,
    check_pool_factor,
    check_size,
    refuse,
)

INT64_MAX = 2**63 - 1
# The share of a device that JAX takes: its older name, and the newer one, of which one may be set.
FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
# What ranks give each other takes whole pages, as in cuda/host/peers.cc.
PAGE_BYTES = 2 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of device memory that one forward call of one rank holds at the same time.

    The workspace is taken and given back by XLA with each program that contains the call; calls in
    sequence share it. Float32 arguments that are cast on the way in come on top, as does all else
    that a program keeps.

    Attributes:
      operands_bytes: x, expert_weight (float32), expert_idx and the rank's weights, in bf16, and
        biases, in float32. With precision "fp8_block" of the weights their codes in the order of
        the forward, and the scales.
      y_bytes: the result, [T, H] in bf16.
      plan_bytes: the plan's arrays, int32.
      pool_bytes: [P, H] in bf16: x of each row, later its o. P is at most R T K + 127 E/R, the rows
        of any routing, and at most pool_factor T K + 127 E/R where that is more than R K. With
        precision "fp8_block" beside it the codes of each row's x and, for R = 1, those of x.
      h_bytes: [P, I] in bf16, or its codes.
      counters_bytes: the progress of a call.
      gate_up_bytes: [P, 2I] in bf16: what a forward with save="gate_up" keeps for its backward, on
        top of the total.
      peer_bytes: what the rank shares with the others, 0 for R = 1; on top of the total, since it
        lies outside JAX's share of the device. Both passes use it, and all calls of the same sizes
        on the same group of devices; it stays for the process.
    """

    operands_bytes: int
    y_bytes: int
    plan_bytes: int
    pool_bytes: int
    h_bytes: int
    counters_bytes: int
    gate_up_bytes: int
    peer_bytes: int

    @property
    def workspace_bytes(self) -> int:
        return self.plan_bytes + self.pool_bytes + self.h_bytes + self.counters_bytes

    @property
    def total_bytes(self) -> int:
        return self.operands_bytes + self.y_bytes + self.workspace_bytes


def memory_plan(
    *,
    T: int,
    K: int,
    E: int,
    H: int,
    I: int,
    R: int = 1,
    combine_dtype: str = "float32",
    pool_factor: float = POOL_FACTOR,
    expert_bias: bool = False,
    precision: str = "bf16",
) -> MemoryPlan:
    """The device memory of one forward call with backend="cuda", for any routing.

    Args:
      T: tokens of a rank. K: choices of a token. E: experts of all ranks. H: hidden size.
      I: intermediate size of an expert. R: ranks.
      combine_dtype, pool_factor: as in `MegaMoEConfig`.
      expert_bias: the experts have biases.
      precision: as in `MegaMoEConfig`, one that has kernels. Of the quantised weights of
        "fp8_block" it counts those that the forward reads.

    Raises:
      TypeError: a size that is no integer, a dtype or a precision that is no string, a factor that
        is no number, a flag that is none.
      ValueError: a size outside the kernels' limits, more bytes than 64 bits hold, another dtype,
        precision or factor, or what the kernels of the precision do not take, naming it.
    """
    check_choice("precision", precision, KERNEL_PRECISIONS)
    fine = FP8_GROUP if precision == "fp8_block" else KERNEL_MULTIPLE
    sizes = {"T": T, "K": K, "E": E, "R": R, "H": H, "I": I}
    for name, size in sizes.items():
        multiple = fine if name in ("H", "I") else 1
        check_size(name, size, INT32_MAX, least=0 if name == "T" else 1, multiple=multiple)
    check_choice("combine_dtype", combine_dtype, COMBINE_DTYPES)
    check_pool_factor(pool_factor)
    check_flag("expert_bias", expert_bias)
    if precision == "fp8_block":
        for what in lacking_in_fp8(expert_bias=expert_bias):
            refuse(ValueError, "precision", f"{precision!r} with {what}", "'bf16' there")
    dims = Dims(**{name: int(size) for name, size in sizes.items()}, pool_factor=float(pool_factor))
    operands = forward_operands(dims, expert_bias, precision)
    results = forward_results(dims, precision=precision)
    pools = forward_pools(dims, precision)
    y, *plan = results[: -1 - len(pools)]
    h_bytes = sum(a.num_bytes for a in pools if a.name == "h")
    memory = MemoryPlan(
        operands_bytes=_sum_bytes(operands),
        y_bytes=y.num_bytes,
        plan_bytes=_sum_bytes(plan),
        pool_bytes=_sum_bytes(pools) - h_bytes,
        h_bytes=h_bytes,
        counters_bytes=results[-1].num_bytes,
        gate_up_bytes=gate_up_array(dims).num_bytes,
        peer_bytes=_peer_bytes(dims, combine_dtype, precision),
    )
    _check_countable("forward", dims, operands + results)
    return memory


def _peer_bytes(dims: Dims, combine_dtype: str, precision: str) -> int:
    if dims.R == 1:
        return 0
    return up_to(PAGE_BYTES, peer_array_bytes(dims, combine_dtype, precision))


def check_fits(
    dims: Dims, keep_gate_up: bool = False, expert_bias: bool = False, precision: str = "bf16"
) -> None:
    """Refuses a forward that no CUDA device of this process can hold, however empty it is.

    Only what is certain is refused: the call's own arrays against all that JAX may ever take from
    a device. What is free changes until the program runs. Without a CUDA device, or with an
    allocator that has no limit, nothing is refused.

    Raises:
      MemoryError: with the bytes needed, the bytes JAX has and has free, and how to give it more.
      ValueError: as `memory_plan`.
    """
    _, *workspace = forward_results(dims, precision=precision)
    operands = forward_operands(dims, expert_bias, precision)
    arrays = operands + forward_results(dims, keep_gate_up, precision)
    _check_countable("forward", dims, arrays)
    _check_device("forward", dims, arrays, _sum_bytes(workspace))


def check_backward_fits(
    dims: Dims,
    weight_gradients: jax.typing.DTypeLike | None,
    keep_gate_up: bool = False,
    expert_bias: bool = False,
    precision: str = "bf16",
) -> None:
    """As `check_fits`, of a backward; weight_gradients as for `backward_results`."""
    how = (keep_gate_up, expert_bias, precision)
    results = backward_results(dims, weight_gradients, *how)
    arrays = backward_operands(dims, *how) + results
    _check_countable("backward", dims, arrays)
    workspace = results[len(gradients(dims, weight_gradients, expert_bias)) :]
    _check_device("backward", dims, arrays, _sum_bytes(workspace))


def _check_countable(name: str, dims: Dims, arrays: Sequence[ArraySize]) -> None:
    total_bytes = _sum_bytes(arrays)
    if total_bytes > INT64_MAX:
        raise ValueError(
            f"the {name} of {dims} needs {total_bytes} bytes, more than the {INT64_MAX} "
            f"that 64 bits hold; {_largest(arrays)}"
        )


def _check_device(name: str, dims: Dims, arrays: Sequence[ArraySize], workspace_bytes: int) -> None:
    limits = [stats for stats in _cuda_memory_stats() if "bytes_limit" in stats]
    if not limits:
        return
    stats = max(limits, key=lambda s: s["bytes_limit"])
    limit = stats["bytes_limit"]
    total_bytes = _sum_bytes(arrays)
    if total_bytes > limit:
        fraction = next(filter(None, map(os.environ.get, FRACTIONS)), "0.75, the default")
        raise MemoryError(
            f"jax_megamoe: the {name} of {dims} needs {total_bytes} bytes of device "
            f"memory at once ({workspace_bytes} of workspace); JAX may take {limit} bytes "
            f"of a device, of which {limit - stats['bytes_in_use']} are free now; "
            f"{_largest(arrays)}. Split the batch, or raise {' or '.join(FRACTIONS)} "
            f"(now {fraction})"
        )


def cuda_devices() -> list[Any]:
    """The CUDA devices of this process; empty without one."""
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


def _cuda_memory_stats() -> list[dict[str, int]]:
    """What the allocator of each says."""
    return [device.memory_stats() or {} for device in cuda_devices()]


def _sum_bytes(arrays: Sequence[ArraySize]) -> int:
    return sum(array.num_bytes for array in arrays)


def _largest(arrays: Sequence[ArraySize]) -> str:
    array = max(arrays, key=lambda a: a.num_bytes)
    return f"the largest array is {array.name} {list(array.shape)} of {array.num_bytes} bytes"
