"""The timeline of one pass: which multiprocessor did what, when, and what it waited for.

    python benchmarks/timeline.py [--pass backward] [--weights float32] [--shape 30B]
                                  [--png docs/forward-timeline.png] [--out FILE.json]

The traced call comes straight after LOAD_SECONDS of ordinary calls, so it runs at the sustained
clock. The device's timer steps by about a microsecond. The results file holds a line a kind, and
the time of a call with and without the trace.
"""

import argparse
import functools
import pathlib

import jax
import numpy as np
from _record import device, need_gpu, write
from _shapes import BASE, SEED, SETS, Shape, inputs, normal
from _timing import Method, Run, load, seconds_of
from _trace import Trace, decode, draw, summary

from jax_megamoe import _ffi
from jax_megamoe.config import Dims, MegaMoEConfig

LOAD_SECONDS = 0.3
PASSES = ("forward", "backward")
SHAPES = {shape.name: shape for name in ("main", "cliffs") for shape in SETS[name]}
Times = dict[str, float]


def traced_call(shape: Shape, pass_name: str, weights: str) -> tuple[Trace, Times]:
    """The trace of one sustained call, and milliseconds of calls with and without one."""
    dims = Dims(T=shape.T, K=shape.K, E=shape.E, R=1, H=shape.H, I=shape.I)
    kernel = {"forward": _ffi.forward_call, "backward": _ffi.backward_call}[pass_name]
    config = MegaMoEConfig(backend="cuda")
    call = functools.partial(kernel, dims=dims, config=config, axis_name=None)
    arrays = inputs(shape, weights)
    if pass_name == "backward":
        arrays = [normal(jax.random.key(SEED + 1), (shape.T, shape.H), "bf16"), *arrays]
    plain, traced = (
        Run(functools.partial(jax.jit(f), *arrays), jax.block_until_ready)
        for f in (call, functools.partial(call, trace=True))
    )
    times = {}
    for name, run in (("ms", plain), ("ms_traced", traced)):
        run.wait(run.call())
        each = load(run, LOAD_SECONDS)
        num_calls = int(Method.timed_seconds / each) + 1
        times[name] = round(seconds_of(run, num_calls) / num_calls * 1e3, 4)
    load(plain, LOAD_SECONDS)
    *_, records = traced.call()
    return decode(np.asarray(records)), times


def main() -> None:
    parser = argparse.ArgumentParser(description="The timeline of one pass.")
    parser.add_argument("--pass", dest="pass_name", choices=PASSES, default="forward")
    parser.add_argument("--weights", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--shape", choices=SHAPES, default=BASE.name)
    parser.add_argument("--png", type=pathlib.Path, help="draw the timeline into this file")
    parser.add_argument("--out", type=pathlib.Path, help="write the summary to this JSON file")
    options = parser.parse_args()
    need_gpu()
    shape = SHAPES[options.shape]
    trace, times = traced_call(shape, options.pass_name, options.weights)
    lines = summary(trace)
    print("| " + " | ".join(lines[0]) + " |\n" + "|---" * len(lines[0]) + "|")
    for line in lines:
        print("| " + " | ".join(map(str, line.values())) + " |")
    print(f"a call takes {times['ms']} ms, with a trace {times['ms_traced']} ms")
    if options.png:
        sizes = f"T {shape.T}, H {shape.H}, I {shape.I}, E {shape.E}, K {shape.K}"
        name = f"{options.pass_name}, {options.weights} weights, {shape.name}"
        title = f"{name} ({sizes}, {shape.routing} routing), {device()}"
        draw(options.png, trace, title)
    if options.out:
        record = {"pass": options.pass_name, "weights_dtype": options.weights, **times}
        write(options.out, [{"shape": shape.name, **record, "kinds": lines}])


if __name__ == "__main__":
    main()
