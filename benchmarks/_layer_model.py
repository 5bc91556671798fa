"""A prediction of the time of a layer, from its measured times on one GPU and the rates of _rates.

Products, and all that grows with rows: at EP1 a call takes `fixed + rows (a H I + b H)`, rows those
of the pool, each expert's rounded up to tiles. a and b are those with which the two measured widths
come out as they were measured. So they hold recompute, dispatch and sums, and the clock that the
GPU has beside them. With R ranks the rows are those of E/R experts of R T tokens, fewer pads.

What ranks add, for each pass:
  share     copies its inputs, sends the routing, waits for that of all; a plan of R T tokens.
  traffic   sums go through memory twice more: written by peers, read by finish; priced as other
            DRAM traffic beside products was.
  NVLink    rows come, then sums go as tokens become complete. Beside products both are hidden, up
            to the time that the link needs for all of it, and to that of the sums that become
            complete late (`last_sums_ms`).

In FP8 the times of one GPU are those of results/fp8.json, and a row crosses as codes and scales;
what the share copies, and what goes through memory at least, counts as in bf16, which is more.

It knows nothing of what products lose beside NVLink traffic.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from _nvlink import SUM_BYTES, nvlink_bytes, reach
from _rates import Record, measured, ours, value
from _report import FP8, OURS
from _shapes import BASE, Shape, expert_rows, padded_rows

from jax_megamoe.config import TILE_ROWS

PASSES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Fit:
    """The time of a pass on one GPU: fixed_ms + rows (a_ms H I + b_ms H)."""

    fixed_ms: float
    a_ms: float
    b_ms: float

    def ms(self, rows: float, H: int, I: int) -> float:
        return self.fixed_ms + rows * (self.a_ms * H * I + self.b_ms * H)

    def minus(self, other: "Fit") -> "Fit":
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return Fit(*(x - y for x, y in zip(mine, others, strict=True)))


def fit_one(records: Sequence[Record], fixed_ms: float) -> Fit:
    """Through the measured times of two widths, T, K and E being those of the records.

    Raises:
      ValueError: there are not two widths.
    """
    by_width = {(r["hidden"], r["intermediate"]): r for r in records if r["tokens"] == BASE.T}
    if len(by_width) != 2:
        raise ValueError(f"the times of two widths are needed, found those of {sorted(by_width)}")
    lines, times = [], []
    for (H, I), r in by_width.items():
        shape = dataclasses.replace(BASE, T=r["tokens"], K=r["top_k"], E=r["experts"], H=H, I=I)
        lines.append([H * I, H])
        times.append((r["ms"] - fixed_ms) / pool_rows(shape))
    a, b = np.linalg.solve(np.array(lines, float), np.array(times))
    return Fit(fixed_ms, float(a), float(b))


# The times of one GPU, by precision: whose, and the results file.
MADE_FROM = {"bf16": (OURS, "layer.json"), "fp8_block": (FP8, "fp8.json")}


def fits_of(precision: str, save: str) -> dict[str, Fit]:
    """`fits` of the results file of a precision."""
    impl, file = MADE_FROM[precision]
    return fits(measured(file), save, impl)


def fits(records: Sequence[Record], save: str, impl: str = OURS) -> dict[str, Fit]:
    """Of the forward and the backward of jax_megamoe; records: those of one GPU."""
    alone = ours(list(records), impl=impl, ep=1)
    of = {
        name: [r for r in alone if r["pass"] == name and r["save"] == kept]
        for name, kept in (("forward", "none"), ("forward_backward", save))
    }
    fixed = [value(name) / 1e3 for name in ("fixed", "fixed_backward")]
    forward = fit_one(of["forward"], fixed[0])
    return {
        "forward": forward,
        "backward": fit_one(of["forward_backward"], sum(fixed)).minus(forward),
    }


@functools.cache
def padded(mean_rows: float) -> float:
    """The mean of an expert's rows, Poisson with this mean, rounded up to whole tiles."""
    most = int(mean_rows + 12 * mean_rows**0.5 + 2 * TILE_ROWS)
    count = np.arange(1, most + 1)
    log_p = -mean_rows + np.cumsum(np.log(mean_rows / count)) if mean_rows > 0 else None
    if log_p is None:
        return 0.0
    return float(np.sum(np.exp(log_p) * -(-count // TILE_ROWS) * TILE_ROWS))


def pool_rows(shape: Shape) -> float:
    """Rows of the busiest rank, with pads: expected ones of random routing, else those drawn."""
    if shape.routing != "random":
        return float(max(map(padded_rows, expert_rows(shape))))
    mean_rows = shape.R * shape.T * shape.K / shape.E
    return shape.E // shape.R * padded(mean_rows)


def memory_bytes(shape: Shape, pass_name: str, save: str) -> float:
    """What a pass of one rank reads and writes at least: each array once for each step that needs
    it, weights of all its experts."""
    rows, H, I = pool_rows(shape), shape.H, shape.I
    weights = 2 * H * I * shape.E // shape.R
    kept = 4 * I if save == "gate_up" else 0
    if pass_name == "forward":
        of_row = 8 * H + 4 * I + kept
        return rows * of_row + 3 * weights + 4 * shape.T * H
    # x and dy: written, read by two steps; rows of dx; g and u; dg and du, read twice; w h.
    of_row = 2 * 6 * H + 4 * H + (kept or 8 * I) + 12 * I + 4 * I
    return rows * of_row + 8 * weights + 6 * shape.T * H


def complete(shape: Shape, done: np.ndarray) -> np.ndarray:
    """Of the sums that a rank sends, the part whose last expert is among the first `done` of its.

    The routes of a token to the rank are binomial, at least one.
    """
    p = 1 / shape.R
    none = (1 - p) ** shape.K
    return ((1 - p + p * done) ** shape.K - none) / (1 - none)


def last_sums_ms(shape: Shape, products_ms: float, sums_ms: float) -> float:
    """When the last sums have gone, if the link sends them as soon as they are complete."""
    done = np.linspace(0, 1, 257)
    return float(np.max(products_ms * done + sums_ms * (1 - complete(shape, done))))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Milliseconds of a pass. share_ms comes before the rest, of which the longest counts."""

    share_ms: float
    products_ms: float
    memory_ms: float
    nvlink_ms: float
    last_sums_ms: float

    @property
    def longest(self) -> dict[str, float]:
        return {
            "products": self.products_ms,
            "memory": self.memory_ms,
            "NVLink": self.nvlink_ms,
            "last sums": self.last_sums_ms,
        }

    @property
    def ms(self) -> float:
        return self.share_ms + max(self.longest.values())

    @property
    def binds(self) -> str:
        """The first of the longest: sums that end with the products are hidden."""
        return max(self.longest, key=lambda name: round(self.longest[name], 9))


def predict_pass(
    shape: Shape,
    pass_name: str,
    fit: Fit,
    *,
    save: str = "none",
    sums: str = "float32",
    precision: str = "bf16",
    imbalance: float = 1.0,
) -> Prediction:
    """A pass of the rank that has `imbalance` times as many rows as the mean."""
    T, K, H, R = shape.T, shape.K, shape.H, shape.R
    products = fit.ms(imbalance * pool_rows(shape), H, shape.I)
    memory = imbalance * memory_bytes(shape, pass_name, save) / value("copy") / 1e6
    if R == 1:
        return Prediction(0.0, products, memory, 0.0, 0.0)
    moved = nvlink_bytes(shape, pass_name, sums, precision, save)
    loads_ms, stores_ms = (1 / value(f"nvlink_{how}") / 1e6 for how in ("loads", "stores"))
    copied = (1 if pass_name == "forward" else 2) * 4 * T * H + 8 * T * K
    share = copied / value("copy") / 1e6 + moved["routing"] * stores_ms
    fixed_us = value("launch") + value("peer_flag") + (R - 1) * value("plan")
    share += fixed_us / 1e3
    through_memory = 2 * SUM_BYTES[sums] * (1 + (R - 1) * reach(shape)) * T * H
    products += imbalance * through_memory / 1e9 * value("dram_price")
    rows_ms = imbalance * moved["rows"] * loads_ms
    sums_ms = imbalance * (moved["sums"] + moved["dw"] + moved["flags"]) * stores_ms
    last = last_sums_ms(shape, products, sums_ms)
    return Prediction(share, products, memory, rows_ms + sums_ms, last)


def predict(
    shape: Shape, pass_name: str, of: dict[str, Fit], **how: str | float
) -> list[Prediction]:
    """Of each pass in pass_name, as `predict_pass`; of: `fits`."""
    names = PASSES if pass_name == "forward_backward" else (pass_name,)
    return [predict_pass(shape, name, of[name], **how) for name in names]  # type: ignore[arg-type]


def shape_of(record: Record) -> Shape:
    """Of a record of the layer benchmark, without a name."""
    return Shape(
        name="",
        T=record["tokens"],
        K=record["top_k"],
        E=record["experts"],
        H=record["hidden"],
        I=record["intermediate"],
        routing=record["routing"],
        R=record["ep"],
    )


def layer_ms(shape: Shape, pass_name: str, of: dict[str, Fit], **how: str | float) -> float:
    return sum(p.ms for p in predict(shape, pass_name, of, **how))


def binds(predictions: Sequence[Prediction]) -> str:
    """What binds in each pass, once if it is the same."""
    return ", ".join(dict.fromkeys(p.binds for p in predictions))
