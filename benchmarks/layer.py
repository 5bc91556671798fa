"""The layer after routing on one GPU, beside its peers and a plain matrix product.

    python benchmarks/layer.py [--set main cliffs] [--shapes 30B ...] [--only jax_megamoe ...]
                               [--passes forward backward forward_backward]
                               [--saves none gate_up] [--weights bf16 float32]
                               [--peers-path DIR] [--out FILE.json] [--png FILE.png]

_timing.py says how a rate is measured, _shapes.py on what, _implementations.py of what. A record's
`tflops` are useful FLOPs, 6 T K H I of a forward, 12 of a backward and 18 of a forward with its
backward, and `fraction` is their rate over that of a bf16 8192^3 product measured in the same
rounds. Gradients of weights have the dtype of the weights; the peers take bf16 alone.

By default a forward and a forward with its backward are measured, each in rounds of its own. The
gradients of one forward again and again, `backward`, say where the time of the two goes.

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
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the device

import jax
from _implementations import IMPLEMENTATIONS, device_copy, jax_megamoe, matmul, release_memory
from _record import device, write
from _report import OURS, Named, draw, table
from _shapes import DTYPES, FLOP_FACTORS, SEED, SETS, Shape, bound_ms, inputs
from _timing import Clock, Figures, Method, Run, caught, measure

from jax_megamoe.config import SAVES

MATMUL_SIZE = 8192
COPY_BYTES = 2**30
WEIGHTS = tuple(DTYPES)
NAMES = sorted({shape.name for shapes in SETS.values() for shape in shapes})
Record = dict[str, Any]


class Variant(NamedTuple):
    """One way to run an implementation."""

    impl: str
    save: str = "none"
    weights_dtype: str = "bf16"

    def __str__(self) -> str:
        return f"{self.impl}, save {self.save}, {self.weights_dtype} weights"


def variants(
    shape: Shape,
    pass_name: str,
    *,
    only: Sequence[str] = (),
    saves: Sequence[str] = SAVES,
    weights: Sequence[str] = WEIGHTS,
) -> list[Variant]:
    """Of jax_megamoe all that were asked for, of the shape's peers those that there are.

    A forward without a gradient keeps nothing: there `save` is "none" for all.
    """
    found = []
    for name in (OURS, *shape.peers):
        if only and name not in only:
            continue
        kept = IMPLEMENTATIONS[name].saves
        kept = [save for save in kept if save in saves] if name == OURS else kept
        for dtype in weights if name == OURS else {"bf16"} & set(weights):
            of_pass = ["none"] if pass_name == "forward" else kept
            found += [Variant(name, save, dtype) for save in of_pass]
    return found


def record(
    variant: Variant, pass_name: str, shape: Shape, result: Figures | str, matmul_tflops: float
) -> Record:
    """One line of a results file; `result` is the text of an error where there are no figures."""
    described: Record = {
        "impl": variant.impl,
        "pass": pass_name,
        "dtype": "bf16",
        "ep": 1,
        "tokens": shape.T,
        "hidden": shape.H,
        "intermediate": shape.I,
        "experts": shape.E,
        "top_k": shape.K,
        "routing": shape.routing,
        "save": variant.save,
        "weights_dtype": variant.weights_dtype,
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
    chosen: Sequence[Variant],
    method: Method,
    clock: Clock | None,
    matmul_size: int = MATMUL_SIZE,
) -> list[Named]:
    """The records of the chosen variants, all measured in the same rounds."""
    arrays = {dtype: inputs(shape, dtype) for dtype in sorted({v.weights_dtype for v in chosen})}
    runs: dict[str, Run] = {"matmul": matmul(matmul_size)}
    errors: dict[str, str] = {}
    for variant in chosen:
        with caught(str(variant), errors):
            start = time.perf_counter()
            make = IMPLEMENTATIONS[variant.impl].make
            run = make(pass_name, variant.save, arrays[variant.weights_dtype])
            run.wait(run.call())
            runs[str(variant)] = run
            seconds = time.perf_counter() - start
            print(
                f"{shape.name} {pass_name}, {variant}: first call after {seconds:.1f} s", flush=True
            )
    figures, late_errors = measure(runs, method, clock)
    results = figures | errors | late_errors
    rate = matmul_rate(figures, matmul_size)
    return [(shape.name, record(v, pass_name, shape, results[str(v)], rate)) for v in chosen]


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
            run = jax_megamoe("forward", "none", inputs(shape, "bf16"))
            run.wait(run.call())
            runs[shape.name] = run
    figures, late_errors = measure(runs, method, clock)
    results = figures | errors | late_errors
    rate = matmul_rate(figures, matmul_size)
    records = []
    for shape in shapes:
        found = record(Variant(OURS), "forward", shape, results[shape.name], rate)
        if "ms" in found and base.name in figures and "copy" in figures:
            copy_rate = 2 * copy_bytes / figures["copy"].ms * 1e3
            bound = max(bound_ms(shape, base, figures[base.name].ms, copy_rate).values())
            found["bound_ms"] = round(bound, 4)
            found["bound_ratio"] = round(figures[shape.name].ms / bound, 3)
        records.append((shape.name, found))
    return records


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The layer on one GPU, beside its peers.")
    parser.add_argument(
        "--set",
        nargs="+",
        choices=SETS,
        default=["main"],
        dest="sets",
        help="shapes to measure, main unless said; tiny is the one for a CPU",
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="of the sets"
    )
    parser.add_argument(
        "--passes",
        nargs="+",
        choices=FLOP_FACTORS,
        default=["forward", "forward_backward"],
        help="what a call computes (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=[],
        metavar="NAME",
        help=f"implementations to measure, all unless said: {', '.join(IMPLEMENTATIONS)}",
    )
    parser.add_argument("--saves", nargs="+", choices=SAVES, default=SAVES, help="of jax_megamoe")
    parser.add_argument(
        "--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS, help="dtypes, of jax_megamoe"
    )
    parser.add_argument(
        "--rounds", type=int, default=Method.rounds, help="of all in turn (default: %(default)s)"
    )
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

    def keep() -> None:
        # After every measurement: what is interrupted leaves what it has.
        if options.out:
            write(options.out, [found for _, found in beside_peers + against_bound])

    for base, *others in (SETS[name] for name in options.sets):
        others = [shape for shape in others if shape.name in options.shapes]
        if not base.peers:
            against_bound += run_against_bound([base, *others], method, clock)
            keep()
            release_memory()
            continue
        size = MATMUL_SIZE if on_gpu else 512
        for shape in [base] * (base.name in options.shapes) + others:
            for pass_name in options.passes:
                chosen = variants(
                    shape,
                    pass_name,
                    only=options.only,
                    saves=options.saves,
                    weights=options.weights,
                )
                beside_peers += run_beside_peers(shape, pass_name, chosen, method, clock, size)
                keep()
                release_memory()
    named = beside_peers + against_bound
    print(table(named))
    if options.png:
        draw(options.png, beside_peers or against_bound, device())
    return int(any(r["impl"] == OURS and "error" in r for _, r in named))


if __name__ == "__main__":
    sys.exit(main())
