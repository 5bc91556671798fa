"""The attention of the step benchmark in PyTorch: which of its kernels, called how."""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

# query [B, N, S, D], key and value [B, G, S, D] -> causal attention, [B, N, S, D].
Attend = Callable[[Any, Any, Any], Any]


# The operators by name, where PyTorch's own choice is a global switch that no compiled code and no
# cache of it is told apart by.
def cudnn(query: Any, key: Any, value: Any) -> Any:
    """None: no bias; True: with what the backward needs; 0.0: no dropout; True: causal."""
    how = (None, True, 0.0, True)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, *how)[0]


def cudnn_repeated(query: Any, key: Any, value: Any) -> Any:
    """With as many heads of keys as of queries."""
    times = query.shape[1] // key.shape[1]
    return cudnn(query, *(a.repeat_interleave(times, dim=1) for a in (key, value)))


def flash(query: Any, key: Any, value: Any) -> Any:
    """0.0: no dropout; True: causal."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]


def any_platform(query: Any, key: Any, value: Any) -> Any:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def choose_attention(config: dict[str, Any], batch: int, device: Any) -> Attend:
    """What is fastest of PyTorch's kernels for a GPU, compiled, forward and backward.

    batch: sequences of a rank.

    Raises:
      RuntimeError: none of them runs at these sizes.
    """
    if device.type == "cpu":
        return any_platform
    model, seq = config["model"], config["seq"]
    heads = [model[f"num_{name}_heads"] for name in ("attention", "key_value", "key_value")]
    how = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    shapes = [(batch, seq, n, model["head_dim"]) for n in heads]
    arrays = [torch.randn(shape, **how).transpose(1, 2) for shape in shapes]
    seconds: dict[Attend, float] = {}
    for attend in (cudnn, cudnn_repeated, flash):
        try:
            seconds[attend] = _seconds(torch.compile(attend, dynamic=False), arrays)
        except RuntimeError as error:
            print(f"the attention {attend.__name__}: {error}", file=sys.stderr)
    if not seconds:
        raise RuntimeError("no kernel of PyTorch runs the attention at these sizes")
    return min(seconds, key=seconds.__getitem__)


def _seconds(attend: Attend, arrays: list[Any]) -> float:
    """Of a forward and backward behind one that compiles."""
    start = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        mixed = attend(*arrays)
        torch.autograd.grad(mixed, arrays, torch.ones_like(mixed))
        torch.cuda.synchronize()
    return time.perf_counter() - start
