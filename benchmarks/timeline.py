"""The timeline of one pass: which multiprocessor did what, when, and what it waited for.

    python benchmarks/timeline.py [--pass backward] [--save gate_up] [--weights float32]
                                  [--shape 30B] [--ranks 2] [--png docs/forward-timeline.png]
                                  [--out FILE.json]

The traced call comes straight after LOAD_SECONDS of ordinary calls, so it runs at the sustained
clock. The device's timer steps by about a microsecond. The results file holds a line a kind, and
the time of a call with and without the trace.

With several ranks, one process runs them all, T tokens on each; the picture has the rows of all on
one time axis (`_trace.align`), and the rate at which bytes come into each GPU: the bytes are those
of the model of docs/protocol.md, the times those of the records.
"""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from _nvlink import nvlink_bytes
from _ranks import AXIS, expert_mesh, on_ranks
from _record import device, need_gpu, write
from _shapes import BASE, SEED, SETS, Shape, inputs, normal
from _timing import Method, Run, load
from _trace import PULL, PUSH, Trace, decode_ranks, overlap, summary
from _trace_picture import draw
from jax.sharding import Mesh, PartitionSpec

from jax_megamoe import _ffi
from jax_megamoe.config import RANK_COUNTS, SAVES, Dims, MegaMoEConfig

LOAD_SECONDS = 0.3
PASSES = ("forward", "backward")
SHAPES = {shape.name: shape for name in ("main", "cliffs") for shape in SETS[name]}
Times = dict[str, float]


def calls_of(
    shape: Shape, pass_name: str, save: str, weights: str
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """One call of a kernel on the shape's arrays, over R devices if R > 1: without a trace, with.

    With one, the last result holds the records of each rank, those of rank 0 first.
    """
    mesh = expert_mesh(shape.R) if shape.R > 1 else None
    keep = save == "gate_up"
    arrays = inputs(shape, weights)
    if pass_name == "backward":
        arrays = [normal(jax.random.key(SEED + 1), arrays[0].shape, "bf16"), *arrays]
    if mesh is not None:
        arrays = on_ranks(mesh, arrays)
    if pass_name == "backward" and keep:
        forward = kernel(shape, mesh, "forward", keep, trace=False)
        arrays = [*arrays, forward(*arrays[1:])[-1]]
    plain, traced = (kernel(shape, mesh, pass_name, keep, trace=trace) for trace in (False, True))
    return functools.partial(plain, *arrays), functools.partial(traced, *arrays)


def kernel(
    shape: Shape, mesh: Mesh | None, pass_name: str, keep: bool, *, trace: bool
) -> Callable[..., tuple[jax.Array, ...]]:
    """The call as a function of its arrays; with `keep` the last ones of a backward are g and u."""
    common: dict[str, Any] = {
        "dims": Dims(T=shape.T, K=shape.K, E=shape.E, R=shape.R, H=shape.H, I=shape.I),
        "config": MegaMoEConfig(backend="cuda"),
        "axis_name": None if mesh is None else AXIS,
        "trace": trace,
    }

    def of_one_rank(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        if pass_name == "forward":
            return _ffi.forward_call(*arrays, **common, keep_gate_up=keep)
        kept = arrays[-1] if keep else None
        return _ffi.backward_call(*arrays[:7], **common, gate_up=kept)

    if mesh is None:
        return jax.jit(of_one_rank)
    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(of_one_rank, mesh=mesh, in_specs=spec, out_specs=spec))


def traced_call(shape: Shape, pass_name: str, save: str, weights: str) -> tuple[list[Trace], Times]:
    """The traces of one sustained call, one a rank, and milliseconds with and without one."""
    plain, traced = (
        Run(f, jax.block_until_ready, num_devices=shape.R)
        for f in calls_of(shape, pass_name, save, weights)
    )
    times = {}
    for name, run in (("ms", plain), ("ms_traced", traced)):
        run.wait(run.call())
        each = load(run, LOAD_SECONDS)
        num_calls = int(Method.timed_seconds / each) + 1
        times[name] = round(run.seconds(num_calls) / num_calls * 1e3, 4)
    load(plain, LOAD_SECONDS)
    *_, records = traced.call()
    return decode_ranks(np.asarray(records), shape.R), times


def transferred(shape: Shape, pass_name: str) -> dict[str, float] | None:
    """Bytes that a rank reads of others and sends them, by kind of record; None for one rank."""
    if shape.R == 1:
        return None
    moved = nvlink_bytes(shape, pass_name)
    return {PULL: moved["rows"], PUSH: moved["sums"]}


def main() -> None:
    parser = argparse.ArgumentParser(description="The timeline of one pass.")
    parser.add_argument("--pass", dest="pass_name", choices=PASSES, default="forward")
    parser.add_argument("--save", choices=SAVES, default="none", help="what the forward keeps")
    parser.add_argument("--weights", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--shape", choices=SHAPES, default=BASE.name)
    parser.add_argument("--png", type=pathlib.Path, help="draw the timeline into this file")
    parser.add_argument("--out", type=pathlib.Path, help="write the summary to this JSON file")
    parser.add_argument(
        "--ranks", type=int, choices=RANK_COUNTS, default=1, help="GPUs that share the experts"
    )
    options = parser.parse_args()
    need_gpu()
    shape = dataclasses.replace(SHAPES[options.shape], R=options.ranks)
    if len(jax.devices()) < shape.R:
        raise SystemExit(f"--ranks {shape.R}: JAX has {len(jax.devices())} devices")
    traces, times = traced_call(shape, options.pass_name, options.save, options.weights)
    lines = [{"rank": rank, **line} for rank, t in enumerate(traces) for line in summary(t)]
    print("| " + " | ".join(lines[0]) + " |\n" + "|---" * len(lines[0]) + "|")
    for line in lines:
        print("| " + " | ".join(map(str, line.values())) + " |")
    print(f"a call takes {times['ms']} ms, with a trace {times['ms_traced']} ms")
    overlaps = [overlap(trace) for trace in traces]
    for rank, shares in enumerate(overlaps):
        for kind, share in shares.items():
            print(f"rank {rank}: {share:.0%} of the time of {kind} lies within the products")
    if options.png:
        sizes = f"T {shape.T}, H {shape.H}, I {shape.I}, E {shape.E}, K {shape.K}, R {shape.R}"
        how = f"save {options.save}, {options.weights} weights"
        title = f"{options.pass_name}, {how}, {shape.name} ({sizes}), {device()}"
        draw(options.png, traces, title, transferred(shape, options.pass_name))
    if options.out:
        how = {"save": options.save, "weights_dtype": options.weights, "ep": shape.R}
        record = {"shape": shape.name, "pass": options.pass_name, **how, **times, "kinds": lines}
        write(options.out, [record | {"within_products": overlaps}], shape.R)
    if shape.R > 1 and not all({PULL, PUSH} <= set(shares) for shares in overlaps):
        raise SystemExit("a rank's trace shows no transfer from its peers, or none to them")


if __name__ == "__main__":
    main()
