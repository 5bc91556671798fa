"""The oracle (cases.py) on the reference, and bitwise equality over the rank counts.

Any misrouted, dropped, duplicated or stale row gives a wrong number, so these tests are exact.
"""

import itertools
from typing import Any

import numpy as np
import pytest

from tests import cases, compare, layer
from tests.cases import BF16, F32, ROUTINGS

RANKS = (None, 1, 2, 4, 8)
T, K, E = 32, 4, 16
DTYPES = {"bf16": BF16, "float32": F32}


def _oracle(routing: str, dtype: np.dtype, **how: Any) -> cases.Batch:
    ids = ROUTINGS[routing](tokens=T, choices=K, experts=E)
    return cases.oracle(ids, 0.5, num_experts=E, dtype=dtype, **how)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("precision", DTYPES)
def test_oracle_is_exact(precision: str, num_ranks: int | None, routing: str) -> None:
    batch = _oracle(routing, DTYPES[precision])
    found = layer.run(batch, num_ranks, precision=precision)
    compare.assert_results_exact(found, cases.oracle_results(batch))


@pytest.mark.parametrize("routing", ["invalid", "skewed"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_oracle_is_exact_without_check_vma(num_ranks: int, routing: str) -> None:
    batch = _oracle(routing, BF16)
    found = layer.run(batch, num_ranks, check_vma=False, precision="bf16")
    compare.assert_results_exact(found, cases.oracle_results(batch))


@pytest.mark.parametrize("routing", ["invalid", "skewed"])
@pytest.mark.parametrize("num_ranks", [None, 4])
def test_oracle_is_exact_for_bf16_tokens_and_float32_weights(
    num_ranks: int | None, routing: str
) -> None:
    batch = _oracle(routing, BF16, weight_dtype=F32)
    found = layer.run(batch, num_ranks, precision="bf16")
    compare.assert_results_exact(found, cases.oracle_results(batch))
    assert [a.dtype for a in found] == [BF16, BF16, BF16, F32, F32, F32]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("precision", DTYPES)
def test_every_rank_count_gives_the_same_bits(precision: str, routing: str) -> None:
    ids = ROUTINGS[routing](tokens=T, choices=K, experts=E)
    batch = cases.normal(ids, num_experts=E, dtype=DTYPES[precision])
    alone = layer.run(batch, None, precision=precision)
    for num_ranks in RANKS[1:]:
        compare.assert_results_bitwise(layer.run(batch, num_ranks, precision=precision), alone)


def test_every_rank_count_gives_the_same_bits_over_several_tiles_of_an_expert() -> None:
    """More than 128 rows of one expert, some of them of every rank."""
    ids = ROUTINGS["skewed"](tokens=256, choices=2, experts=8)
    batch = cases.normal(ids, num_experts=8)
    assert cases.counts(batch).max() > 128
    alone = layer.run(batch, None, precision="float32")
    for num_ranks in (2, 8):
        compare.assert_results_bitwise(layer.run(batch, num_ranks, precision="float32"), alone)


# The tree of the contract, once more and independently: experts form B contiguous blocks.
BLOCKS = {1: 1, 2: 2, 3: 1, 4: 4, 6: 2, 8: 8, 12: 4, 16: 8, 64: 8}


def _run_frozen(batch: cases.Batch, precision: str) -> cases.Results:
    """Without weight gradients, which these tests do not need."""
    return layer.run(batch, precision=precision, trainable_experts=False)


def _route_rows(batch: cases.Batch, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """What each route adds to y and to dx, float32 [T, K, H]: each choice called alone.

    Precision "bf16" rounds y, so there y's rows are taken at weight 1, where the rounded o is the
    result itself, and weighted here.
    """
    y_rows, dx_rows = [], []
    ones = np.ones_like(batch.expert_weight)
    for k in range(batch.expert_idx.shape[1]):
        only_k = np.where(np.arange(ones.shape[1]) == k, batch.expert_idx, -1)
        alone = batch._replace(expert_idx=only_k)
        dx_rows.append(_run_frozen(alone, precision).dx)
        unweighted = _run_frozen(alone._replace(expert_weight=ones), precision).y
        y_rows.append(batch.expert_weight[:, k : k + 1] * unweighted)
    return np.stack(y_rows, 1), np.stack(dx_rows, 1)


def _contract_sum(rows: np.ndarray, ids: np.ndarray, num_experts: int, blocks: int) -> np.ndarray:
    """float32: choice order inside a block from 0, then a balanced binary tree over the blocks."""
    num_tokens, num_choices, hidden = rows.shape
    sums = np.zeros((blocks, num_tokens, hidden), np.float32)
    for t, k in itertools.product(range(num_tokens), range(num_choices)):
        if 0 <= ids[t, k] < num_experts:
            sums[ids[t, k] * blocks // num_experts, t] += rows[t, k]
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    return sums[0]


@pytest.mark.parametrize(
    ("num_experts", "precision"),
    [*((e, "float32") for e in BLOCKS), *((e, "bf16") for e in (3, 12, 16))],
)
def test_sums_follow_the_tree_of_the_contract(num_experts: int, precision: str) -> None:
    ids = ROUTINGS["duplicates"](tokens=16, choices=8, experts=num_experts + 1)
    batch = cases.normal(ids, num_experts=num_experts)
    found = _run_frozen(batch, precision)
    for got, rows in zip((found.y, found.dx), _route_rows(batch, precision), strict=True):
        right = _contract_sum(rows, ids, num_experts, BLOCKS[num_experts])
        if precision == "bf16":
            right = right.astype(BF16).astype(np.float32)
        compare.assert_bitwise(got, right)


@pytest.mark.parametrize("wrong", ["choice order", "reversed choices", "half the blocks"])
def test_another_order_of_summation_would_be_seen(wrong: str) -> None:
    """The data of the test above tells orders apart: a wrong one changes many sums."""
    ids = ROUTINGS["duplicates"](tokens=16, choices=8, experts=13)
    rows, _ = _route_rows(cases.normal(ids, num_experts=12), "float32")
    right = _contract_sum(rows, ids, 12, 4)
    if wrong == "reversed choices":
        other = _contract_sum(rows[:, ::-1], ids[:, ::-1], 12, 4)
    else:
        other = _contract_sum(rows, ids, 12, {"choice order": 1, "half the blocks": 2}[wrong])
    assert np.mean(other != right) > 0.05
