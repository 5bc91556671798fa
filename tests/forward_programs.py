"""Programs around the CUDA forward, each for a process of its own: python -m tests.forward_programs

NAME ARGUMENTS. A program that did its work says so in its last line, "done: ..."; it prints what it
counted, so that doing nothing is no success.
"""

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import _ffi, memory_plan
from tests import cases, delays, device_oracle
from tests.cases import BF16, ROUTINGS
from tests.forward import (
    SIZES,
    bits,
    dims_of,
    forward,
    launched,
    operands,
    random_batch,
)
from tests.layer import bind

# What is compared across processes and under delays: sizes and routings that keep all roles busy.
BATCHES = ((SIZES[3], "invalid"), (SIZES[5], "distinct"), (SIZES[6], "skewed"))


def done(**counted: Any) -> None:
    print("done:", json.dumps(counted))


def counted(output: str) -> dict[str, Any]:
    """What a program counted, from all that it printed; AssertionError if it did not get there."""
    last = output.strip().splitlines()[-1:]
    assert last and last[0].startswith("done: "), f"the program did not end: {output[-2000:]}"
    return json.loads(last[0].removeprefix("done: "))


def results() -> list[np.ndarray]:
    """The bits of y of each of BATCHES."""
    return [np.asarray(bits(forward(*operands(random_batch(*b)))[0])) for b in BATCHES]


def save(path: str) -> None:
    """Writes `results` to a file."""
    found = results()
    np.savez(path, *found)
    done(batches=len(found))


def load(path: str) -> list[np.ndarray]:
    with np.load(path) as saved:
        return [saved[name] for name in saved.files]


def first_use_from_two_threads() -> None:
    """Two threads make the first call of the process at the same moment, of different sizes."""
    batches = [random_batch(*BATCHES[0]), random_batch(*BATCHES[2])]
    found: list[Any] = [None, None]
    barrier = threading.Barrier(2)

    def call(i: int) -> None:
        arrays = operands(batches[i])
        barrier.wait()
        found[i] = [np.asarray(bits(forward(*arrays)[0])) for _ in range(20)]

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for batch, ys in zip(batches, found, strict=True):
        want = np.asarray(bits(forward(*operands(batch))[0]))
        assert len(ys) == 20 and all(np.array_equal(y, want) for y in ys)
    done(calls=sum(map(len, found)))


def steps(num_steps: str) -> None:
    """Steps with another routing each, other kernels before and after the call; all exact."""
    tokens, choices, experts, hidden = 96, 2, 8, 128
    x, _, weight, *weights = device_oracle.operands(
        np.zeros((tokens, choices), np.int32), experts=experts, hidden=hidden, intermediate=64
    )

    op = bind(backend="cuda")

    @jax.jit
    def step(x: Any, ids: Any, wrong: Any) -> Any:
        x, ids = jnp.flip(x * 2, axis=0) / 2, (ids + 1) % experts
        y = op(x, ids, weight, *weights)
        tags = jnp.asarray(device_oracle.tags(experts))[ids].sum(axis=1) * device_oracle.WEIGHT
        right = tags[:, None] * jnp.asarray(device_oracle.scales(hidden))[None, :]
        return x, ids, wrong + jnp.any(y != right.astype(y.dtype)).astype(jnp.int32)

    rng = np.random.default_rng(0)
    ids = jnp.zeros((tokens, choices), jnp.int32)
    wrong = jnp.zeros((), jnp.int32)
    for i in range(int(num_steps)):
        if i % 50 == 0:
            ids = jnp.asarray(rng.integers(0, experts, (tokens, choices)), jnp.int32)
        x, ids, wrong = step(x, ids, wrong)
    assert int(wrong) == 0, f"{int(wrong)} steps are wrong"
    done(steps=int(num_steps))


def tiny() -> None:
    """Small calls of every kind, fused and in parts, each exact: for a checker that slows them."""
    num_calls = 0
    for size in ((1, 1, 1, 64, 64), (5, 8, 16, 64, 64), (150, 3, 6, 320, 192)):
        for routing in sorted(ROUTINGS):
            batch = cases.oracle_of(size, routing)
            right = cases.oracle_results(batch).y
            for launches in (_ffi.FUSED, _ffi.UNFUSED):
                y, _ = launched(*operands(batch), dims=dims_of(batch), launches=launches)
                np.testing.assert_array_equal(np.asarray(y), right.astype(BF16))
                num_calls += 1
    done(calls=num_calls)


def delayed_calls() -> delays.Calls:
    """Of BATCHES."""

    def prepared(batch: cases.Batch) -> Any:
        dims, arrays = dims_of(batch), operands(batch)
        return lambda launches: [bits(launched(*arrays, dims=dims, launches=launches)[0])]

    of = {b: prepared(random_batch(*b)) for b in BATCHES}
    return delays.Calls(of, _ffi.FUSED, _ffi.UNFUSED)


def delayed(path: str, num_runs: str) -> None:
    """Runs with delays; the file has the right results."""
    done(**delays.run(delayed_calls(), load(path), int(num_runs)))


def too_large() -> None:
    """A call that no device holds, one for which nothing is free, and the same one afterwards."""
    limit = (jax.local_devices()[0].memory_stats() or {})["bytes_limit"]
    sizes: dict[str, Any] = {"K": 8, "E": 8, "H": 1024, "I": 64}
    per_token = memory_plan(T=1001, **sizes).total_bytes - memory_plan(T=1, **sizes).total_bytes

    def call(fraction: float) -> list[int]:
        tokens = int(fraction * limit / per_token * 1000)
        ids = ROUTINGS["duplicates"](tokens=tokens, choices=sizes["K"], experts=sizes["E"])
        arrays = device_oracle.operands(ids, experts=8, hidden=1024, intermediate=64)
        return device_oracle.rows_wrong(forward(*arrays)[0], ids, experts=8)

    texts = {}
    start = time.perf_counter()
    try:
        call(1.1)
    except MemoryError as error:
        texts["refused"] = str(error)
    refused_s = time.perf_counter() - start
    ballast = jnp.zeros(int(0.75 * limit) // 4, jnp.float32).block_until_ready()
    try:
        call(0.4)
    except jax.errors.JaxRuntimeError as error:
        texts["exhausted"] = str(error).splitlines()[0]
    del ballast
    assert call(0.4) == []
    done(limit=limit, refused_s=refused_s, **texts)


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (save, first_use_from_two_threads, steps, tiny, delayed, too_large)
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    functools.partial(PROGRAMS[name], *arguments)()
