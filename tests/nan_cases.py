"""NaN and Inf reach what depends on them, and not a bit of anything else.

Each case puts a value into one argument and names what may depend on it, by the formulas of
docs/architecture.md; all else must have the bits of a call without it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests import compare, layer
from tests.cases import F32, Batch, Results, Size, normal_of

VALUES = (np.nan, np.inf)
# T, K, E, H, I, on a GPU.
SIZE: Size = (777, 3, 8, 256, 192)
TOKEN, SLOT, EXPERT = 0, 1, 2


def _of_token(batch: Batch) -> Results:
    """What its row of x reaches."""
    token = np.arange(batch.x.shape[0]) == TOKEN
    experts = np.isin(np.arange(batch.num_experts), batch.expert_idx[TOKEN])
    return Results(token, token, token, experts, experts, experts)


def _of_cotangent(batch: Batch) -> Results:
    """What its row of dy reaches: all that its row of x does, but y."""
    reached = _of_token(batch)
    return reached._replace(y=np.zeros_like(reached.y))


def _of_route(batch: Batch) -> Results:
    """What the weight of a slot reaches: dw does not depend on it."""
    token = np.arange(batch.x.shape[0]) == TOKEN
    experts = np.arange(batch.num_experts) == batch.expert_idx[TOKEN, SLOT]
    return Results(token, token, np.zeros_like(token), experts, experts, experts)


def _of_expert(batch: Batch) -> Results:
    """What Wg of an expert reaches."""
    slots = batch.expert_idx == EXPERT
    tokens, experts = slots.any(axis=1), np.arange(batch.num_experts) == EXPERT
    return Results(tokens, tokens, slots, experts, experts, experts)


def _of_up(batch: Batch) -> Results:
    """What Wu of an expert reaches: dWu = x^T (w dh silu(g)) does not depend on it."""
    reached = _of_expert(batch)
    return reached._replace(dw_up=np.zeros_like(reached.dw_up))


def _of_down(batch: Batch) -> Results:
    """What Wd of an expert reaches: dWd = (w h)^T dy does not depend on it."""
    reached = _of_expert(batch)
    return reached._replace(dw_down=np.zeros_like(reached.dw_down))


# By the argument: where the value is put, and what of the results may depend on it.
CASES: dict[str, tuple[Any, Callable[[Batch], Results]]] = {
    "x": (TOKEN, _of_token),
    "dy": (TOKEN, _of_cotangent),
    "expert_weight": ((TOKEN, SLOT), _of_route),
    "w_gate": ((EXPERT, slice(None), 0), _of_expert),
    "w_up": ((EXPERT, slice(None), 0), _of_up),
    "w_down": ((EXPERT, slice(None), 0), _of_down),
}


def judge(batch: Batch, name: str, value: float, num_ranks: int | None, **how: Any) -> None:
    """Raises AssertionError unless all of a case is right."""
    place, reach = CASES[name]
    poisoned = getattr(batch, name).copy()
    poisoned[place] = value
    clean = layer.run(batch, num_ranks, **how)
    found = layer.run(batch._replace(**{name: poisoned}), num_ranks, **how)
    for field, a, b, reached in zip(Results._fields, found, clean, reach(batch), strict=True):
        what = f"{field} with {value} in {name}"
        compare.assert_bitwise(a[~reached], b[~reached], f"{what}, which it does not depend on")
        groups = a[reached].astype(F32)
        lost = np.isfinite(groups).reshape(len(groups), math.prod(groups.shape[1:])).all(axis=1)
        assert not lost.any(), f"{what}: {lost.sum()} of {len(lost)} groups do not show it"


def checks(size: Size, num_ranks: int | None = None, **how: Any) -> dict[str, Callable[[], None]]:
    """Every case by its name."""
    batch = normal_of(size, "distinct")
    return {
        f"{value} in {name}": functools.partial(judge, batch, name, value, num_ranks, **how)
        for name in CASES
        for value in VALUES
    }
