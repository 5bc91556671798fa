"""The layer over ranks as PyTorch alone makes it: all_to_all both ways, grouped products between.

A process a GPU, started and asked by _workers.py. Every route's row is sent to its expert's rank in
the order of the experts, and its result comes back in bf16; the weighted sum is float32. The sizes
of what is exchanged differ from step to step, so they are exchanged first and read by the host,
while the device gathers the rows. Everything but the exchanges is under torch.compile, the rows
that arrive with a dynamic number; gathers have gathers as gradients, no atomic additions.

In FP8 (_torch_fp8.py) the experts alone differ: rows cross in bf16, which the gradients of weights
need, and their rank quantises them, in the forward and in the backward.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
from _shapes import SEED, Shape, expert_ids
from _timing import Run
from _torch_fp8 import fp8_product
from _torch_run import torch_run

on_gpu = torch.cuda.is_available()


def make(
    rank: int, num_ranks: int, rendezvous: str, pass_name: str, shape: Shape, dtype: str
) -> Run:
    """A pass of rank `rank`'s share of the layer; dtype: of its products, "bf16" or "fp8_rows"."""
    if not dist.is_initialized():
        connect(rank, num_ranks, rendezvous)
    torch.compiler.reset()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    arrays = inputs(shape, rank)
    multiply = fp8_product(arrays[3:]) if dtype == "fp8_rows" else bf16_product
    return torch_run(make_layer(shape, multiply), pass_name, *arrays)


def connect(rank: int, num_ranks: int, rendezvous: str) -> None:
    where: dict[str, Any] = {"backend": "gloo"}
    if on_gpu:
        torch.cuda.set_device(rank)
        where = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    method = f"file://{rendezvous}"
    dist.init_process_group(init_method=method, rank=rank, world_size=num_ranks, **where)


