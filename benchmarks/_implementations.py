"""The implementations that the layer benchmark runs, and the two rates they are held against.

All get the same arrays: the routing is an input, the weights are natural ([E, H, I], [E, I, H]),
and y is summed in float32. For its backward jax_megamoe keeps what its `save` says; the peers keep
what their frameworks keep.
"""

import dataclasses
import functools
import gc
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _shapes import SEED, normal
from _timing import Run

from jax_megamoe import ClampedSwiGLU, QuantizedExperts, mega_moe, quantize_expert_weights
from jax_megamoe.config import SAVES

# x, expert_idx, expert_weight, w_gate, w_up, w_down -> y
Layer = Callable[..., Any]
# rows [M, A], weights [E, A, B], rows of each expert int32 [E] -> [M, B]
Dot = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """make: a run of one pass over the given arrays, keeping what one of `saves` says."""

    name: str
    make: Callable[[str, str, list[jax.Array]], Run]
    saves: tuple[str, ...]


def jax_run(
    layer: Layer,
    pass_name: str,
    arrays: list[jax.Array],
    *,
    trainable: bool = True,
    quantized: QuantizedExperts | None = None,
) -> Run:
    """A pass of a JAX layer, a program of its own.

    forward returns y; backward dx, dw and, of trainable experts, the weights' gradients, from what
    one forward kept; forward_backward all of them. quantized: what the layer takes beside its
    arrays, by the name of `mega_moe`.
    """

    def forward(quantized: QuantizedExperts | None, *arrays: jax.Array) -> Any:
        return with_quantized(layer, quantized)(*arrays)

    def pulled(quantized: QuantizedExperts | None, *arrays: jax.Array) -> Any:
        return differentiated(with_quantized(layer, quantized), trainable, *arrays)

    def whole(quantized: QuantizedExperts | None, dy: jax.Array, *arrays: jax.Array) -> Any:
        return with_gradients(with_quantized(layer, quantized), dy, *arrays, trainable=trainable)

    if pass_name == "forward":
        return Run(functools.partial(jax.jit(forward), quantized, *arrays), jax.block_until_ready)
    dy = normal(jax.random.key(SEED + 1), arrays[0].shape, "bf16")
    if pass_name == "backward":
        _, pull = jax.jit(pulled)(quantized, *arrays)
        call = functools.partial(jax.jit(lambda pull, dy: pull(dy)), pull, dy)
    else:
        call = functools.partial(jax.jit(whole), quantized, dy, *arrays)
    return Run(call, jax.block_until_ready)


def with_quantized(layer: Layer, quantized: QuantizedExperts | None) -> Layer:
    return layer if quantized is None else functools.partial(layer, quantized_experts=quantized)


def differentiated(
    layer: Layer, trainable: bool, x: jax.Array, ids: jax.Array, w: jax.Array, *weights: jax.Array
) -> tuple[jax.Array, Callable[..., Any]]:
    """y, and the function from dy to all gradients, or to the first two of them."""

    def of_floats(x: jax.Array, w: jax.Array, *trained: jax.Array) -> jax.Array:
        return layer(x, ids, w, *(trained or weights))

    return jax.vjp(of_floats, x, w, *(weights if trainable else ()))


def with_gradients(
    layer: Layer, dy: jax.Array, *arrays: jax.Array, trainable: bool = True
) -> tuple[jax.Array, ...]:
    y, pull = differentiated(layer, trainable, *arrays)
    return y, *pull(dy)


def jax_megamoe(pass_name: str, save: str, arrays: list[jax.Array]) -> Run:
    return jax_run(functools.partial(mega_moe, backend=backend(), save=save), pass_name, arrays)


def jax_megamoe_frozen(pass_name: str, save: str, arrays: list[jax.Array]) -> Run:
    """No gradient of a weight is computed, nor written as zeros."""
    how = {"backend": backend(), "save": save, "trainable_experts": False}
    return jax_run(functools.partial(mega_moe, **how), pass_name, arrays, trainable=False)


