"""One node in one command: is the layer right, how fast is it, beside whom, and as the model says?

    python benchmarks/headline.py --gpus 8 [--within 540] [--stages NAME ...]
                                  [--peers-path DIR] [--out FILE.json] [--pictures DIR]

For 2, 4 or 8 Hopper GPUs of one host: T = 16384 tokens on each, E = 128, K = 8, random routing, the
same on both sides; dispatch, experts and combine, without the router. First the oracle at these
sizes (tests/ranks_oracle.py), then the stages in the order of their importance, measured as by
`layer.py --set ranks`: jax_megamoe in bf16 and in FP8, in one process and in a process a GPU, with
float32 sums and with bf16 sums, beside PyTorch in bf16 and in FP8 and the JAX peer; uneven routings
against their bounds; timelines. What a backward keeps is g and u.

The results file is written after every stage, the table comes last: each of ours, how many times as
long the peers of the same rounds take, what is aimed for, and its time over that of the model
(_headline_table.py). A stage that may not end in time does not start; what is not there by
`--within` is given up. The exit status is 0 if the oracle was exact, no record of ours is an error,
and all chosen stages ran.

With XLA_FLAGS=--xla_force_host_platform_device_count=2, `--gpus 2 --tiny` tries the program on a
CPU, with the reference backend and small layers; it has no timelines, and its figures mean nothing.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the device

import jax
from _headline_table import failed, judged, table
from _implementations import backend, release_memory, use_peers
from _measured import MATMUL_SIZE
from _ranks import WORKER_MODULES, rank_variants, run_over_ranks, run_ranks_against_bound
from _record import write
from _report import FP8, OURS, Named
from _shapes import SETS, Shape
from _timing import Clock, Method
from _workers import Workers

from jax_megamoe.config import RANK_COUNTS

ROOT = pathlib.Path(__file__).resolve().parents[1]
SAVE = "gate_up"
METHOD = Method(load_seconds=0.25, timed_seconds=0.35)
SHAPES = {shape.name: shape for shape in SETS["ranks"]}
# The name of the shape, the pass, and the seconds that it may take; those of a backward come last.
BESIDE_PEERS = (
    ("30B", "forward_backward", 80),
    ("30B", "forward", 60),
    ("235B", "forward_backward", 90),
    ("235B", "forward", 70),
    ("30B", "backward", 70),
    ("235B", "backward", 80),
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """seconds: that it may take, a guess."""

    name: str
    seconds: float
    run: Callable[["Headline"], None]
    needs_gpu: bool = False


class Headline:
    """One run of the program: what it measures with, and what it has found so far.

    deadline: by time.monotonic().
    """

    def __init__(
        self, options: argparse.Namespace, workers: Mapping[str, Workers], deadline: float
    ) -> None:
        self.options = options
        self.workers = workers
        self.deadline = deadline
        on_gpu = jax.default_backend() == "gpu"
        self.clock = Clock.of_gpus(options.gpus) if on_gpu else None
        self.matmul_size = MATMUL_SIZE if on_gpu else 128
        self.method = dataclasses.replace(METHOD, rounds=options.rounds)
        self.named: list[Named] = []
        self.oracle: dict[str, Any] = {}
        self.not_run: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self._reporting = threading.Lock()

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def shape(self, name: str, **changes: Any) -> Shape:
        """Over the GPUs; of --tiny a small one with the same ratio of sizes."""
        if self.options.tiny:
            width = SHAPES[name].H // 16
            changes |= {"T": 64, "K": 2, "E": 8, "H": width, "I": 128}
        return dataclasses.replace(SHAPES[name], R=self.options.gpus, **changes)

    def run_stages(self, stages: Sequence[Stage]) -> None:
        self.not_run = {stage.name: "time was up" for stage in stages}
        for stage in stages:
            if self.left_s < stage.seconds:
                self.not_run[stage.name] = f"{self.left_s:.0f} s left of {stage.seconds:.0f}"
                continue
            start = time.monotonic()
            try:
                stage.run(self)
                del self.not_run[stage.name]
            except Exception as error:  # the other stages can still run
                self.not_run[stage.name] = f"{type(error).__name__}: {error}"[:500]
            self.seconds[stage.name] = round(time.monotonic() - start, 1)
            print(f"{stage.name}: {self.seconds[stage.name]} s, {self.left_s:.0f} left", flush=True)
            self.keep()
            release_memory()

    def check_oracle(self) -> None:
        """In a process of its own, at the sizes that are measured."""
        shapes = map(self.shape, SHAPES)
        sizes = [f"{s.T},{s.K},{s.E},{s.H},{s.I}" for s in shapes]
        arguments = ("-m", "tests.ranks_oracle", backend(), str(self.options.gpus), *sizes)
        last = self.python(*arguments).splitlines()[-1]
        self.oracle = json.loads(last.removeprefix("done: "))

    def beside_peers(self, name: str, pass_name: str) -> None:
        shape = self.shape(name)
        chosen = rank_variants(shape, pass_name, only=(OURS, FP8, *shape.peers), saves=(SAVE,))
        self.named += run_over_ranks(
            shape,
            pass_name,
            [variant for variant in chosen if variant.ep > 1],
            self.workers,
            self.method,
            self.clock,
            self.matmul_size,
            counts_bytes=pass_name == "forward_backward",
        )

    def uneven(self, impl: str) -> None:
        shapes = [self.shape("30B", routing=routing) for routing in ("random", "zipf", "one-hot")]
        shapes = [dataclasses.replace(s, name=s.routing, peers=()) for s in shapes]
        how = (self.method, self.clock, self.matmul_size, impl, SAVE)
        found = run_ranks_against_bound(shapes, "forward_backward", *how)
        self.named += [(f"30B {name}", record) for name, record in found]

    def timeline(self, pass_name: str) -> None:
        ranks = str(self.options.gpus)
        picture = self.options.pictures / f"{pass_name}-timeline-ep{ranks}.png"
        how = ("--ranks", ranks, "--pass", pass_name, "--save", SAVE, "--png", str(picture))
        print(self.python("benchmarks/timeline.py", *how))

    def python(self, *arguments: str) -> str:
        """What it prints; RuntimeError if it fails, subprocess.TimeoutExpired when time is up."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=max(self.left_s, 1),
        )
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
            raise RuntimeError(f"{arguments}: {done.returncode}: {done.stderr[-300:]}")
        return done.stdout

    @property
    def passed(self) -> bool:
        exact = self.oracle.get("wrong", 0) == 0
        return exact and not self.not_run and not failed([r for _, r in self.named])

    def keep(self) -> None:
        """After every stage: what is interrupted leaves what it has."""
        if self.options.out is None:
            return
        records = [record for _, record in self.named]
        found = {"oracle": self.oracle, "not_run": self.not_run, "seconds": self.seconds}
        write(self.options.out, records, self.options.gpus, lines=judged(records), **found)

    def report(self) -> None:
        """Once, whoever asks."""
        if not self._reporting.acquire(blocking=False):
            return
        print(f"oracle: {self.oracle or 'did not run'}")
        for name, why in self.not_run.items():
            print(f"not run: {name}: {why}")
        print(table(judged([record for _, record in self.named])), flush=True)

    def give_up(self) -> None:
        """What hangs in a kernel or a library answers to nothing else."""
        self.report()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)