def inputs(shape: Shape, rank: int) -> list[Any]:
    """As _shapes.inputs, drawn by PyTorch: the share of one rank, with the same routing.

    The weights have the inner dimension contiguous, as grouped_mm reads them.
    """
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(SEED + rank)
    drawn = {"generator": generator, "device": device}

    def weights(inner: int, outer: int) -> Any:
        a = torch.randn(shape.E // shape.R, outer, inner, **drawn) * inner**-0.5
        return a.bfloat16().transpose(1, 2)

    mine = slice(rank * shape.T, (rank + 1) * shape.T)
    return [
        torch.randn(shape.T, shape.H, **drawn).bfloat16(),
        torch.from_numpy(expert_ids(shape)[mine]).to(device),
        torch.rand(shape.T, shape.K, **drawn) * 0.2 + 0.05,
        weights(shape.H, shape.I),
        weights(shape.H, shape.I),
        weights(shape.I, shape.H),
    ]


def bf16_product(rows: Any, _: int, matrix: Any, ends: Any) -> Any:
    """As those of `_torch_fp8.fp8_product`."""
    return torch._grouped_mm(rows, matrix, offs=ends)


def make_layer(
    shape: Shape, multiply: Callable[..., Any] = bf16_product, group: Any = None
) -> Callable[..., Any]:
    """The layer of `shape.R` ranks: those of a process group, or all. multiply: its products."""
    compiled = functools.partial(torch.compile, fullgraph=True)
    route_, spread_, combine_ = (compiled(f, dynamic=False) for f in (route, spread, combine))
    experts_ = compiled(experts_of(multiply))
    on_host = torch.empty(2, shape.R, dtype=torch.int64, pin_memory=on_gpu)

    def layer(x: Any, ids: Any, w: Any, *weights: Any) -> Any:
        order, inverse, counts = route_(ids, shape.E)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sums = torch.stack((counts, arriving)).view(2, shape.R, -1).sum(2)
        on_host.copy_(sums, non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if on_gpu else None
        rows = spread_(x, order, inverse)
        if copied is not None:
            copied.synchronize()
        sent, received = on_host.tolist()
        rows = AllToAll.apply(rows, received, sent, group)
        torch._dynamo.maybe_mark_dynamic(rows, 0)
        rows = experts_(rows, arriving.view(shape.R, -1), *weights)
        return combine_(AllToAll.apply(rows, sent, received, group), order, inverse, w)

    return layer


def route(ids: Any, num_experts: int) -> tuple[Any, Any, Any]:
    """Of ids [T, K]: the slots in the order of the experts, where each is then, rows of each."""
    expert, order = torch.sort(ids.flatten(), stable=True)
    places = torch.arange(order.shape[0], device=ids.device)
    inverse = torch.empty_like(order).scatter_(0, order, places)
    experts = torch.arange(num_experts, dtype=expert.dtype, device=ids.device)
    ends = torch.searchsorted(expert, experts, right=True)
    return order, inverse, torch.diff(ends, prepend=ends.new_zeros(1))


def spread(x: Any, order: Any, inverse: Any) -> Any:
    """[T, H] -> a row for each slot, in the order of the experts."""
    return Spread.apply(x, order, inverse)


def experts_of(multiply: Callable[..., Any]) -> Callable[..., Any]:
    def experts(rows: Any, counts: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
        """rows: those of each source in the order of the experts, counts [R, E/R] of each."""
        to_experts, to_sources, ends = expert_order(counts, rows.shape[0])
        rows = Permute.apply(rows, to_experts, to_sources)
        gate = multiply(rows, 0, w_gate, ends)
        h = torch.nn.functional.silu(gate) * multiply(rows, 1, w_up, ends)
        return Permute.apply(multiply(h, 2, w_down, ends), to_sources, to_experts)

    return experts


def expert_order(counts: Any, num_rows: int) -> tuple[Any, Any, Any]:
    """Where rows in the order (source, expert) come from in the order (expert, source), where
    those come from in the first, and the end of each expert's in the second.
    """
    R, L = counts.shape
    by_source, by_expert = counts.flatten(), counts.t().flatten()
    source_ends, expert_ends = by_source.cumsum(0), by_expert.cumsum(0)
    source_starts, expert_starts = source_ends - by_source, expert_ends - by_expert
    row = torch.arange(num_rows, device=counts.device)
    run = torch.searchsorted(expert_ends, row, right=True)
    to_experts = source_starts[run % R * L + run // R] + row - expert_starts[run]
    run = torch.searchsorted(source_ends, row, right=True)
    to_sources = expert_starts[run % L * R + run // L] + row - source_starts[run]
    return to_experts, to_sources, expert_ends.view(L, R)[:, -1].to(torch.int32)


def combine(rows: Any, order: Any, inverse: Any, w: Any) -> Any:
    """Results in the order of `spread` -> their weighted sums, bf16 [T, H]."""
    slots = Permute.apply(rows, inverse, order).view(*w.shape, -1)
    return (slots.float() * w[:, :, None]).sum(1).to(rows.dtype)


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, order: Any, inverse: Any) -> Any:
        ctx.save_for_backward(inverse)
        ctx.tokens = x.shape[0]
        return x[order // (order.shape[0] // x.shape[0])]

    @staticmethod
    def backward(ctx: Any, d: Any) -> tuple[Any, ...]:
        (inverse,) = ctx.saved_tensors
        slots = d[inverse].view(ctx.tokens, -1, d.shape[1])
        return slots.float().sum(1).to(d.dtype), None, None


class Permute(torch.autograd.Function):
    """rows[perm]; inverse is that of perm."""

    @staticmethod
    def forward(ctx: Any, rows: Any, perm: Any, inverse: Any) -> Any:
        ctx.save_for_backward(inverse)
        return rows[perm]

    @staticmethod
    def backward(ctx: Any, d: Any) -> tuple[Any, ...]:
        (inverse,) = ctx.saved_tensors
        return d[inverse], None, None


class AllToAll(torch.autograd.Function):
    """Rows to the ranks, `sent` of them to each, `received` from each."""

    @staticmethod
    def forward(ctx: Any, rows: Any, received: list[int], sent: list[int], group: Any) -> Any:
        ctx.how = received, sent, group
        return exchange(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, d: Any) -> tuple[Any, ...]:
        received, sent, group = ctx.how
        return exchange(d.contiguous(), sent, received, group), None, None, None


def exchange(rows: Any, received: list[int], sent: list[int], group: Any) -> Any:
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows, received, sent, group=group)
    return result
