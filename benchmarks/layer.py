"""The layer after routing on one GPU, beside its peers and a plain matrix product.

    python benchmarks/layer.py [--out benchmarks/results/layer.json] [--shapes 30B 235B]

Every implementation runs alone in segments of SEGMENT_SECONDS, after as much load of its own, and
the segments of all implementations alternate: an H200 lowers its clock after 70 ms of load. Data
is random. Useful FLOPs are 6 T K H I for a forward; `fraction` is their rate over that of a bf16
8192^3 product in the same run.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the device

import jax
import jax.numpy as jnp
import numpy as np
from _record import smi, write

from jax_megamoe import mega_moe

SEGMENT_SECONDS = 0.3
SEGMENTS = 3
MATMUL = 8192
SEED = 0


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    T: int
    K: int
    E: int
    H: int
    I: int

    @property
    def forward_flops(self) -> float:
        return 6.0 * self.T * self.K * self.H * self.I


SHAPES = {
    "30B": Shape("30B", T=16384, K=8, E=128, H=2048, I=768),
    "235B": Shape("235B", T=16384, K=8, E=128, H=4096, I=1536),
}

Run = Callable[[], Any]


def inputs(shape: Shape) -> list[np.ndarray]:
    """x, expert_idx, expert_weight, w_gate, w_up, w_down; bf16 values in float32."""
    rng = np.random.default_rng(SEED)
    scores = rng.random((shape.T, shape.E), np.float32)
    ids = np.argpartition(scores, shape.K, axis=-1)[:, : shape.K].astype(np.int32)
    weight = rng.uniform(0.05, 0.25, ids.shape).astype(np.float32)
    wide, narrow = (shape.E, shape.H, shape.I), (shape.E, shape.I, shape.H)

    def draw(size: tuple[int, ...], scale: float) -> np.ndarray:
        return rng.standard_normal(size, np.float32) * np.float32(scale)

    return [
        draw((shape.T, shape.H), 1.0),
        ids,
        weight,
        draw(wide, shape.H**-0.5),
        draw(wide, shape.H**-0.5),
        draw(narrow, shape.I**-0.5),
    ]


def ours(arrays: list[np.ndarray]) -> Run:
    x, ids, w, *weights = arrays
    operands = [jnp.asarray(x, jnp.bfloat16), jnp.asarray(ids), jnp.asarray(w)]
    operands += [jnp.asarray(a, jnp.bfloat16) for a in weights]
    return functools.partial(jax.jit(functools.partial(mega_moe, backend="cuda")), *operands)


def torch_grouped_mm(arrays: list[np.ndarray]) -> Run:
    """Sort by expert, three grouped products, weighted index_add; compiled by torch.compile."""
    import torch  # pyright: ignore[reportMissingImports]

    def to_gpu(a: np.ndarray) -> Any:
        tensor = torch.from_numpy(a).cuda()
        return tensor if a.dtype == np.int32 else tensor.to(torch.bfloat16)

    x, ids, _, *weights = map(to_gpu, arrays)
    w = torch.from_numpy(arrays[2]).cuda()
    # grouped_mm reads weights with the inner dimension contiguous.
    w_gate, w_up, w_down = (a.transpose(-2, -1).contiguous().transpose(-2, -1) for a in weights)

    @torch.compile
    def layer(x: Any, ids: Any, w: Any) -> Any:
        order = torch.argsort(ids.flatten(), stable=True)
        tokens = order // ids.shape[1]
        ends = torch.bincount(ids.flatten(), minlength=w_gate.shape[0]).cumsum(0).to(torch.int32)
        rows = x[tokens]
        gate = torch._grouped_mm(rows, w_gate, offs=ends)
        h = torch.nn.functional.silu(gate) * torch._grouped_mm(rows, w_up, offs=ends)
        o = torch._grouped_mm(h, w_down, offs=ends).float() * w.flatten()[order][:, None]
        y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return y.index_add(0, tokens, o).to(x.dtype)

    return functools.partial(layer, x, ids, w)


def tokamax_ragged_dot(arrays: list[np.ndarray]) -> Run:
    import tokamax  # pyright: ignore[reportMissingImports]

    x, ids, w, *weights = (jnp.asarray(a) for a in arrays)
    x, *weights = (a.astype(jnp.bfloat16) for a in (x, *weights))

    def layer(x: Any, ids: Any, w: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
        dot = functools.partial(tokamax.ragged_dot, implementation="mosaic")
        order = jnp.argsort(ids.reshape(-1), stable=True)
        tokens = order // ids.shape[1]
        sizes = jnp.bincount(ids.reshape(-1), length=w_gate.shape[0]).astype(jnp.int32)
        rows = x[tokens]
        h = jax.nn.silu(dot(rows, w_gate, sizes)) * dot(rows, w_up, sizes)
        o = dot(h, w_down, sizes).astype(jnp.float32) * w.reshape(-1)[order][:, None]
        return jnp.zeros(x.shape, jnp.float32).at[tokens].add(o).astype(x.dtype)

    return functools.partial(jax.jit(layer), x, ids, w, *weights)


IMPLEMENTATIONS: dict[str, Callable[[list[np.ndarray]], Run]] = {
    "jax_megamoe": ours,
    "torch._grouped_mm + torch.compile": torch_grouped_mm,
    "tokamax.ragged_dot": tokamax_ragged_dot,
}


def matmul() -> Run:
    keys = jax.random.split(jax.random.key(SEED))
    a, b = (jax.random.normal(k, (MATMUL, MATMUL), jnp.bfloat16) for k in keys)
    return functools.partial(jax.jit(jnp.matmul), a, b)


def wait(result: Any) -> None:
    if isinstance(result, jax.Array):
        result.block_until_ready()
    else:
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.synchronize()


def segment(run: Run) -> tuple[float, int]:
    """Milliseconds a call, sustained, and the SM clock in MHz while it runs."""
    start = time.perf_counter()
    calls = 0
    while time.perf_counter() - start < SEGMENT_SECONDS:
        wait(run())
        calls += 1
    start = time.perf_counter()
    result = [run() for _ in range(calls)][-1]
    clock = int(smi("clocks.sm").split()[0])
    wait(result)
    return (time.perf_counter() - start) / calls * 1e3, clock


def measure(shape: Shape) -> list[dict[str, object]]:
    arrays = inputs(shape)
    runs, errors = {"matmul": matmul()}, {}
    for name, make in IMPLEMENTATIONS.items():
        try:
            runs[name] = make(arrays)
            wait(runs[name]())
        except Exception as error:  # a peer that is missing or fails is reported as that
            runs.pop(name, None)
            errors[name] = f"{type(error).__name__}: {error}"[:300]
    samples: dict[str, list[tuple[float, int]]] = {name: [] for name in runs}
    for _ in range(SEGMENTS):
        for name, run in runs.items():
            samples[name].append(segment(run))
    matmul_ms = float(np.median([ms for ms, _ in samples.pop("matmul")]))
    matmul_tflops = 2 * MATMUL**3 / matmul_ms * 1e-9
    records = []
    for name in IMPLEMENTATIONS:
        record: dict[str, object] = {
            "impl": name,
            "pass": "forward",
            "dtype": "bf16",
            "ep": 1,
            "tokens": shape.T,
            "hidden": shape.H,
            "intermediate": shape.I,
            "experts": shape.E,
            "top_k": shape.K,
            "routing": "random",
            "weights_dtype": "bf16",
            "seed": SEED,
        }
        if name in errors:
            records.append(record | {"error": errors[name]})
            continue
        times = sorted(ms for ms, _ in samples[name])
        ms = float(np.median(times))
        tflops = shape.forward_flops / ms * 1e-9
        records.append(
            record
            | {
                "ms": round(ms, 4),
                "ms_spread": round(times[-1] - times[0], 4),
                "clock_mhz": int(np.median([clock for _, clock in samples[name]])),
                "tflops": round(tflops, 1),
                "matmul_tflops": round(matmul_tflops, 1),
                "fraction": round(tflops / matmul_tflops, 3),
            }
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description="The layer on one GPU, beside its peers.")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments = parser.parse_args()
    records = [r for name in arguments.shapes for r in measure(SHAPES[name])]
    print("| shape | implementation | ms | TFLOP/s | of the matmul |\n|---|---|---|---|---|")
    for r in records:
        figures = (
            f"{r['ms']} | {r['tflops']} | {r['fraction']}" if "ms" in r else f"{r['error']} | |"
        )
        print(f"| ({r['hidden']}, {r['intermediate']}) | {r['impl']} | {figures} |")
    if arguments.out:
        write(arguments.out, records)


if __name__ == "__main__":
    main()
