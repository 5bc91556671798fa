"""Routings drawn at random at sizes drawn at random, each judged twice: the oracle, exactly, and
random data against float32; with precision="fp8_block" against the recipe, by the reference.

A routing is a seed, which every fault is printed with: `faults_of(..., seeds=[SEED])` repeats it.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jax_megamoe.config import SAVES
from tests import cases, compare, emulated, fp8, layer
from tests.cases import BF16, F32, Batch, Results

KINDS = ("uniform", "zipf", "one expert", "one rank", "one source")
# What a route of the oracle weighs, unequal within a token: as powers of two they round nowhere.
WEIGHTS = (1.0, 0.5, 0.25, 0.0)
# Of a token or an expert, between bf16 products and float32 ones, or two that follow the recipe; of
# a slot, whose right value may be next to nothing, over what values of slots usually are.
ERROR_BOUND, SLOT_ERROR_BOUND = 2e-2, 0.1
# Of one token whose values beside a border took the other code: that is off by an eighth, and one
# value may be nearly all of h. The columns of w_down are not quite alike.
CODES_ERROR_BOUND = 1.25 / 8
# Sums of floats of so many digits are exact in float32 in any order.
EXACT_BELOW = 2**24


class Shape(NamedTuple):
    """A size of `Size`, of all ranks, and its number, from which its seeds come."""

    number: int
    T: int
    K: int
    E: int
    H: int
    I: int
    weight_dtype: np.dtype

    @property
    def options(self) -> dict[str, Any]:
        """Of the batches of tests.cases."""
        widths = {"num_experts": self.E, "hidden": self.H, "intermediate": self.I}
        return {**widths, "dtype": BF16, "weight_dtype": self.weight_dtype}

    def of_ranks(self, ranks: int) -> "Shape":
        """The next size that so many ranks have equal shares of."""
        T, E = (-(-n // ranks) * ranks for n in (self.T, self.E))
        return self._replace(T=T, E=E)

    def of_precision(self, precision: str) -> "Shape":
        """The next size whose groups are whole."""
        return self if precision == "bf16" else self._replace(H=whole(self.H), I=whole(self.I))


def whole(width: int) -> int:
    """The next width of whole groups."""
    return -(-width // fp8.GROUP) * fp8.GROUP


def _draw_shapes() -> tuple[Shape, ...]:
    """T from 0 to 4097, K to 32, E to 256: their ends and tiles' among them, the rest drawn."""
    rng = np.random.default_rng(20)
    tokens = [0, 1, 2, 63, 64, 65, 127, 128, 129, 4096, 4097]
    tokens += [int(2**x) for x in rng.uniform(1, 12, 29)]
    choices = [1, 2, 8, 32, *rng.integers(1, 33, 36).tolist()]
    experts = [1, 2, 3, 8, 128, 255, 256, *(int(2**x) for x in rng.uniform(0, 8, 33))]
    # The host judges all weights' gradients: those of many experts are narrow.
    widths = {False: [(64, 64), (128, 64), (64, 192), (192, 128)], True: [(64, 64), (128, 64)] * 2}
    drawn = zip(tokens, rng.permutation(choices), rng.permutation(experts), strict=True)
    return tuple(
        Shape(i, T, int(K), int(E), *widths[int(E) > 64][i % 4], (F32, BF16)[i // 4 % 2])
        for i, (T, K, E) in enumerate(drawn)
    )


SHAPES = _draw_shapes()


def ids_of(rng: np.random.Generator, shape: Shape, ranks: int) -> np.ndarray:
    """int32 [T, K]: one of KINDS, of which a part is no route; several of a token may be equal."""
    size, E = (shape.T, shape.K), shape.E
    kind = KINDS[rng.integers(len(KINDS))]
    popularity = np.ones(E)
    if kind == "zipf":
        popularity = 1 / np.arange(1, E + 1)[rng.permutation(E)]
    elif kind == "one expert":
        popularity = np.eye(E)[rng.integers(E)]
    elif kind == "one rank":
        popularity = np.arange(E) * ranks // E == rng.integers(ranks)
    popularity = popularity / popularity.sum()
    if rng.random() < 0.5 and shape.K <= np.count_nonzero(popularity):  # each expert once a token
        with np.errstate(divide="ignore"):
            scores = np.log(popularity) + rng.gumbel(size=(shape.T, E))
        ids = np.argsort(-scores, axis=1)[:, : shape.K]
    else:
        ids = rng.choice(E, size, p=popularity)
    none = rng.choice([0, rng.random(), 1], p=[0.45, 0.45, 0.1])
    wrong = rng.choice(np.array([-1, E, 2**31 - 1, -(2**31)]), size)
    ids = np.where(rng.random(size) < none, wrong, ids)
    if kind == "one source":
        ids[np.arange(shape.T) * ranks // max(shape.T, 1) != rng.integers(ranks)] = -1
    return ids.astype(np.int32)


def faults_of(
    shape: Shape,
    *,
    backend: str,
    ranks: int = 1,
    routings: int = 1,
    seeds: Iterable[int] | None = None,
    precision: str = "bf16",
) -> list[str]:
    """What is wrong with so many routings of a shape, each with its seed; prints all seeds.

    Args:
      backend: of `mega_moe`, or "emulated": the kernels on the emulated machine.
    """
    shape = shape.of_ranks(ranks).of_precision(precision)
    first = 10_000 * shape.number
    seeds = list(seeds or range(first, first + routings))
    print(f"{shape}, {ranks} ranks, {precision}: seeds {seeds[0]} to {seeds[-1]}", flush=True)
    faults = []
    for seed in seeds:
        try:
            judge(shape, seed, backend, ranks, precision)
        except AssertionError as error:
            faults.append(f"seed {seed} of {shape}, {ranks} ranks, {precision}: {error}")
            print(faults[-1], flush=True)
    return faults


def judge(shape: Shape, seed: int, backend: str, ranks: int, precision: str) -> None:
    """Raises AssertionError unless y and all gradients are right; `save` takes turns with seeds."""
    rng = np.random.default_rng(seed)
    ids = ids_of(rng, shape, ranks)
    how = {"precision": precision, "save": SAVES[seed % len(SAVES)]}
    call = functools.partial(run, backend, ranks, **how)
    oracle = fp8.two_column_oracle if precision == "fp8_block" else cases.oracle
    exact = oracle(ids, rng.choice(WEIGHTS, ids.shape), **shape.options)
    assert_oracle(call(exact), exact, precision)
    if shape.T == 0:
        return
    weights = rng.uniform(0.1, 1, ids.shape).astype(BF16)
    batch = _normal_of(shape)._replace(expert_idx=ids, expert_weight=weights)
    beside = precision if precision == "fp8_block" else "float32"
    right = layer.run(batch, backend="reference", precision=beside)
    right = Results(*(a.astype(F32) for a in right))
    assert_near(call(batch), right, precision)


@functools.lru_cache(maxsize=2)
def _normal_of(shape: Shape) -> Batch:
    """All but the routing, drawn once for all routings of a shape."""
    none = np.full((shape.T, shape.K), -1, np.int32)
    return cases.normal(none, **shape.options, seed=shape.number)


def run(backend: str, ranks: int, batch: Batch, **how: str) -> Results:
    """y and all gradients, by a backend of `mega_moe` or on the emulated machine."""
    if backend == "emulated":
        return _emulated(ranks, batch, **how)
    return layer.run(batch, None if ranks == 1 else ranks, backend=backend, **how)


def _emulated(ranks: int, batch: Batch, *, precision: str, save: str) -> Results:
    """By the kernels, in an order of events that differs with the routing."""
    keeps = save == "gate_up"
    kind: dict[str, Any] = {"float_gradients": batch.w_gate.dtype == F32}
    if precision == "fp8_block":
        kind["quantized"] = fp8.quantized_weights(batch)
    how: dict[str, Any] = {"ranks": ranks, "seed": int(batch.expert_idx.sum()) & 0xFFFF}
    ((y, *others),) = emulated.run([emulated.Call(batch, keep=keeps, **kind)], **how)
    kept = others[-1] if keeps else None
    call = emulated.Call(batch, is_backward=True, kept=kept, **kind)
    (gradients,) = emulated.run([call], **how)
    return Results(y, *gradients)


def assert_near(found: Results, right: Results, precision: str = "bf16") -> None:
    """Of `normal` batches: dw = <h, dh> has a variance of about 0.36 H, that of silu(g) u times
    that of dh."""
    usual = (0.36 * found.dx.shape[1]) ** 0.5
    deviation = np.abs(found.dw.astype(F32) - right.dw) / usual
    assert np.all(deviation <= SLOT_ERROR_BOUND), f"dw: {deviation.max():.3e} of what is usual"
    none = np.zeros_like(right.dw)
    bounds = Results(*[ERROR_BOUND] * len(Results._fields))
    if precision == "fp8_block":
        bounds = bounds._replace(y=CODES_ERROR_BOUND, dx=CODES_ERROR_BOUND)
        for name in ("y", "dx"):
            _assert_near_in_all(name, getattr(found, name), getattr(right, name))
    compare.assert_within(found._replace(dw=none), right._replace(dw=none), bounds)


def _assert_near_in_all(name: str, found: np.ndarray, right: np.ndarray) -> None:
    """Of all tokens together: those that are far off are few."""
    error = np.linalg.norm(found.astype(F32) - right)
    most = (ERROR_BOUND + CODES_ERROR_BOUND / len(right) ** 0.5) * np.linalg.norm(right)
    assert error <= most, f"{name}: {error:.3e} of all tokens is above {most:.3e}"


def assert_oracle(found: Results, batch: Batch, precision: str = "bf16") -> None:
    """Exactly, but for gradients of experts whose sums are too long for float32 in any order."""
    results_of = fp8.two_column_results if precision == "fp8_block" else cases.oracle_results
    right = results_of(batch)
    tags = np.arange(1, batch.num_experts + 1)
    digits = cases.counts(batch) * tags / min(w for w in WEIGHTS if w)
    short = digits < EXACT_BELOW
    for name, a, b in zip(Results._fields, found, right, strict=True):
        if name.startswith("dw_"):
            compare.assert_exact(a[short], b[short], name)
            bound = 2**-7 if a.dtype == BF16 else 1e-5
            a = a.astype(np.float64)
            assert np.all(np.abs(a - b)[~short] <= bound * np.abs(b)[~short]), name
        else:
            compare.assert_exact(a, b, name)
