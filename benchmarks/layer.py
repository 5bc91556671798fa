"""The layer after routing on one GPU or several, beside its peers and a plain matrix product.

    python benchmarks/layer.py [--set main cliffs ranks] [--shapes 30B ...] [--only jax_megamoe ...]
                               [--passes forward backward forward_backward]
                               [--saves none gate_up] [--weights bf16 float32]
                               [--peers-path DIR] [--out FILE.json] [--png FILE.png]

_timing.py says how a rate is measured, _shapes.py on what, _implementations.py of what, and
_ranks.py of what over the GPUs of a host (`--set ranks ranks-cliffs` needs two, for bf16 weights;
on two H200 of a host with 32 cores it should take some three minutes with `--shapes 30B`, as long
with `--shapes 235B`, and `--set ranks-cliffs` one). A record's
`tflops` are useful FLOPs, 6 T K H I of a forward, 12 of a backward and 18 of a forward with its
backward, and `fraction` is their rate over that of a bf16 8192^3 product measured in the same
rounds. Gradients of weights have the dtype of the weights; the peers take bf16 alone.

By default a forward and a forward with its backward are measured, each in rounds of its own. The
gradients of one forward again and again, `backward`, say where the time of the two goes.
`--only jax_megamoe jax_megamoe_frozen` also measures experts that are not trained: without their
gradients a backward has 6 T K H I useful FLOPs. `--only jax_megamoe jax_megamoe_clamped_bias` has
the experts of gpt-oss beside those of SwiGLU, with clamped SwiGLU and biases. `--only jax_megamoe
jax_megamoe_fp8 jax_megamoe_fp8_per_call quantize_expert_weights torch_scaled_grouped_mm` has FP8
beside bf16: of weights that are quantised before, as a step does it once, or by each pass; the time
of that; and PyTorch's, with a scale a row.

What fails is reported as that: its record holds the error's text in place of figures, and the
program ends with 1 if jax_megamoe itself failed. `--set tiny` and, with XLA_FLAGS saying
--xla_force_host_platform_device_count=2, `--set ranks-tiny` run on a CPU too, with the reference
backend, to try the program.
"""

import argparse
import contextlib
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the device

import jax
from _implementations import IMPLEMENTATIONS, release_memory, use_peers
from _measured import MATMUL_SIZE, WEIGHTS, run_against_bound, run_beside_peers, variants
from _ranks import (
    EXCHANGED,
    EXCHANGED_FP8,
    PROCESS_MODELS,
    WORKER_MODULES,
    rank_variants,
    run_over_ranks,
    run_ranks_against_bound,
)
from _record import device, write
from _report import ALL_OURS, BY_NAME, FP8, OURS, Named, draw, is_chosen, table
from _shapes import FLOP_FACTORS, RANK_PEERS, SETS, Shape
from _timing import Clock, Method
from _workers import Workers

from jax_megamoe.config import SAVES

NAMES = sorted({shape.name for shapes in SETS.values() for shape in shapes})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The layer beside its peers.")
    parser.add_argument(
        "--set",
        nargs="+",
        choices=SETS,
        default=["main"],
        dest="sets",
        help="shapes to measure, main unless said; tiny and ranks-tiny are those for a CPU",
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
        choices=(*IMPLEMENTATIONS, *RANK_PEERS),
        default=[],
        metavar="NAME",
        help=f"implementations to measure, all but {', '.join(BY_NAME)} unless said: "
        f"{', '.join(IMPLEMENTATIONS)}; over several GPUs {OURS}, {FP8}, {', '.join(RANK_PEERS)}",
    )
    parser.add_argument(
        "--process-models",
        nargs="+",
        choices=PROCESS_MODELS,
        default=PROCESS_MODELS,
        help="of jax_megamoe over several GPUs",
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


class Session:
    """One run of the program: what it measures with, and the records that it has so far."""

    def __init__(self, options: argparse.Namespace, num_devices: int) -> None:
        self.options = options
        self.num_devices = num_devices
        self.method = Method(rounds=options.rounds)
        on_gpu = jax.default_backend() == "gpu"
        self.clock = Clock.of_gpus(num_devices) if on_gpu else None
        self.matmul_size = MATMUL_SIZE if on_gpu else 512
        self.beside_peers: list[Named] = []
        self.against_bound: list[Named] = []

    def run_set(self, shapes: Sequence[Shape], workers: Mapping[str, Workers]) -> None:
        options = self.options
        base, *others = shapes
        chosen_shapes = [shape for shape in shapes if shape.name in options.shapes]
        if not base.peers:
            measured = [base, *(shape for shape in others if shape in chosen_shapes)]
            if base.R == 1:
                self.against_bound += run_against_bound(measured, self.method, self.clock)
                self.keep()
                return
            for pass_name in options.passes:
                self.against_bound += run_ranks_against_bound(
                    measured, pass_name, self.method, self.clock, self.matmul_size
                )
                self.keep()
            return
        for shape in chosen_shapes:
            for pass_name in options.passes:
                if shape.R > 1:
                    self.beside_peers += self._over_ranks(shape, pass_name, workers)
                else:
                    self.beside_peers += self._on_one(shape, pass_name)
                self.keep()

    def _on_one(self, shape: Shape, pass_name: str) -> list[Named]:
        options = self.options
        chosen = variants(
            shape, pass_name, only=options.only, saves=options.saves, weights=options.weights
        )
        return run_beside_peers(shape, pass_name, chosen, self.method, self.clock, self.matmul_size)

    def _over_ranks(
        self, shape: Shape, pass_name: str, workers: Mapping[str, Workers]
    ) -> list[Named]:
        options = self.options
        chosen = rank_variants(
            shape,
            pass_name,
            only=options.only,
            saves=options.saves,
            process_models=options.process_models,
        )
        return run_over_ranks(
            shape, pass_name, chosen, workers, self.method, self.clock, self.matmul_size
        )

    def keep(self) -> None:
        """After every measurement: what is interrupted leaves what it has."""
        if self.options.out:
            records = [found for _, found in self.beside_peers + self.against_bound]
            write(self.options.out, records, self.num_devices)
        release_memory()


def in_processes(options: argparse.Namespace, sets: Sequence[Sequence[Shape]]) -> list[str]:
    """The implementations that need a process a GPU."""
    if not any(shape.R > 1 and shape.peers for shapes in sets for shape in shapes):
        return []
    needed = [EXCHANGED, EXCHANGED_FP8]
    if PROCESS_MODELS[1] in options.process_models:
        needed += [OURS, FP8]
    return [impl for impl in needed if is_chosen(impl, options.only)]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    use_peers(options.peers_path)
    sets = [SETS[name] for name in options.sets]
    num_devices = max(shape.R for shapes in sets for shape in shapes)
    with contextlib.ExitStack() as at_end:
        # First of all: they import while this process starts.
        workers = {}
        for impl in in_processes(options, sets):
            workers[impl] = Workers(WORKER_MODULES[impl], num_devices)
            at_end.callback(workers[impl].close)
        if len(jax.devices()) < num_devices:
            raise SystemExit(f"the set needs {num_devices} devices; JAX has {len(jax.devices())}")
        session = Session(options, num_devices)
        for shapes in sets:
            session.run_set(shapes, workers)
    named = session.beside_peers + session.against_bound
    print(table(named))
    if options.png:
        draw(options.png, session.beside_peers or session.against_bound, device())
    return int(any(r["impl"] in ALL_OURS and "error" in r for _, r in named))


if __name__ == "__main__":
    sys.exit(main())
