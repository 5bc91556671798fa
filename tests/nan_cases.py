"""NaN and Inf reach what depends on them, and not a bit of anything else.

Each case puts a value into one element of an argument and names what may depend on it, by the
formulas of docs/architecture.md; all else must have the bits of a call without it. With
precision="fp8_block" a value takes its group with it (docs/fp8.md): 128 values of its token, all of
which it would have reached anyway, or the 128 x 128 weights around it.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jax_megamoe.config import SAVES
from tests import compare, fp8, routing_fuzz
from tests.cases import F32, Batch, Results, Size, normal_of

VALUES = (np.nan, np.inf)
# T, K, E, H, I, on a GPU; of whole groups, more than one in each direction.
SIZES: dict[str, Size] = {"bf16": (777, 3, 8, 256, 192), "fp8_block": (777, 3, 8, 256, 384)}
# On the emulated machine.
SMALL_SIZES: dict[str, Size] = {"bf16": (40, 2, 8, 64, 64), "fp8_block": (40, 2, 8, 256, 256)}
TOKEN, SLOT, EXPERT = 0, 1, 2
# In H and in I: of the first group, and of the last.
COLUMN, INNER = 5, -7


class Reach(NamedTuple):
    """What of a batch a value at COLUMN and INNER may reach, as masks over results.

    tokens, slots, experts: that depend on it, [T], [T, K], [E]. columns, inner: those of H and of I
    that share a group with it, [H], [I].
    """

    tokens: np.ndarray
    slots: np.ndarray
    experts: np.ndarray
    columns: np.ndarray
    inner: np.ndarray

    def results(self, **changed: np.ndarray) -> Results:
        """All of its tokens, slots and experts, but for what is given; each broadcasts."""
        rows, experts = self.tokens[:, None], self.experts[:, None, None]
        every = {"y": rows, "dx": rows, "dw": self.slots}
        every |= dict.fromkeys(("dw_gate", "dw_up", "dw_down"), experts)
        return Results(**(every | changed))

    @property
    def up_columns(self) -> np.ndarray:
        """Of dWg and dWu, those of its expert whose g or u it is a part of."""
        return self.experts[:, None, None] & self.inner

    @property
    def down_rows(self) -> np.ndarray:
        """Of dWd, likewise."""
        return self.experts[:, None, None] & self.inner[:, None]


NOTHING = np.zeros((), bool)


def _of_token(batch: Batch, group: int) -> Reach:
    """A row of x or of dy."""
    tokens = np.arange(len(batch.x)) == TOKEN
    slots = np.broadcast_to(tokens[:, None], batch.expert_idx.shape)
    experts = np.isin(np.arange(batch.num_experts), batch.expert_idx[TOKEN])
    # Products of weight gradients take x and dy in bf16, whatever the precision.
    return Reach(tokens, slots, experts, _group_of(batch.x.shape[1], COLUMN, 1), NOTHING)


def _of_route(batch: Batch, group: int) -> Reach:
    tokens = np.arange(len(batch.x)) == TOKEN
    experts = np.arange(batch.num_experts) == batch.expert_idx[TOKEN, SLOT]
    return Reach(tokens, NOTHING, experts, NOTHING, NOTHING)


def _of_expert(batch: Batch, group: int) -> Reach:
    """A block of its weights."""
    slots, experts = batch.expert_idx == EXPERT, np.arange(batch.num_experts) == EXPERT
    _, hidden, inner = batch.w_gate.shape
    groups = _group_of(hidden, COLUMN, group), _group_of(inner, INNER, group)
    return Reach(slots.any(axis=1), slots, experts, *groups)


def _group_of(size: int, index: int, group: int) -> np.ndarray:
    """bool [size]: the group that has the index."""
    return np.arange(size) // group == index % size // group


class Case(NamedTuple):
    """place: of the value. depend: on what it is. reach: the results that may show it."""

    place: tuple[int, ...]
    depend: Callable[[Batch, int], Reach]
    reach: Callable[[Reach], Results]


# By the argument. dWu = x^T (w dh silu(g)) does not depend on u, dWd = (w h)^T dy not on Wd, nor dw
# on w; of dWd a value of dy reaches one column.
CASES: dict[str, Case] = {
    "x": Case((TOKEN, COLUMN), _of_token, lambda r: r.results()),
    "dy": Case(
        (TOKEN, COLUMN),
        _of_token,
        lambda r: r.results(y=NOTHING, dw_down=r.experts[:, None, None] & r.columns),
    ),
    "expert_weight": Case((TOKEN, SLOT), _of_route, lambda r: r.results()),
    "w_gate": Case(
        (EXPERT, COLUMN, INNER),
        _of_expert,
        lambda r: r.results(dw_gate=r.up_columns, dw_up=r.up_columns, dw_down=r.down_rows),
    ),
    "w_up": Case(
        (EXPERT, COLUMN, INNER),
        _of_expert,
        lambda r: r.results(dw_gate=r.up_columns, dw_up=NOTHING, dw_down=r.down_rows),
    ),
    "w_down": Case(
        (EXPERT, INNER, COLUMN),
        _of_expert,
        lambda r: r.results(
            y=r.tokens[:, None] & r.columns,
            dw_gate=r.up_columns,
            dw_up=r.up_columns,
            dw_down=NOTHING,
        ),
    ),
}


def judge(
    batch: Batch, name: str, value: float, run: Callable[[Batch], Results], precision: str
) -> None:
    """Raises AssertionError unless all of a case is right."""
    case = CASES[name]
    poisoned = getattr(batch, name).copy()
    poisoned[case.place] = value
    clean, found = run(batch), run(batch._replace(**{name: poisoned}))
    reached = case.reach(case.depend(batch, fp8.GROUP if precision == "fp8_block" else 1))
    for field, a, b, mask in zip(Results._fields, found, clean, reached, strict=True):
        what = f"{field} with {value} in {name}"
        mask = np.broadcast_to(mask, a.shape)
        compare.assert_bitwise(a[~mask], b[~mask], f"{what}, which it does not depend on")
        # Of tokens, slots' tokens or experts, each that may show it does.
        groups = (len(a), math.prod(a.shape[1:]))
        shown = (~np.isfinite(a.astype(F32)) & mask).reshape(groups).any(axis=1)
        lost = mask.reshape(groups).any(axis=1) & ~shown
        assert not lost.any(), f"{what}: {lost.sum()} of {len(lost)} groups do not show it"


def checks(
    size: Size, num_ranks: int = 1, *, backend: str, precision: str = "bf16"
) -> dict[str, Callable[[], None]]:
    """Every case by its name.

    Args:
      backend: of `mega_moe`, or "emulated": the kernels on the emulated machine.
    """
    batch = normal_of(size, "distinct")
    of_case = {}
    for i, name in enumerate(CASES):
        for j, value in enumerate(VALUES):
            save = SAVES[(i + j) % len(SAVES)]
            how = {"precision": precision, "save": save}
            run = functools.partial(routing_fuzz.run, backend, num_ranks, **how)
            check = functools.partial(judge, batch, name, value, run, precision)
            of_case[f"{value} in {name}, save={save}"] = check
    return of_case
