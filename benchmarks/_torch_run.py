"""The passes of a layer in PyTorch, as the benchmark runs them. Imports torch."""

from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch._functorch.config  # pyright: ignore[reportMissingImports]
from _timing import Run


def sorted_routes(ids: Any, num_experts: int) -> tuple[Any, Any, Any]:
    """Of ids [T, K]: the routes by expert, their tokens, and the end of each expert's."""
    expert, order = torch.sort(ids.flatten(), stable=True)
    experts = torch.arange(num_experts, dtype=expert.dtype, device=ids.device)
    ends = torch.searchsorted(expert, experts, right=True, out_int32=True)
    return order, order // ids.shape[1], ends


def torch_run(layer: Callable[..., Any], pass_name: str, x: Any, ids: Any, *floats: Any) -> Run:
    """A pass of layer(x, ids, *floats), as `_implementations.jax_run`.

    floats: the router weights and the three weights.
    """

    def forward() -> Any:
        with torch.no_grad():
            return layer(x, ids, *floats)

    def forward_backward() -> Any:
        y = layer(x, ids, *floats)
        return y, *torch.autograd.grad(y, [x, *floats], dy)

    def backward() -> Any:
        return torch.autograd.grad(y, [x, *floats], dy, retain_graph=True)

    def wait(_: Any) -> None:
        if x.is_cuda:
            torch.cuda.synchronize()

    if pass_name == "forward":
        return Run(forward, wait)
    dy = torch.randn_like(x)
    for tensor in (x, *floats):
        tensor.requires_grad_()
    if pass_name == "forward_backward":
        return Run(forward_backward, wait)
    # A backward that may write over what the forward kept runs only once.
    with torch._functorch.config.patch(donated_buffer=False):
        y = layer(x, ids, *floats)
        wait(backward())
    return Run(backward, wait)
