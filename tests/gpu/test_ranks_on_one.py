"""Ranks of an expert group on one GPU, each with its share of the multiprocessors: the bits of one
rank with all experts.

All of the protocol is as over NVLink, by the kernels as they are; only the memory of peers is near.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from tests import compare, emulated
from tests.cases import F32, ROUTINGS, Batch, normal_of, oracle_of
from tests.emulated import MULTIPROCESSORS, Call

pytestmark = pytest.mark.gpu

# T of all ranks, K, E, H, I.
SIZES = (
    (16, 8, 16, 64, 64),
    (776, 3, 8, 256, 192),
    (1000, 4, 8, 320, 320),
    (600, 32, 64, 448, 320),
    (304, 2, 8, 2112, 128),
    (4096, 8, 16, 1024, 768),
)


def calls_of(batch: Batch) -> list[Call]:
    backward = Call(batch, is_backward=True, float_gradients=True)
    return [Call(batch), backward, Call(batch), Call(batch, is_backward=True)]


def results(batch: Batch, ranks: int, **how: object) -> list[np.ndarray]:
    # One pass, whose weight gradients are those of one rank.
    how = {"multiprocessors": MULTIPROCESSORS[ranks], "pool_factor": float(ranks), **how}
    found = emulated.run(calls_of(batch), ranks=ranks, one_gpu=True, **how)
    return [result for of_call in found for result in of_call]


def assert_same_bits(found: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> None:
    """Where several passes may come, weight gradients come in float32, and are rounded here."""
    for i, (a, b) in enumerate(zip(found, right, strict=True)):
        compare.assert_bitwise(a.astype(b.dtype), b, f"result {i}")


def assert_as_one_rank(batch: Batch, ranks: int, **how: object) -> None:
    assert_same_bits(results(batch, ranks, **how), results(batch, 1))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_bit_is_that_of_one_rank(size: tuple[int, ...], ranks: int) -> None:
    for routing in sorted(ROUTINGS) if size[3] < 1000 else ("distinct",):
        assert_as_one_rank(normal_of(size, routing), ranks)


def test_few_multiprocessors() -> None:
    assert_as_one_rank(normal_of(SIZES[1], "skewed"), 2, multiprocessors=4)


@pytest.mark.parametrize("seed", range(1, 9))
def test_delays_in_every_role(seed: int) -> None:
    assert_as_one_rank(normal_of(SIZES[1], "distinct"), 2 << seed % 3, seed=seed)


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_is_kept(ranks: int) -> None:
    batch = normal_of(SIZES[1], "invalid")
    gradients = []
    for r in (ranks, 1):
        how = {"ranks": r, "one_gpu": True, "multiprocessors": MULTIPROCESSORS[r]}
        _, kept = emulated.forward_keeping(batch, **how)
        gradients.append(emulated.backward(batch, gate_up=kept, **how))
    assert_same_bits(*gradients)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("routing", ["one_expert", "skewed", "distinct"])
def test_several_passes(routing: str, ranks: int) -> None:
    """Weight gradients too, which are exact here, have the bits of one rank."""
    batch = oracle_of((776, 2, 8, 128, 192), routing)
    calls = [Call(batch), Call(batch, is_backward=True, float_gradients=True)] * 2
    found, right = (
        emulated.run(calls, ranks=r, one_gpu=True, multiprocessors=MULTIPROCESSORS[r], **how)
        for r, how in ((ranks, {"pool_factor": 1.25}), (1, {}))
    )
    for of_call, of_one in zip(found, right, strict=True):
        assert_same_bits(of_call, of_one)


def test_sums_that_are_rounded_on_their_way() -> None:
    batch = normal_of(SIZES[1], "distinct")
    rounded, again, exact = (
        results(batch, 4, **how) for how in ({"combine_dtype": "bfloat16"},) * 2 + ({},)
    )
    assert_same_bits(again, rounded)
    y, y_exact = rounded[0].astype(F32), exact[0].astype(F32)
    assert 0 < np.linalg.norm(y - y_exact) < 0.01 * np.linalg.norm(y_exact)
    compare.assert_bitwise(rounded[2], exact[2], "dw, which crosses as it is")
