"""A layer of PyTorch in FP8, with a scale for each row that a product sums over. Imports torch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch  # pyright: ignore[reportMissingImports]
from _torch_run import sorted_routes

MOST = 448.0  # of e4m3


class Codes(NamedTuple):
    """Codes, [M, D], or [E, D, N] with D contiguous; and the scale of each M, or [E, N]."""

    codes: Any
    scales: Any


def quantized(rows: Any) -> Codes:
    """Of rows along the last dimension."""
    scales = rows.abs().amax(dim=-1).float().clamp(min=1e-12) / MOST
    return Codes((rows.float() / scales[..., None]).to(torch.float8_e4m3fn), scales)


def quantized_columns(weights: Any) -> Codes:
    """Of [E, D, N], along D."""
    codes, scales = quantized(weights.transpose(-2, -1).contiguous())
    return Codes(codes.transpose(-2, -1), scales)


def product(rows: Codes, weights: Codes, ends: Any) -> Any:
    return torch._scaled_grouped_mm(
        rows.codes,
        weights.codes,
        rows.scales,
        weights.scales,
        offs=ends,
        out_dtype=torch.bfloat16,
    )


class GroupedLinear(torch.autograd.Function):
    """rows [M, D] of groups that end at `ends`, times w [E, D, N]: forward and dgrad in FP8, the
    gradient of w in bf16."""

    @staticmethod
    def forward(
        ctx: Any, rows: Any, w: Any, codes: Any, scales: Any, back: Any, back_scales: Any, ends: Any
    ) -> Any:
        ctx.save_for_backward(rows, back, back_scales, ends)
        return product(quantized(rows), Codes(codes, scales), ends)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        rows, back, back_scales, ends = ctx.saved_tensors
        dy = dy.contiguous()
        d_rows = product(quantized(dy), Codes(back, back_scales), ends)
        d_w = torch._grouped_mm(rows.transpose(0, 1), dy, offs=ends)
        return d_rows, d_w, None, None, None, None, None


def fp8_product(weights: list[Any]) -> Callable[..., Any]:
    """f(rows, i, w, ends): the product of groups of rows with w, the i-th of these weights, whose
    codes are made here."""
    with torch.no_grad():
        forward = [quantized_columns(w) for w in weights]
        back = [quantized_columns(w.transpose(-2, -1)) for w in weights]

    def multiply(rows: Any, i: int, matrix: Any, ends: Any) -> Any:
        return GroupedLinear.apply(rows, matrix, *forward[i], *back[i], ends)

    return multiply


def fp8_layer(weights: list[Any]) -> Callable[..., Any]:
    """As `_implementations.torch_layer`, with the codes of these weights."""
    multiply = fp8_product(weights)

    @functools.partial(torch.compile, dynamic=False, fullgraph=True)
    def layer(x: Any, ids: Any, w: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
        order, tokens, ends = sorted_routes(ids, w_gate.shape[0])
        rows = x[tokens]
        gate = multiply(rows, 0, w_gate, ends)
        h = torch.nn.functional.silu(gate) * multiply(rows, 1, w_up, ends)
        o = multiply(h, 2, w_down, ends).float() * w.flatten()[order][:, None]
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return y.index_add(0, tokens, o).to(x.dtype)

    return layer
