"""The layer after routing on one GPU, beside its peers and a plain matrix product.

    python benchmarks/layer.py [--set main cliffs] [--shapes 30B ...] [--only jax_megamoe ...]
                               [--passes forward forward_backward] [--peers-path DIR]
                               [--out FILE.json] [--png FILE.png]

_timing.py says how a rate is measured, _shapes.py on what, _implementations.py of what. A record's
`tflops` are useful FLOPs, 6 T K H I of a forward and 18 T K H I of a forward with its backward,
and `fraction` is their rate over that of a bf16 8192^3 product measured in the same rounds.

What fails is reported as that: its record holds the error's text in place of figures, and the
program ends with 1 if jax_megamoe itself failed. `--set tiny` runs on a CPU too, with the reference
backend, to try the program.
"""

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the device

import jax
from _implementations import IMPLEMENTATIONS, device_copy, jax_megamoe, matmul, release_memory
from _record import device, write
from _report import OURS, Named, draw, table
from _shapes import FLOP_FACTORS, SEED, SETS, Shape, bound_ms, inputs
from _timing import Clock, Figures, Method, Run, caught, measure

MATMUL_SIZE = 8192
COPY_BYTES = 2**30
NAMES = sorted({shape.name for shapes in SETS.values() for shape in shapes})
Record = dict[str, Any]


def record(
    impl: str,
    pass_name: str,
    weights_dtype: str,
    shape: Shape,
    result: Figures | str,
    matmul_tflops: float,
) -> Record:
    """One line of a results file; `result` is the text of an error where there are no figures."""
    saves = IMPLEMENTATIONS[impl].save if pass_name != "forward" else "none"
    described: Record = {
        "impl": impl,
        "pass": pass_name,
        "dtype": "bf16",
        "ep": 1,
        "tokens": shape.T,
        "hidden": shape.H,
        "intermediate": shape.I,
        "experts": shape.E,
        "top_k": shape.K,
        "routing": shape.routing,
        "save": saves,
        "weights_dtype": weights_dtype,
        "process_model": "single_process",
        "seed": SEED,
    }
    if isinstance(result, str):
        return described | {"error": result}
    tflops = shape.useful_flops(pass_name) / result.ms * 1e-9
    return described | {
        "ms": round(result.ms, 4),
        "ms_spread": round(result.ms_spread, 4),
        "clock_mhz": result.clock_mhz,
        "tflops": round(tflops, 1),
        "matmul_tflops": round(matmul_tflops, 1),
        "fraction": round(tflops / matmul_tflops, 4),
    }


def matmul_rate(figures: dict[str, Figures], size: int) -> float:
    """TFLOP/s of the run named matmul, without which nothing can be said of the others."""
    if "matmul" not in figures:
        raise RuntimeError("the matmul failed: there is nothing to compare with")
    return 2 * size**3 / figures["matmul"].ms * 1e-9


def run_beside_peers(
    shape: Shape,
    pass_name: str,
    weights_dtype: str,
    only: Sequence[str],
    method: Method,
    clock: Clock | None,
    matmul_size: int = MATMUL_SIZE,
) -> list[Named]:
    """The records of jax_megamoe and the shape's peers, those of `only` if it names any."""
    # The peers take bf16 weights alone.
    names = [OURS, *(shape.peers if weights_dtype == "bf16" else ())]
    names = [name for name in names if not only or name in only]
    arrays = inputs(shape, weights_dtype)
    runs: dict[str, Run] = {"matmul": matmul(matmul_size)}
    errors: dict[str, str] = {}
    for name in names:
        with caught(name, errors):
            start = time.perf_counter()
            run = IMPLEMENTATIONS[name].make(pass_name, arrays)
            run.wait(run.call())
            runs[name] = run
            seconds = time.perf_counter() - start
            print(f"{shape.name} {name}: first call after {seconds:.1f} s", flush=True)
    figures, late_errors = measure(runs, method, clock)
    results = figures | errors | late_errors
    rate = matmul_rate(figures, matmul_size)
    return [
        (shape.name, record(n, pass_name, weights_dtype, shape, results[n], rate)) for n in names
    ]


def run_against_bound(
    shapes: Sequence[Shape],
    method: Method,
    clock: Clock | None,
    matmul_size: int = MATMUL_SIZE,
    copy_bytes: int = COPY_BYTES,
) -> list[Named]:
    """The records of jax_megamoe's forward, each with its bound and its ratio to that.

    The bound, _shapes.bound_ms, takes its rates from the same rounds: that of the first shape, and
    that of a device copy.
    """
    base = shapes[0]
    runs = {"matmul": matmul(matmul_size), "copy": device_copy(copy_bytes)}
    errors: dict[str, str] = {}
    for shape in shapes:
        with caught(shape.name, errors):
            run = jax_megamoe("forward", inputs(shape, "bf16"))
            run.wait(run.call())
            runs[shape.name] = run
    figures, late_errors = measure(runs, method, clock)
    results = figures | errors | late_errors
    rate = matmul_rate(figures, matmul_size)
    records = []
    for shape in shapes:
        found = record(OURS, "forward", "bf16", shape, results[shape.name], rate)
        if "ms" in found and base.name in figures and "copy" in figures:
            copy_rate = 2 * copy_bytes / figures["copy"].ms * 1e3
            bound = max(bound_ms(shape, base, figures[base.name].ms, copy_rate).values())
            found["bound_ms"] = round(bound, 4)
            found["bound_ratio"] = round(figures[shape.name].ms / bound, 3)
        records.append((shape.name, found))
    return records


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The layer on one GPU, beside its peers.")
    parser.add_argument("--set", nargs="+", choices=SETS, default=["main"], dest="sets")
    parser.add_argument(
        "--shapes", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="of the sets"
    )
    parser.add_argument("--passes", nargs="+", choices=FLOP_FACTORS, default=["forward"])
    parser.add_argument("--only", nargs="+", choices=IMPLEMENTATIONS, default=[], metavar="NAME")
    parser.add_argument("--weights-dtype", choices=["bf16", "float32"], default="bf16")
    parser.add_argument("--rounds", type=int, default=Method.rounds)
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    parser.add_argument("--png", type=pathlib.Path, help="draw the sets with peers into this file")
    parser.add_argument(
        "--peers-path", type=pathlib.Path, help="a directory of packages that only peers need"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.peers_path:
        if not options.peers_path.is_dir():
            raise SystemExit(f"--peers-path {options.peers_path}: there is no such directory")
        sys.path.insert(0, str(options.peers_path.resolve()))
    on_gpu = jax.default_backend() == "gpu"
    clock = Clock.of_gpu() if on_gpu else None
    method = Method(rounds=options.rounds)
    beside_peers: list[Named] = []
    against_bound: list[Named] = []
    for base, *others in (SETS[name] for name in options.sets):
        others = [shape for shape in others if shape.name in options.shapes]
        if not base.peers:
            against_bound += run_against_bound([base, *others], method, clock)
            release_memory()
            continue
        size = MATMUL_SIZE if on_gpu else 512
        for shape in [base] * (base.name in options.shapes) + others:
            for pass_name in options.passes:
                choice = (pass_name, options.weights_dtype, options.only)
                beside_peers += run_beside_peers(shape, *choice, method, clock, size)
                release_memory()
    named = beside_peers + against_bound
    print(table(named))
    if options.png:
        draw(options.png, beside_peers or against_bound, device())
    if options.out:
        write(options.out, [found for _, found in named])
    return int(any(r["impl"] == OURS and "error" in r for _, r in named))


if __name__ == "__main__":
    sys.exit(main())
