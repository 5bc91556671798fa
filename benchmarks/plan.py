"""Device time of one call of the plan kernel.

    python benchmarks/plan.py [--out benchmarks/results/plan.json]

Calls are chained inside one jitted loop: each reads a routing that depends on the plan before, so
none can be dropped or overlapped. The same loop without the plan is subtracted.
"""

import argparse
import functools
import json
import pathlib
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from _record import need_gpu, sm_clocks, write

from jax_megamoe import _ffi
from jax_megamoe.config import Dims
from jax_megamoe.plan import Step, backward_steps, forward_steps, make_plan

WARM_SECONDS = 0.3
REPEATS = 15
LOOP = 500


def even_routing(dims: Dims, seed: int) -> np.ndarray:
    """int32 [R, T, K]: K distinct experts per token, all equally likely."""
    scores = np.random.default_rng(seed).random((dims.R, dims.T, dims.E), np.float32)
    return np.argpartition(scores, dims.K, axis=-1)[..., : dims.K].astype(np.int32)


def one_expert_routing(dims: Dims, seed: int) -> np.ndarray:
    return np.full((dims.R, dims.T, dims.K), seed % dims.E, np.int32)


def chained(dims: Dims, steps: tuple[Step, ...], with_plan: bool) -> Callable[[jax.Array], object]:
    @jax.jit
    def loop(idx: jax.Array) -> jax.Array:
        def body(_: int, idx: jax.Array) -> jax.Array:
            if not with_plan:
                # The same update with a value the compiler cannot know.
                return idx.at[0, 0, 0].set(jnp.clip(idx[0, 0, 1], 0, dims.E - 1))
            plan = _ffi.plan(idx, dims, 0, steps)
            plan = jax.lax.optimization_barrier(plan)
            return idx.at[0, 0, 0].set(jnp.clip(plan.totals[0], 0, dims.E - 1))

        return jax.lax.fori_loop(0, LOOP, body, idx)

    return loop


def microseconds(function: Callable[[jax.Array], object], idx: jax.Array) -> float:
    """Median time of one iteration of the loop, after WARM_SECONDS of load."""
    end = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < end:
        jax.block_until_ready(function(idx))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(function(idx))
        times.append((time.perf_counter() - start) / LOOP * 1e6)
    return float(np.median(times))


def measure(dims: Dims) -> list[dict[str, object]]:
    rows = []
    for kernel, make_steps in (("forward", forward_steps), ("backward", backward_steps)):
        steps = make_steps(dims)
        for routing, make_idx in (("even", even_routing), ("one expert", one_expert_routing)):
            host_idx = make_idx(dims, 0)
            idx = jnp.asarray(host_idx)
            run = functools.partial(microseconds, idx=idx)
            with_plan = run(chained(dims, steps, True))
            loop_alone = run(chained(dims, steps, False))
            rows.append(
                {
                    "kernel": kernel,
                    "routing": routing,
                    "shape": {k: getattr(dims, k) for k in "TKERHI"},
                    "waves": int(make_plan(host_idx, dims, 0, steps).totals[0]),
                    "us": round(with_plan - loop_alone, 2),
                    "us_with_loop": round(with_plan, 2),
                    "us_loop_alone": round(loop_alone, 2),
                    "clock_mhz": sm_clocks()[0],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Device time of one call of the plan kernel.")
    parser.add_argument("--out", type=pathlib.Path, help="write the figures to this JSON file")
    out = parser.parse_args().out
    need_gpu()
    records = measure(Dims(T=16384, K=8, E=128, R=1, H=2048, I=768))
    if out:
        write(out, records)


if __name__ == "__main__":
    main()