def jax_megamoe_clamped_bias(pass_name: str, save: str, arrays: list[jax.Array]) -> Run:
    """The experts of gpt-oss: clamped SwiGLU, and float32 biases, whose gradients come too."""
    how = {"backend": backend(), "save": save, "activation": ClampedSwiGLU()}

    def layer(*arrays: Any) -> Any:
        biases = dict(zip(("b_gate", "b_up", "b_down"), arrays[6:], strict=True))
        return mega_moe(*arrays[:6], **biases, **how)

    *_, w_gate, _, w_down = arrays
    columns = (w_gate.shape[2], w_gate.shape[2], w_down.shape[2])
    keys = jax.random.split(jax.random.key(SEED + 2), len(columns))
    shapes = [(w_gate.shape[0], n) for n in columns]
    biases = [normal(key, shape, "float32") for key, shape in zip(keys, shapes, strict=True)]
    return jax_run(layer, pass_name, [*arrays, *biases])


def jax_megamoe_fp8(pass_name: str, save: str, arrays: list[jax.Array]) -> Run:
    """In FP8, with weights that a step has quantised before."""
    quantized = jax.jit(quantize_expert_weights)(*arrays[3:])
    return jax_run(_fp8_layer(save), pass_name, arrays, quantized=quantized)


def jax_megamoe_fp8_per_call(pass_name: str, save: str, arrays: list[jax.Array]) -> Run:
    """In FP8, each pass of which quantises the weights for itself."""
    return jax_run(_fp8_layer(save), pass_name, arrays)


def _fp8_layer(save: str) -> Layer:
    return functools.partial(mega_moe, backend=backend(), save=save, precision="fp8_block")


def quantization(_: str, __: str, arrays: list[jax.Array]) -> Run:
    """What a step in FP8 does once for all of its passes."""
    call = functools.partial(jax.jit(quantize_expert_weights), *arrays[3:])
    return Run(call, jax.block_until_ready)


def backend() -> str:
    """Of jax_megamoe: the kernels on a GPU, and the reference elsewhere, to try the program."""
    return "cuda" if jax.default_backend() == "gpu" else "reference"


def ragged_layer(dot: Dot) -> Layer:
    """Sort by expert, three ragged products, weighted scatter-add."""

    def layer(*arrays: jax.Array) -> jax.Array:
        x, ids, w, w_gate, w_up, w_down = arrays
        return ragged_sum(dot, x, ids, w, w_gate, w_up, w_down).astype(x.dtype)

    return layer


def ragged_sum(
    dot: Dot,
    x: jax.Array,
    ids: jax.Array,
    w: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    num_rows: int | None = None,
) -> jax.Array:
    """The layer's sums over the given experts, float32 [T, H].

    num_rows: None: every id is one of these experts. Else the routes to other experts, whose ids
    are E and above, are left out, and so many rows, no fewer than the other routes, are gathered.
    """
    order = jnp.argsort(ids.reshape(-1), stable=True)[:num_rows]
    tokens = order // ids.shape[1]
    sizes = jnp.bincount(ids.reshape(-1), length=w_gate.shape[0]).astype(jnp.int32)

    def routed(rows: jax.Array) -> jax.Array:
        """The products leave what lies behind their groups undefined, forward and backward."""
        if num_rows is None:
            return rows
        return jnp.where((jnp.arange(num_rows) < sizes.sum())[:, None], rows, 0)

    rows = routed(x[tokens])
    h = jax.nn.silu(routed(dot(rows, w_gate, sizes))) * routed(dot(rows, w_up, sizes))
    o = routed(dot(h, w_down, sizes)).astype(jnp.float32) * w.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[tokens].add(o)


def lax_ragged_dot(pass_name: str, _: str, arrays: list[jax.Array]) -> Run:
    return jax_run(ragged_layer(jax.lax.ragged_dot), pass_name, arrays)


def tokamax_ragged_dot(pass_name: str, _: str, arrays: list[jax.Array]) -> Run:
    return jax_run(ragged_layer(tokamax_dot()), pass_name, arrays)


def tokamax_dot() -> Dot:
    """Its product; ImportError where it is not installed."""
    _stand_in_for_xprof()
    import tokamax  # pyright: ignore[reportMissingImports]

    # "mosaic" is its implementation for Hopper, and needs one; "xla" runs anywhere.
    implementation = "mosaic" if jax.default_backend() == "gpu" else "xla"
    return functools.partial(tokamax.ragged_dot, implementation=implementation)