def stages() -> list[Stage]:
    """In the order of their importance."""
    measured = [
        Stage(
            f"{name} {pass_name}",
            seconds,
            functools.partial(Headline.beside_peers, name=name, pass_name=pass_name),
        )
        for name, pass_name, seconds in BESIDE_PEERS
    ]
    uneven = [
        Stage(f"uneven {impl}", 40, functools.partial(Headline.uneven, impl=impl))
        for impl in (OURS, FP8)
    ]
    timelines = [
        Stage(f"timeline {name}", 30, functools.partial(Headline.timeline, pass_name=name), True)
        for name in ("forward", "backward")
    ]
    oracle = Stage("oracle", 60, Headline.check_oracle)
    of_30B, of_235B = measured[4:]
    forward, backward = timelines
    return [oracle, *measured[:4], *uneven, of_30B, forward, of_235B, backward]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [stage.name for stage in stages()]
    parser = argparse.ArgumentParser(description="The layer over the GPUs of one node.")
    parser.add_argument("--gpus", type=int, choices=RANK_COUNTS[1:], required=True)
    parser.add_argument("--within", type=float, default=540, help="seconds (default: %(default)s)")
    parser.add_argument(
        "--stages", nargs="+", choices=names, default=names, help="default: all of them"
    )
    parser.add_argument(
        "--rounds", type=int, default=METHOD.rounds, help="of all in turn (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="small layers, to try the program")
    parser.add_argument("--out", type=pathlib.Path, help="write what is found to this JSON file")
    parser.add_argument(
        "--pictures", type=pathlib.Path, default=pathlib.Path("docs"), help="of timelines"
    )
    parser.add_argument(
        "--peers-path", type=pathlib.Path, help="a directory of packages that only peers need"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    deadline = time.monotonic()
    options = parse(arguments)
    deadline += options.within
    chosen = [stage for stage in stages() if stage.name in options.stages]
    chosen = [stage for stage in chosen if not (options.tiny and stage.needs_gpu)]
    use_peers(options.peers_path)
    with contextlib.ExitStack() as at_end:
        # First of all: they import while this process starts.
        workers = {}
        for impl, module in WORKER_MODULES.items():
            workers[impl] = Workers(module, options.gpus)
            at_end.callback(workers[impl].close)
        if len(jax.devices()) < options.gpus:
            raise SystemExit(f"--gpus {options.gpus}: JAX has {len(jax.devices())} devices")
        headline = Headline(options, workers, deadline)
        limit = threading.Timer(max(headline.left_s, 0), headline.give_up)
        limit.daemon = True
        limit.start()
        headline.run_stages(chosen)
    limit.cancel()  # not before: the processes beside this one may hang at their end
    headline.report()
    return int(not headline.passed)


if __name__ == "__main__":
    sys.exit(main())
