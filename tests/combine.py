"""The sums that ranks send each other, in NumPy: what `combine_dtype="bfloat16"` makes of them."""

from collections.abc import Callable

import numpy as np

from tests.cases import BF16, F32, Batch


def of_rank(batch: Batch, rank: int, ranks: int) -> Batch:
    """The batch with the routes of one rank's experts alone."""
    local = batch.num_experts // ranks
    is_local = batch.expert_idx // local == rank
    return batch._replace(expert_idx=np.where(is_local, batch.expert_idx, -1).astype(np.int32))


def rank_sums(batch: Batch, ranks: int, one_rank: Callable[[Batch], np.ndarray]) -> np.ndarray:
    """What each rank sends, rounded to bf16: float32 [R, T, H].

    Args:
      one_rank: y or dx of one rank with all experts, bf16 [T, H]. Of one rank's routes alone it is
        that rank's subtree of the summation tree, rounded once.
    """
    return np.stack([one_rank(of_rank(batch, r, ranks)).astype(F32) for r in range(ranks)])


def summed(sums: np.ndarray) -> np.ndarray:
    """The upper levels of the tree over [R, T, H] in float32, rounded: bf16 [T, H]."""
    terms = list(sums)
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[0::2], terms[1::2], strict=True)]
    return terms[0].astype(BF16)
