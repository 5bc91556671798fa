"""Errors of precision="fp8_block", of y and of each gradient: the layer beside its recipe.

    python benchmarks/fp8_errors.py [--shape T,E,H,I] [--gates N,...]
                                    [--out benchmarks/results/fp8_errors.json]

One expert a token, so that a token's error is its expert's. `right` is the layer in float64 without
a rounding, `recipe` the same with the roundings of docs/fp8.md and nothing else (tests/cases.py,
tests/fp8.py), `found` what runs here: the kernels on a GPU, the reference elsewhere. Of norms of an
expert's share of a result:

    error   |found - right| / |right|          least, mean and most over the experts
    recipe  |recipe - right| / |right|         likewise
    ratio   error of an expert over recipe of the same, the most
    off     |found - recipe| / |recipe|        the most

for gates whose pre-activations lie around each of --gates. dx has a first column without which it
is judged where a gate is not 0: it is a hundred times the others then.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from _implementations import backend
from _record import device, write

from tests import cases, fp8, layer
from tests.backward import with_gate
from tests.cases import BF16, Batch, Results

OF_TOKENS = ("y", "dx", "dw")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("--shape", type=_numbers, default=(2048, 16, 256, 256), help="T, E, H and I (%(default)s)")
    add("--gates", type=_numbers, default=(0, 4, -4, -6), help="(%(default)s)")
    add("--out", type=pathlib.Path)
    options = parser.parse_args(arguments)
    records = [
        {"shape": options.shape, "gate": gate, "save": save, "runs_on": backend(), **row}
        for gate in options.gates
        for save, found, batch in results(options.shape, gate)
        for row in rows(batch, found)
    ]
    print(f"precision fp8_block by {backend()} on {device()}")
    print("| gate | save | of | error, mean | most | recipe, mean | most | ratio | off |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for r in records:
        figures = (r["error"][1:], r["recipe"][1:], [r["ratio"], r["off"]])
        cells = " | ".join(f"{figure:.4f}" for group in figures for figure in group)
        print(f"| {r['gate']} | {r['save']} | {r['of']} | {cells} |")
    if options.out:
        write(options.out, records)
    return 0


def results(shape: Sequence[int], gate: int) -> Any:
    """Of either `save` its name, what runs here, and the batch."""
    tokens, experts, hidden, intermediate = shape
    ids = np.random.default_rng(gate + 100).permutation(np.arange(tokens) % experts)
    how: dict[str, Any] = {"num_experts": experts, "hidden": hidden, "dtype": BF16}
    batch = cases.normal(ids[:, None].astype(np.int32), intermediate=intermediate, **how)
    batch = with_gate(batch, gate)
    for save in ("none", "gate_up"):
        yield save, layer.run(batch, backend=backend(), precision="fp8_block", save=save), batch


def rows(batch: Batch, found: Results) -> Any:
    """The figures of each result."""
    right, recipe = cases.dense(batch), fp8.recipe(batch)
    expert = batch.expert_idx[:, 0]
    for name in Results._fields:
        shares = [
            [_share(name, getattr(of, name), expert, e) for e in range(batch.num_experts)]
            for of in (found, right, recipe)
        ]
        triples = list(zip(*shares, strict=True))
        error = np.array([distance(f, r) for f, r, _ in triples])
        of_recipe = np.array([distance(q, r) for _, r, q in triples])
        off = max(distance(f, q) for f, _, q in triples)
        yield {
            "of": name,
            "error": summary(error),
            "recipe": summary(of_recipe),
            "ratio": float((error / of_recipe).max()),
            "off": off,
        }


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Relative, of norms."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def summary(of_experts: np.ndarray) -> list[float]:
    return [float(of_experts.min()), float(of_experts.mean()), float(of_experts.max())]


def _share(name: str, a: Any, expert: np.ndarray, e: int) -> np.ndarray:
    a = np.asarray(a).astype(np.float64)
    mine = a[expert == e] if name in OF_TOKENS else a[e]
    return mine[:, 1:] if name == "dx" else mine


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    raise SystemExit(main())
