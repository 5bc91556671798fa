"""How a wait that fails on the device becomes a Python exception: what each way does and costs.

    python benchmarks/fault_path.py [--out benchmarks/results/fault_path.json]

Each way runs in its own process. `dispatch` is how long the call holds the host when the wait
succeeds after 20 ms: about 20,000 us means that the host cannot run ahead of the device.
"""

import argparse
import functools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from _record import need_gpu, write

from jax_megamoe import _ffi

REPORTS = ("future", "next_call", "trap")
MS = 1_000_000  # nanoseconds
WAIT_NS = 20 * MS
DEADLINE_NS = 200 * MS
REPEATS = 20
NO_EXCEPTION = "none"


@functools.partial(jax.jit, static_argnames=("deadline_ns", "release_ns", "report"))
def step(trigger: jax.Array, *, deadline_ns: int, release_ns: int, report: str) -> jax.Array:
    """A probe between two ordinary operations, as a layer lies in a training step."""
    came, _ = _ffi.wait_probe(
        trigger + 1, deadline_ns=deadline_ns, release_ns=release_ns, report=report
    )
    return came * 2


def dispatch_us(report: str, release_ns: int) -> tuple[float, float]:
    """Median microseconds until the call returns, and until its result is ready."""
    trigger = jnp.zeros(1, jnp.int32)
    call = functools.partial(
        step, trigger, deadline_ns=60_000 * MS, release_ns=release_ns, report=report
    )
    jax.block_until_ready(call())
    returned, ready = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = call()
        returned.append(time.perf_counter() - start)
        jax.block_until_ready(result)
        ready.append(time.perf_counter() - start)
    return float(np.median(returned)) * 1e6, float(np.median(ready)) * 1e6


def raised_by(stages: list[tuple[str, Callable[[], object]]]) -> tuple[str, str]:
    """The name of the first stage that raises, and the text of its exception."""
    for name, stage in stages:
        try:
            stage()
        except Exception as error:
            return name, f"{type(error).__name__}: {error}"
    return NO_EXCEPTION, ""


def stages_of(call: Callable[[], jax.Array], name: str) -> list[tuple[str, Callable[[], object]]]:
    results: list[jax.Array] = []
    return [
        (f"{name}: dispatch", lambda: results.append(call())),
        (f"{name}: block_until_ready", lambda: jax.block_until_ready(results[-1])),
        (f"{name}: read", lambda: jax.device_get(results[-1])),
    ]


def observe(report: str) -> dict[str, object]:
    """Runs one way in this process."""
    free_returned, free_ready = dispatch_us(report, 0)
    wait_returned, wait_ready = dispatch_us(report, WAIT_NS)
    trigger = jnp.zeros(1, jnp.int32)
    failing = functools.partial(
        step, trigger, deadline_ns=DEADLINE_NS, release_ns=-1, report=report
    )
    passing = functools.partial(step, trigger, deadline_ns=DEADLINE_NS, release_ns=0, report=report)
    jax.block_until_ready(passing())
    where, text = raised_by(stages_of(failing, "failing step") + stages_of(passing, "next step"))
    afterwards, trouble = raised_by(
        [
            ("an unrelated operation", lambda: jax.device_get(jnp.arange(8).sum())),
            *stages_of(passing, "a later step"),
        ]
    )
    return {
        "report": report,
        "raised_by": where,
        "text": text,
        "dispatch_us_no_wait": round(free_returned, 1),
        "ready_us_no_wait": round(free_ready, 1),
        "dispatch_us_20ms_wait": round(wait_returned, 1),
        "ready_us_20ms_wait": round(wait_ready, 1),
        "process_goes_on": "yes" if afterwards == NO_EXCEPTION else f"no: {afterwards}",
        "trouble": trouble,
    }


def observe_in_child(report: str) -> dict[str, object]:
    command = [sys.executable, __file__, "--child", report]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return {"report": report, "raised_by": "the process hung", "process_goes_on": "no"}
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {
            "report": report,
            "raised_by": f"the process ended with code {child.returncode}",
            "process_goes_on": "no",
            "trouble": child.stderr[-2000:],
        }
    return json.loads(lines[-1]) | {"exit_code": child.returncode}


def main() -> None:
    parser = argparse.ArgumentParser(description="How a failed wait becomes an exception.")
    parser.add_argument("--out", type=pathlib.Path, help="write the observations to this file")
    parser.add_argument("--child", choices=REPORTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(observe(arguments.child)), flush=True)
        return
    need_gpu()
    rows = [observe_in_child(report) for report in REPORTS]
    columns = ("report", "raised_by", "dispatch_us_no_wait", "dispatch_us_20ms_wait")
    columns += ("ready_us_20ms_wait", "process_goes_on", "exit_code")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row.get(column, "-")) for column in columns) + " |")
    for row in rows:
        print(f"\n{row['report']}: {row.get('text', '')}\n{row.get('trouble', '')}".rstrip())
    if arguments.out:
        write(arguments.out, rows)


if __name__ == "__main__":
    main()