def _stand_in_for_xprof() -> None:
    """tokamax imports a module of xprof, for its own profiling only: an empty one satisfies it."""
    parent = None
    for name in ("xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool"):
        module = sys.modules.setdefault(name, types.ModuleType(name))
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
        parent = module


def torch_grouped_mm(pass_name: str, _: str, arrays: list[jax.Array]) -> Run:
    import torch  # pyright: ignore[reportMissingImports]
    from _torch_run import torch_run

    x, ids, w, *weights = (torch.from_dlpack(a) for a in arrays)
    layer, weights = torch_layer(weights)
    return torch_run(layer, pass_name, x, ids, w, *weights)


def torch_layer(weights: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Sort by expert, three grouped products, weighted index_add; compiled by torch.compile.

    Returns:
      The layer, and the weights as it takes them.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from _torch_run import sorted_routes

    @functools.partial(torch.compile, dynamic=False, fullgraph=True)
    def layer(x: Any, ids: Any, w: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
        order, tokens, ends = sorted_routes(ids, w_gate.shape[0])
        rows = x[tokens]
        gate = torch._grouped_mm(rows, w_gate, offs=ends)
        h = torch.nn.functional.silu(gate) * torch._grouped_mm(rows, w_up, offs=ends)
        o = torch._grouped_mm(h, w_down, offs=ends).float() * w.flatten()[order][:, None]
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return y.index_add(0, tokens, o).to(x.dtype)

    # grouped_mm reads weights with the inner dimension contiguous.
    return layer, [a.transpose(-2, -1).contiguous().transpose(-2, -1) for a in weights]


def torch_scaled_grouped_mm(pass_name: str, _: str, arrays: list[jax.Array]) -> Run:
    """In FP8 with a scale a row, of weights that are quantised before."""
    import torch  # pyright: ignore[reportMissingImports]
    from _torch_fp8 import fp8_layer
    from _torch_run import torch_run

    x, ids, w, *weights = (torch.from_dlpack(a) for a in arrays)
    return torch_run(fp8_layer(weights), pass_name, x, ids, w, *weights)


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("jax_megamoe", jax_megamoe, SAVES),
        Implementation("jax_megamoe_frozen", jax_megamoe_frozen, SAVES),
        Implementation("jax_megamoe_clamped_bias", jax_megamoe_clamped_bias, SAVES),
        Implementation("jax_megamoe_fp8", jax_megamoe_fp8, SAVES),
        Implementation("jax_megamoe_fp8_per_call", jax_megamoe_fp8_per_call, SAVES),
        Implementation("quantize_expert_weights", quantization, ("none",)),
        Implementation("torch_grouped_mm", torch_grouped_mm, ("activations",)),
        Implementation("torch_scaled_grouped_mm", torch_scaled_grouped_mm, ("activations",)),
        Implementation("tokamax_ragged_dot", tokamax_ragged_dot, ("activations",)),
        Implementation("lax_ragged_dot", lax_ragged_dot, ("activations",)),
    )
}


def use_peers(path: pathlib.Path | None) -> None:
    """Lets peers be imported from a directory of packages; SystemExit where there is none."""
    if path is None:
        return
    if not path.is_dir():
        raise SystemExit(f"--peers-path {path}: there is no such directory")
    sys.path.insert(0, str(path.resolve()))


def release_memory() -> None:
    """Gives back what the runs of one shape leave in caches, before those of the next."""
    gc.collect()
    if torch := sys.modules.get("torch"):
        torch.compiler.reset()
        torch.cuda.empty_cache()


def matmul(size: int) -> Run:
    """A bf16 product of two square matrices."""
    a, b = squares(size)
    return Run(functools.partial(jax.jit(jnp.matmul), a, b), jax.block_until_ready)


def squares(*size: int) -> list[jax.Array]:
    """Two factors of a product, bf16 [..., size, size] of the last of `size`."""
    keys = jax.random.split(jax.random.key(SEED))
    return [normal(key, (*size, size[-1]), "bf16") for key in keys]


def device_copy(size_bytes: int) -> Run:
    """A copy from device memory to device memory."""
    source = jax.random.bits(jax.random.key(SEED), (size_bytes // 4,), jnp.uint32)
    return Run(functools.partial(jax.jit(jnp.copy), source), jax.block_until_ready)
