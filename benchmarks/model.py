"""The layer at scale, on paper: 4 and 8 GPUs, and many nodes, from what was measured on one or two.

    python benchmarks/model.py [--json FILE.json] [--docs docs/scaling.md]

Needs no GPU. _layer_model.py predicts the time of a layer and says what binds it, _nvlink.py counts
its bytes, _fsdp.py puts it on many nodes; _rates.py says which rates are measured and which are
assumed. The times of one GPU are those of results/layer.json. Where there is results/layer-ep2.json
its times stand beside the predictions. `--docs` puts the tables into the text, where it has them.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from _fsdp import GPUS, gather, hiding, memory_gb, parameters
from _layer_model import Fit, binds, fits, layer_ms, predict, shape_of
from _nvlink import SUM_BYTES, nvlink_bytes
from _rates import RATES, Record, measured, ours
from _record import commit
from _shapes import BASE, SETS, Shape

from jax_megamoe.config import KERNEL_MULTIPLE, RANK_COUNTS, SAVES

SHAPES = SETS["main"][:2]
NUM_LAYERS = {"30B": 48, "235B": 94}  # of Qwen3-30B-A3B and Qwen3-235B-A22B
NODES = (2, 8, 64)
TOKENS = tuple(1 << n for n in range(8, 18))
Table = list[dict[str, Any]]
FitsBySave = dict[str, dict[str, Fit]]


def cases(passes: Sequence[str] = ("forward", "forward_backward")) -> list[tuple[str, str]]:
    """Passes with what they keep."""
    return [(p, s) for p in passes for s in (("none",) if p == "forward" else SAVES)]


def layers(of: FitsBySave, records: list[Record]) -> Table:
    """Predicted times, balanced routing; the last three columns with bf16 sums.

    fraction: of the product's rate in the rounds in which one GPU was measured.
    """
    table = []
    for shape in SHAPES:
        for (pass_name, save), R in itertools.product(cases(), RANK_COUNTS):
            over = dataclasses.replace(shape, R=R)
            alone = layer_ms(shape, pass_name, of[save], save=save)
            (one,) = ours(records, hidden=shape.H, save=save, **{"pass": pass_name})
            found = predict(over, pass_name, of[save], save=save)
            ms = sum(p.ms for p in found)
            rate = over.useful_flops(pass_name) / ms * 1e-9
            line = {
                "shape": shape.name,
                "pass": pass_name,
                "save": save,
                "EP": R,
                "ms": round(ms, 3),
                "fraction": round(rate / one["matmul_tflops"], 3),
                "over EP1": round(ms / alone, 3),
                "share ms": round(sum(p.share_ms for p in found), 3),
                "GB a direction": round(sum(nvlink_bytes(over, pass_name).values()) / 1e9, 3),
                "NVLink ms": round(sum(p.nvlink_ms for p in found), 3),
                "binds": binds(found),
                **dict.fromkeys(("bf16: ms", "bf16: over EP1", "bf16: binds"), ""),
            }
            if R > 1:
                found = predict(over, pass_name, of[save], save=save, sums="bf16")
                ms = sum(p.ms for p in found)
                line |= {
                    "bf16: ms": round(ms, 3),
                    "bf16: over EP1": round(ms / alone, 3),
                    "bf16: binds": binds(found),
                }
            table.append(line)
    return table


def tokens_a_gpu(of: FitsBySave) -> Table:
    """Forwards of 30B with fewer and more tokens; ms of each EP, and what binds at 8."""
    table = []
    for T in TOKENS:
        shapes = [dataclasses.replace(BASE, T=T, R=R) for R in RANK_COUNTS]
        times = [layer_ms(s, "forward", of["none"]) for s in shapes]
        at_8 = binds(predict(shapes[-1], "forward", of["none"]))
        fields = {f"EP{s.R} ms": round(ms, 3) for s, ms in zip(shapes, times, strict=True)}
        fastest = min(zip(times, RANK_COUNTS, strict=True))[1]
        table.append({"T": T, **fields, "fastest": f"EP{fastest}", "binds EP8": at_8})
    return table


def narrowest(of: FitsBySave) -> Table:
    """The least I, a multiple of 64, from which on products bind a forward; what binds below it."""
    table = []
    for shape in SHAPES:
        for R in RANK_COUNTS[1:]:
            for sums in SUM_BYTES:
                over = dataclasses.replace(shape, R=R)
                least = least_intermediate(over, of["none"], sums)
                below = dataclasses.replace(over, I=least - KERNEL_MULTIPLE)
                table.append(
                    {
                        "H": shape.H,
                        "EP": R,
                        "sums": sums,
                        "I": least,
                        "H / I": round(shape.H / least, 2),
                        "binds below": binds(predict(below, "forward", of["none"], sums=sums)),
                    }
                )
    return table


def least_intermediate(shape: Shape, of: dict[str, Fit], sums: str) -> int:
    """Of a forward; by search over the multiples of 64."""
    I = KERNEL_MULTIPLE
    while binds(predict(dataclasses.replace(shape, I=I), "forward", of, sums=sums)) != "products":
        I += KERNEL_MULTIPLE
    return I


def nodes(of: FitsBySave) -> Table:
    """FSDP over nodes of 8 GPUs beside experts over R of them; T as the shape's, save gate_up."""
    table, save = [], "gate_up"
    for shape in SHAPES:
        for num_nodes in NODES:
            for R in RANK_COUNTS:
                over = dataclasses.replace(shape, R=R)
                moved = gather(over, num_nodes)
                found = hiding(over, of[save], num_nodes, save=save)
                gigabytes = memory_gb(over, NUM_LAYERS[shape.name], num_nodes, save=save)
                without = memory_gb(over, NUM_LAYERS[shape.name], num_nodes, save="none")
                times = [layer_ms(over, p, of[save], save=save) for p in ("forward", "backward")]
                table.append(
                    {
                        "shape": shape.name,
                        "GPUs": GPUS * num_nodes,
                        "EP": R,
                        "gather GB, network": round(moved.network / 1e9, 3),
                        "NVLink": round(moved.nvlink / 1e9, 3),
                        "forward ms, layer": round(times[0], 2),
                        "its transfers": round(found.forward_ms, 2),
                        "backward ms, layer": round(times[1], 2),
                        "and its": round(found.backward_ms, 2),
                        "tokens to hide": found.tokens or "more",
                        "microbatches": found.microbatches,
                        "GB a GPU": round(sum(gigabytes.values()), 1),
                        "save none": round(sum(without.values()), 1),
                        "of it gathered": round(gigabytes["weights"], 1),
                    }
                )
    return table


