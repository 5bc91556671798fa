"""The timeline of one pass: which multiprocessor did what, when, and what it waited for.

    python benchmarks/timeline.py [--pass backward] [--save gate_up] [--weights float32]
                                  [--shape 30B] [--png docs/forward-timeline.png] [--out FILE.json]

The traced call comes straight after LOAD_SECONDS of ordinary calls, so it runs at the sustained
clock. The device's timer steps by about a microsecond. The results file holds a line a kind, and
the time of a call with and without the trace.
"""

import argparse
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from _record import device, need_gpu, write
from _shapes import BASE, SEED, SETS, Shape, inputs, normal
from _timing import Method, Run, load
from _trace import Trace, decode, draw, summary

from jax_megamoe import _ffi
from jax_megamoe.config import SAVES, Dims, MegaMoEConfig

LOAD_SECONDS = 0.3
PASSES = ("forward", "backward")
SHAPES = {shape.name: shape for name in ("main", "cliffs") for shape in SETS[name]}
Times = dict[str, float]


def call_of(shape: Shape, pass_name: str, save: str, weights: str) -> Callable[..., Any]:
    """One call of a kernel on the shape's arrays; its option is trace=True."""
    dims = Dims(T=shape.T, K=shape.K, E=shape.E, R=1, H=shape.H, I=shape.I)
    common = {"dims": dims, "config": MegaMoEConfig(backend="cuda"), "axis_name": None}
    keep = save == "gate_up"
    forward = functools.partial(_ffi.forward_call, **common, keep_gate_up=keep)
    jit = functools.partial(jax.jit, static_argnames="trace")
    arrays = inputs(shape, weights)
    if pass_name == "forward":
        return functools.partial(jit(forward), *arrays)
    dy = normal(jax.random.key(SEED + 1), (shape.T, shape.H), "bf16")
    kept = {"gate_up": jax.jit(forward)(*arrays)[-1]} if keep else {}
    backward = functools.partial(_ffi.backward_call, **common)
    return functools.partial(jit(backward), dy, *arrays, **kept)


def traced_call(shape: Shape, pass_name: str, save: str, weights: str) -> tuple[Trace, Times]:
    """The trace of one sustained call, and milliseconds of calls with and without one."""
    call = call_of(shape, pass_name, save, weights)
    plain, traced = (
        Run(f, jax.block_until_ready) for f in (call, functools.partial(call, trace=True))
    )
    times = {}
    for name, run in (("ms", plain), ("ms_traced", traced)):
        run.wait(run.call())
        each = load(run, LOAD_SECONDS)
        num_calls = int(Method.timed_seconds / each) + 1
        times[name] = round(run.seconds(num_calls) / num_calls * 1e3, 4)
    load(plain, LOAD_SECONDS)
    *_, records = traced.call()
    return decode(np.asarray(records)), times


def main() -> None:
    parser = argparse.ArgumentParser(description="The timeline of one pass.")
    parser.add_argument("--pass", dest="pass_name", choices=PASSES, default="forward")
    parser.add_argument("--save", choices=SAVES, default="none", help="what the forward keeps")
    parser.add_argument("--weights", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--shape", choices=SHAPES, default=BASE.name)
    parser.add_argument("--png", type=pathlib.Path, help="draw the timeline into this file")
    parser.add_argument("--out", type=pathlib.Path, help="write the summary to this JSON file")
    options = parser.parse_args()
    need_gpu()
    shape = SHAPES[options.shape]
    trace, times = traced_call(shape, options.pass_name, options.save, options.weights)
    lines = summary(trace)
    print("| " + " | ".join(lines[0]) + " |\n" + "|---" * len(lines[0]) + "|")
    for line in lines:
        print("| " + " | ".join(map(str, line.values())) + " |")
    print(f"a call takes {times['ms']} ms, with a trace {times['ms_traced']} ms")
    if options.png:
        sizes = f"T {shape.T}, H {shape.H}, I {shape.I}, E {shape.E}, K {shape.K}"
        how = f"save {options.save}, {options.weights} weights"
        title = f"{options.pass_name}, {how}, {shape.name} ({sizes}), {device()}"
        draw(options.png, trace, title)
    if options.out:
        how = {"save": options.save, "weights_dtype": options.weights}
        record = {"shape": shape.name, "pass": options.pass_name, **how, **times, "kinds": lines}
        write(options.out, [record])


if __name__ == "__main__":
    main()
