"""The latency of a forward of few tokens: dependent layers in one program, the time of each.

    python benchmarks/latency.py [--tokens 1 4 16 64] [--only jax_megamoe ...] [--peers-path DIR]
                                 [--out benchmarks/results/latency.json]

LAYERS layers follow each other, each on the sum of the first input and a little of the result
before it, so that none overlaps another. Every layer has a routing of its own: what one has read
is of little use to the next. JAX runs them in one jitted scan, PyTorch, whose calls would wait for
the host, in one CUDA graph; both take the weights of the 30B shape. Rates come as in layer.py, from
sustained segments in alternating rounds.

So few tokens leave only one thing to compare with: the weights of the experts that have rows must
come from memory once. `bound_ms` is that at the rate of a device copy measured in the same rounds.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the device

import jax
import jax.numpy as jnp
import numpy as np
from _implementations import (
    backend,
    device_copy,
    matmul,
    ragged_layer,
    release_memory,
    tokamax_dot,
    torch_layer,
    use_peers,
)
from _measured import COPY_BYTES, MATMUL_SIZE, Make, Variant, measure_beside, record
from _record import need_gpu, write
from _report import OURS, Named, table
from _shapes import BASE, Shape, inputs
from _timing import Clock, Figures, Method, Run

from jax_megamoe import mega_moe

LAYERS = 16
TOKENS = (1, 2, 4, 8, 16, 32, 64)
# Of a result, in the input of the next layer: enough to depend on it, too little to grow.
SHARE = 2.0**-10
Arrays = Sequence[jax.Array]


def in_layers(shape: Shape) -> list[jax.Array]:
    """x [T, H]; ids and router weights [LAYERS, T, K]; the three weights."""
    x, ids, w, *weights = inputs(dataclasses.replace(shape, T=LAYERS * shape.T), "bf16")
    routes = (a.reshape(LAYERS, shape.T, shape.K) for a in (ids, w))
    return [x[: shape.T], *routes, *weights]


def jax_chain(layer: Callable[..., jax.Array], arrays: Arrays) -> Run:
    def chain(first: jax.Array, ids: jax.Array, w: jax.Array, *weights: jax.Array) -> jax.Array:
        def step(y: jax.Array, routes: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return layer(first + y * jnp.bfloat16(SHARE), *routes, *weights), None

        return jax.lax.scan(step, jnp.zeros_like(first), (ids, w))[0]

    return Run(functools.partial(jax.jit(chain), *arrays), jax.block_until_ready)


def ours(arrays: Arrays) -> Run:
    def layer(*arrays: jax.Array) -> jax.Array:
        y = mega_moe(*arrays, backend=backend())
        assert isinstance(y, jax.Array)  # without the counts
        return y

    return jax_chain(layer, arrays)


def tokamax(arrays: Arrays) -> Run:
    return jax_chain(ragged_layer(tokamax_dot()), arrays)


def torch_grouped(arrays: Arrays) -> Run:
    import torch  # pyright: ignore[reportMissingImports]

    first, ids, w, *weights = (torch.from_dlpack(a) for a in arrays)
    layer, weights = torch_layer(weights)

    def chain() -> Any:
        y = torch.zeros_like(first)
        for i in range(LAYERS):
            y = layer(first + y * SHARE, ids[i], w[i], *weights)
        return y

    # Compiled and run before it is captured, on a stream of its own, as capturing asks for.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        chain()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        chain()
    return Run(graph.replay, lambda _: torch.cuda.synchronize())


CHAINS = {OURS: ours, "torch_grouped_mm": torch_grouped, "tokamax_ragged_dot": tokamax}


def weight_bytes(shape: Shape, ids: jax.Array) -> float:
    """bf16 weights of the experts that a layer has rows of, on average over the layers."""
    experts = [len(np.unique(of_layer)) for of_layer in np.asarray(ids)]
    return 2 * 3 * shape.H * shape.I * float(np.mean(experts))


def a_layer(result: Figures | str) -> Figures | str:
    if isinstance(result, str):
        return result
    return dataclasses.replace(result, ms=result.ms / LAYERS, ms_spread=result.ms_spread / LAYERS)


def measure_shape(
    shape: Shape,
    impls: Sequence[str],
    method: Method,
    clock: Clock | None,
    matmul_size: int = MATMUL_SIZE,
    copy_bytes: int = COPY_BYTES,
) -> list[Named]:
    """A record for each implementation, all measured in the same rounds."""
    arrays = in_layers(shape)
    copy = Variant("copy")
    makes: dict[Variant, Make] = {copy: functools.partial(device_copy, copy_bytes)}
    makes |= {Variant(impl): functools.partial(CHAINS[impl], arrays) for impl in impls}
    product = matmul(matmul_size)
    results, rate = measure_beside(shape.name, makes, product, matmul_size, method, clock)
    copied = results[copy]
    if isinstance(copied, str):
        raise RuntimeError(f"the copy failed, and with it the bound: {copied}")
    copy_rate = 2 * copy_bytes / copied.ms * 1e3
    bound = weight_bytes(shape, arrays[1]) / copy_rate * 1e3
    named = []
    for impl in map(Variant, impls):
        found = record(impl, "forward", shape, a_layer(results[impl]), rate)
        found |= {"layers": LAYERS, "bound_ms": round(bound, 4)}
        if "ms" in found:
            found["bound_ratio"] = round(found["ms"] / bound, 3)
        named.append((shape.name, found))
    return named


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The latency of a forward of few tokens.")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="T")
    parser.add_argument("--only", nargs="+", choices=CHAINS, default=list(CHAINS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=Method.rounds)
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    parser.add_argument(
        "--peers-path", type=pathlib.Path, help="a directory of packages that only peers need"
    )
    options = parser.parse_args(arguments)
    need_gpu()
    use_peers(options.peers_path)
    clock = Clock.of_gpus()
    named: list[Named] = []
    for tokens in options.tokens:
        shape = dataclasses.replace(BASE, name=f"30B T={tokens}", T=tokens, peers=())
        named += measure_shape(shape, options.only, Method(rounds=options.rounds), clock)
        if options.out:
            write(options.out, [found for _, found in named])
        release_memory()
    print(table(named))
    return int(any(r["impl"] == OURS and "error" in r for _, r in named))


if __name__ == "__main__":
    sys.exit(main())