def beside_measured(of: FitsBySave) -> Table:
    """Predictions beside times that they were not made from."""
    table = []
    names = {
        (s.T, s.K, s.E, s.H, s.routing, s.R): s.name for shapes in SETS.values() for s in shapes
    }
    files = ("cliffs.json", "layer-ep2.json", "cliffs-ep2.json")
    others = [record for file in files for record in measured(file)]
    for r in ours(others):
        if r["ep"] == 1 and r.get("bound_ms") is None:
            continue  # what EP2 is compared with in its own run
        shape = shape_of(r)
        sums = r.get("sums_dtype") or "float32"
        found = predict(shape, r["pass"], of[r["save"]], save=r["save"], sums=sums)
        ms = sum(p.ms for p in found)
        key = (shape.T, shape.K, shape.E, shape.H, shape.routing, shape.R)
        table.append(
            {
                "shape": names.get(key, ""),
                "pass": r["pass"],
                "save": r["save"],
                "EP": shape.R,
                "sums": sums if shape.R > 1 else "",
                "processes": r["process_model"],
                "predicted ms": round(ms, 3),
                "measured ms": round(r["ms"], 3),
                "measured / predicted": round(r["ms"] / ms, 3),
            }
        )
    return table


def imbalances(of: FitsBySave) -> Table:
    """Forward and backward of 8 ranks whose busiest has more rows than the mean."""
    table = []
    for shape in SHAPES:
        over = dataclasses.replace(shape, R=8)
        for more in (1.0, 1.1, 1.25, 1.5, 2.0):
            how: dict[str, Any] = {"save": "gate_up", "imbalance": more}
            found = predict(over, "forward_backward", of["gate_up"], **how)
            fields = {"shape": shape.name, "EP": 8, "rows over the mean": more}
            ms = round(sum(p.ms for p in found), 3)
            table.append({**fields, "ms": ms, "binds": binds(found)})
    return table


def tables() -> dict[str, Table]:
    records = measured("layer.json")
    of = {save: fits(records, save) for save in SAVES}
    rates = [{"rate": name, **dataclasses.asdict(rate)} for name, rate in RATES.items()]
    has_two = bool(measured("layer-ep2.json"))
    times = "results/layer-ep2.json" if has_two else "none: all that is said of EP2 is predicted"
    one = {"rate": "times of one GPU", "value": "", "unit": "ms", "source": "results/layer.json"}
    two = {"rate": "times of two GPUs", "value": "", "unit": "ms", "source": times}
    return {
        "Rates": [*rates, one, two],
        "A layer": layers(of, records),
        "Tokens a GPU": tokens_a_gpu(of),
        "The narrowest experts whose products bind": narrowest(of),
        "Uneven ranks": imbalances(of),
        "Many nodes": nodes(of),
        "Beside measured times": beside_measured(of),
    }


def markdown(table: Table) -> str:
    lines = [list(table[0]), ["---"] * len(table[0])]
    lines += [[str(cell) for cell in row.values()] for row in table]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_tables(text: str, found: Mapping[str, Table]) -> str:
    """The text with the table behind each line `**Title**` replaced by that of this title."""

    def renewed(match: re.Match[str]) -> str:
        title = match[1]
        return f"**{title}**\n\n{markdown(found[title])}\n" if title in found else match[0]

    return re.sub(r"(?m)^\*\*(.+)\*\*\n\n(?:\|[^\n]*\n)+", renewed, text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Predicted times of the layer over many GPUs.")
    parser.add_argument("--json", type=pathlib.Path, help="write the tables to this file")
    parser.add_argument("--docs", type=pathlib.Path, help="renew the tables of this file")
    options = parser.parse_args(arguments)
    found = tables()
    for title, table in found.items():
        print(f"\n**{title}**\n\n{markdown(table)}")
    sizes = {shape.name: parameters(shape) for shape in SHAPES}
    if options.docs:
        options.docs.write_text(with_tables(options.docs.read_text(), found))
    if options.json:
        revision, dirty = commit()
        result = {"commit": revision, "dirty": dirty, "parameters_of_a_layer": sizes, **found}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
