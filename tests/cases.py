"""Shared inputs and right values: the oracle, random data, routings, and the dense float64 layer.

Everything here is NumPy and knows nothing of ranks: a batch holds all tokens and all experts, in
the order in which ranks split them along the first axis.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.gated import Biases, Unit, no_biases, swiglu

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


class Batch(NamedTuple):
    """The arguments of one call over all ranks, and the cotangent of its result."""

    x: np.ndarray  # [T, H]
    expert_idx: np.ndarray  # [T, K]
    expert_weight: np.ndarray  # [T, K]
    w_gate: np.ndarray  # [E, H, I]
    w_up: np.ndarray  # [E, H, I]
    w_down: np.ndarray  # [E, I, H]
    dy: np.ndarray  # [T, H]

    @property
    def num_experts(self) -> int:
        return self.w_gate.shape[0]


class Results(NamedTuple):
    """The result of one call and its five gradients."""

    y: Any  # [T, H]
    dx: Any  # [T, H]
    dw: Any  # [T, K]
    dw_gate: Any  # [E, H, I]
    dw_up: Any  # [E, H, I]
    dw_down: Any  # [E, I, H]


def oracle(
    expert_idx: np.ndarray,
    expert_weight: Any,
    *,
    num_experts: int,
    hidden: int = 32,
    intermediate: int = 16,
    dtype: np.dtype = F32,
    weight_dtype: np.dtype | None = None,
) -> Batch:
    """Tagged experts: expert e answers e + 1 to every token, exactly.

    x[t, 0] = 1; Wg[e, 0, 0] = 32; Wu[e, 0, 0] = 1; Wd[e, 0, :] = (e + 1) / 32; dy[t, 0] = 1; all
    else 0. silu(32) = 32 and silu'(32) = 1 in float32, so nothing is rounded anywhere as long as
    the sums are representable. Misrouting, drops, duplicates, swapped gate and up, a transposed Wd
    and gradients scaled by R each give a different number.

    Args:
      expert_idx, expert_weight: [T, K]; a scalar expert_weight stands for all routes.
      dtype: of x, expert_weight and dy. weight_dtype: of the three weights; default: dtype.
    """
    weight_dtype = dtype if weight_dtype is None else weight_dtype
    num_tokens = expert_idx.shape[0]
    w = np.broadcast_to(np.asarray(expert_weight, np.float64), expert_idx.shape)
    x = np.zeros((num_tokens, hidden))
    w_gate, w_up = np.zeros((2, num_experts, hidden, intermediate))
    w_down = np.zeros((num_experts, intermediate, hidden))
    x[:, 0] = 1
    w_gate[:, 0, 0] = 32
    w_up[:, 0, 0] = 1
    w_down[:, 0, :] = np.arange(1, num_experts + 1)[:, None] / 32
    return Batch(
        x=x.astype(dtype),
        expert_idx=expert_idx,
        expert_weight=w.astype(dtype),
        w_gate=w_gate.astype(weight_dtype),
        w_up=w_up.astype(weight_dtype),
        w_down=w_down.astype(weight_dtype),
        dy=x.astype(dtype),
    )


def oracle_results(batch: Batch) -> Results:
    """The right values of an `oracle` batch, by formula, in float64."""
    num_tokens, hidden = batch.x.shape
    num_experts, _, intermediate = batch.w_gate.shape
    w = batch.expert_weight.astype(np.float64)
    tag = np.arange(1, num_experts + 1)
    valid = (batch.expert_idx >= 0) & (batch.expert_idx < num_experts)
    expert = np.where(valid, batch.expert_idx, 0).astype(np.int64)
    dw = np.where(valid, tag[expert], 0).astype(np.float64)
    y = np.sum(w * dw, axis=1)
    sum_w = np.zeros(num_experts)
    np.add.at(sum_w, expert[valid], w[valid])
    dx = np.zeros((num_tokens, hidden))
    dw_gate, dw_up = np.zeros((2, num_experts, hidden, intermediate))
    dw_down = np.zeros((num_experts, intermediate, hidden))
    dx[:, 0] = 2 * y
    dw_gate[:, 0, 0] = sum_w * tag / 32
    dw_up[:, 0, 0] = sum_w * tag
    dw_down[:, 0, 0] = sum_w * 32
    return Results(np.tile(y[:, None], hidden), dx, dw, dw_gate, dw_up, dw_down)


def normal(
    expert_idx: np.ndarray,
    *,
    num_experts: int,
    hidden: int = 32,
    intermediate: int = 16,
    seed: int = 0,
    dtype: np.dtype = F32,
    weight_dtype: np.dtype | None = None,
) -> Batch:
    """Random normal data, scaled so that every intermediate is of order 1.

    Values are representable in bf16, so that every dtype and precision sees the same layer.
    """
    rng = np.random.default_rng(seed)
    weight_dtype = dtype if weight_dtype is None else weight_dtype

    def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(BF16)

    num_tokens = expert_idx.shape[0]
    up_shape = (num_experts, hidden, intermediate)
    down_shape = (num_experts, intermediate, hidden)
    return Batch(
        x=draw(num_tokens, hidden).astype(dtype),
        expert_idx=expert_idx,
        expert_weight=rng.uniform(0.1, 1.0, expert_idx.shape).astype(BF16).astype(dtype),
        w_gate=draw(*up_shape, scale=hidden**-0.5).astype(weight_dtype),
        w_up=draw(*up_shape, scale=hidden**-0.5).astype(weight_dtype),
        w_down=draw(*down_shape, scale=intermediate**-0.5).astype(weight_dtype),
        dy=draw(num_tokens, hidden).astype(dtype),
    )


def bf16_rounded(a: np.ndarray) -> np.ndarray:
    return a.astype(F32).astype(BF16).astype(np.float64)


# What a product with the weights takes in the place of an operand, by its name: "x", "h", "dy",
# "dg", "du" [rows, D], and the weights of one expert, by their names in a batch.
Operand = Callable[[str, np.ndarray], np.ndarray]

# What precision="bf16" rounds: on entry, in the forward, in the backward, at the roots.
ROUNDINGS = ("inputs", "h", "o", "g", "u", "dg", "du", "dx rows", "w h", "y", "dx")


def dense(batch: Batch, rounded: Collection[str] = ()) -> Results:
    """The layer of SwiGLU without biases, as `dense_of`."""
    return dense_of(batch, swiglu, no_biases(batch.w_gate), rounded)[0]


def dense_of(
    batch: Batch,
    unit: Unit,
    biases: Biases,
    rounded: Collection[str] = (),
    operand: Operand = lambda name, a: a,
) -> tuple[Results, Biases]:
    """The layer and its gradients as the formulas read, in float64, one expert after another.

    unit: of `gated.UNITS`. rounded: what is rounded to bf16 on the way; see ROUNDINGS, and
    "biases", which nothing rounds. operand: what else happens to operands of the products with the
    weights; weight gradients take them without it. The second result has the gradients of the
    biases.
    """

    def round_(name: str, a: np.ndarray) -> np.ndarray:
        return bf16_rounded(a) if name in rounded else a

    x, w, w_gate, w_up, w_down, dy = (a.astype(np.float64) for a in (batch.x, *batch[2:]))
    x, w_gate, w_up, w_down, dy = (round_("inputs", a) for a in (x, w_gate, w_up, w_down, dy))
    y, dx, dw = np.zeros_like(x), np.zeros_like(x), np.zeros_like(w)
    dw_gate, dw_up, dw_down = np.zeros_like(w_gate), np.zeros_like(w_up), np.zeros_like(w_down)
    b_gate, b_up, b_down = (round_("biases", b.astype(np.float64)) for b in biases)
    db = no_biases(w_gate)
    for e in range(batch.num_experts):
        token, slot = np.nonzero(batch.expert_idx == e)
        x_e, dy_e, w_e = x[token], dy[token], w[token, slot][:, None]
        gate, up, down = (
            operand(name, a[e])
            for name, a in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down))
        )
        g, u = operand("x", x_e) @ gate + b_gate[e], operand("x", x_e) @ up + b_up[e]
        h = operand("h", round_("h", unit(g, u)[0]))
        np.add.at(y, token, w_e * round_("o", h @ down + b_down[e]))
        # The backward computes g and u again.
        g, u = round_("g", g), round_("u", u)
        (h, slope_g, slope_u), dh = unit(g, u), operand("dy", dy_e) @ down.T
        dg, du = round_("dg", w_e * dh * slope_g), round_("du", w_e * dh * slope_u)
        dx_e = operand("dg", dg) @ gate.T + operand("du", du) @ up.T
        np.add.at(dx, token, round_("dx rows", dx_e))
        dw[token, slot] = np.sum(h * dh, axis=1) + dy_e @ b_down[e]
        dw_gate[e], dw_up[e] = x_e.T @ dg, x_e.T @ du
        dw_down[e] = round_("w h", w_e * h).T @ dy_e
        db.b_gate[e], db.b_up[e], db.b_down[e] = dg.sum(0), du.sum(0), (w_e * dy_e).sum(0)
    return Results(round_("y", y), round_("dx", dx), dw, dw_gate, dw_up, dw_down), db


def counts(batch: Batch) -> np.ndarray:
    """int64 [E]: the rows of every expert."""
    ids = batch.expert_idx
    return np.bincount(ids[(ids >= 0) & (ids < batch.num_experts)], minlength=batch.num_experts)


@dataclasses.dataclass(frozen=True)
class Routing:
    """A way to draw expert ids, int32 [T, K]."""

    draw: Callable[[np.random.Generator, int, int, int], np.ndarray]

    def __call__(self, *, tokens: int, choices: int, experts: int, seed: int = 0) -> np.ndarray:
        ids = self.draw(np.random.default_rng(seed), tokens, choices, experts)
        return ids.astype(np.int32)


def _distinct(rng: np.random.Generator, tokens: int, choices: int, experts: int) -> np.ndarray:
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :choices]


def _with_invalid(rng: np.random.Generator, tokens: int, choices: int, experts: int) -> np.ndarray:
    """A quarter of the ids is no route; every kind of wrong id occurs."""
    wrong = np.array([-1, -2, experts, experts + 1, 2**31 - 1, -(2**31)])
    ids = _distinct(rng, tokens, choices, experts)
    return np.where(rng.random(ids.shape) < 0.25, rng.choice(wrong, ids.shape), ids)


def _skewed(rng: np.random.Generator, tokens: int, choices: int, experts: int) -> np.ndarray:
    """Most routes go to the first experts; most of the last experts get none."""
    return np.minimum(rng.geometric(0.5, (tokens, choices)) - 1, experts - 1)


ROUTINGS = {
    "distinct": Routing(_distinct),
    "duplicates": Routing(lambda rng, t, k, e: rng.integers(0, e, (t, k))),
    "invalid": Routing(_with_invalid),
    "skewed": Routing(_skewed),
    "one_expert": Routing(lambda rng, t, k, e: np.full((t, k), e - 1)),
    "idle_first_half": Routing(
        lambda rng, t, k, e: np.where(np.arange(t)[:, None] < t // 2, -1, _distinct(rng, t, k, e))
    ),
    "nothing": Routing(lambda rng, t, k, e: np.full((t, k), -1)),
}

# T of all ranks, K, E, H, I.
Size = tuple[int, ...]


def normal_of(size: Size, routing: str | np.ndarray, *, seed: int = 0) -> Batch:
    """A `normal` batch in bf16; routing: the name of one of ROUTINGS, or ids [T, K]."""
    ids, widths = _ids_and_widths(size, routing)
    return normal(ids, **widths, seed=seed, dtype=BF16)


def oracle_of(size: Size, routing: str | np.ndarray, weight: Any = 0.125) -> Batch:
    """An `oracle` batch in bf16, as `normal_of`."""
    ids, widths = _ids_and_widths(size, routing)
    return oracle(ids, weight, **widths, dtype=BF16)


def _ids_and_widths(size: Size, routing: str | np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    tokens, choices, experts, hidden, intermediate = size
    if isinstance(routing, str):
        routing = ROUTINGS[routing](tokens=tokens, choices=choices, experts=experts)
    widths = {"num_experts": experts, "hidden": hidden, "intermediate": intermediate}
    return routing, widths
