"""Ranks of an expert group on one GPU with precision="fp8_block": the bits of one rank with all
experts. See test_ranks_on_one.py.
"""

import functools
from typing import Any

import numpy as np
import pytest

from tests import cases, compare, emulated, fp8
from tests.cases import ROUTINGS, Batch, Results, normal_of, oracle_of
from tests.emulated import MULTIPROCESSORS

pytestmark = pytest.mark.gpu

# T of all ranks, K, E, H, I.
SIZES = (
    (16, 8, 16, 128, 128),
    (776, 3, 8, 256, 384),
    (600, 32, 64, 640, 384),
    (304, 2, 8, 2176, 128),
    (4096, 8, 16, 1024, 768),
)


@functools.cache
def scaled(size: tuple[int, ...], routing: str) -> Batch:
    return fp8.with_scales(normal_of(size, routing))


@functools.cache
def of_one_rank(size: tuple[int, ...], routing: str) -> Results:
    return run(scaled(size, routing), 1)


def run(batch: Batch, ranks: int, *, keep: bool = False, **how: Any) -> Results:
    """By calls one after another: a forward, and a backward of what it has kept or of nothing. In
    one pass, unless a factor is given."""
    weights = fp8.quantized_weights(batch)
    how = {"multiprocessors": MULTIPROCESSORS[ranks], "pool_factor": float(ranks), **how}
    how |= {"ranks": ranks, "one_gpu": True}
    y, *others = emulated.forward_fp8(batch, weights, keep=keep, **how)
    how["gate_up"] = others[-1] if keep else None
    return Results(y, *emulated.backward_fp8(batch, weights, weight_dtype=cases.F32, **how))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_bit_is_that_of_one_rank(size: tuple[int, ...], ranks: int) -> None:
    for routing, keep in (("distinct", True), ("skewed", False), ("invalid", True)):
        found = run(scaled(size, routing), ranks, keep=keep)
        compare.assert_results_bitwise(found, of_one_rank(size, routing))


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_every_routing(routing: str) -> None:
    found = run(scaled(SIZES[0], routing), 4)
    compare.assert_results_bitwise(found, of_one_rank(SIZES[0], routing))


@pytest.mark.parametrize("seed", range(1, 9))
def test_delays_in_every_role(seed: int) -> None:
    found = run(scaled(SIZES[1], "distinct"), 2 << seed % 3, keep=seed % 2 == 0, seed=seed)
    compare.assert_results_bitwise(found, of_one_rank(SIZES[1], "distinct"))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_several_passes(ranks: int, keep: bool) -> None:
    """Weight gradients too, which are exact with the oracle."""
    oracle = oracle_of((776, 2, 8, 128, 256), "skewed")
    found, right = run(oracle, ranks, keep=keep, pool_factor=1.25), run(oracle, 1)
    compare.assert_results_bitwise(found, right)
    found = run(scaled(SIZES[1], "skewed"), ranks, keep=keep, pool_factor=1.25)
    right = of_one_rank(SIZES[1], "skewed")
    for name, a, b in list(zip(Results._fields, found, right, strict=True))[:3]:
        compare.assert_bitwise(a, b, name)
    compare.assert_within(found, right, 1e-4)


def test_calls_one_after_another_in_the_same_memory() -> None:
    size = (776, 3, 8, 256, 384)
    batches = [scaled(size, routing) for routing in ("distinct", "one_expert", "skewed")]
    batches = [
        b._replace(x=np.roll(b.x, 7 * i, axis=0), dy=np.roll(b.dy, 5 * i, axis=0))
        for i, b in enumerate(batches)
    ]
    calls = [
        emulated.Call(b, is_backward=i, float_gradients=True, quantized=fp8.quantized_weights(b))
        for b in batches * 4
        for i in (False, True)
    ]
    how: dict[str, Any] = {"pool_factor": 4.0, "multiprocessors": MULTIPROCESSORS[4]}
    found = emulated.run(calls, ranks=4, one_gpu=True, **how)
    for i, batch in enumerate(batches * 4):
        (y,), gradients = found[2 * i : 2 * i + 2]
        compare.assert_results_bitwise(Results(y, *gradients), run(batch, 1))
