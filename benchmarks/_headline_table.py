"""What is said of the records of `headline.py`: ours beside the peers, the aims and the model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from _layer_model import fits_of, layer_ms, shape_of
from _ranks import EXCHANGED, EXCHANGED_FP8, GATHERED, PRECISIONS
from _report import FP8

Record = Mapping[str, Any]
Line = dict[str, Any]

# How many times as long a peer should take: of ours in bf16 PyTorch in bf16, by H and pass, and of
# ours in FP8 PyTorch in FP8.
AIMS = {
    (2048, "forward"): 5.5,
    (2048, "forward_backward"): 3.11,
    (4096, "forward"): 3.8,
    (4096, "forward_backward"): 2.2,
}
AIMS_FP8 = {"forward_backward": 3.11}
# Of the predicted time, either way.
NEAR = 0.10
PEERS = {"PyTorch bf16": EXCHANGED, "PyTorch FP8": EXCHANGED_FP8, "JAX bf16": GATHERED}
SAME = ("pass", "ep", "tokens", "hidden", "intermediate", "experts", "top_k", "routing")


def predicted_ms(record: Record) -> float:
    """By the model of a layer, for random routing."""
    precision = PRECISIONS[record["impl"]]
    how = {"save": record["save"], "sums": record["sums_dtype"], "precision": precision}
    fits = fits_of(precision, "none" if record["pass"] == "forward" else record["save"])
    return layer_ms(shape_of(record), record["pass"], fits, **how)


def judged(records: Sequence[Record]) -> list[Line]:
    """A line for each record of ours."""
    return [_judged(r, records) for r in records if r["impl"] in PRECISIONS]


def _judged(record: Record, records: Sequence[Record]) -> Line:
    line = {
        "H": record["hidden"],
        "I": record["intermediate"],
        "pass": record["pass"],
        "routing": record["routing"],
        "products": PRECISIONS[record["impl"]],
        "processes": record["process_model"],
        "sums": record["sums_dtype"],
    }
    if "error" in record:
        return line | {"error": record["error"]}
    line |= {"ms": record["ms"], "of the product": record["fraction"]}
    if "bound_ratio" in record:
        return line | {"over the bound": record["bound_ratio"]}
    of_peers = {
        name: round(peer["ms"] / record["ms"], 3)
        for name, impl in PEERS.items()
        for peer in records
        if peer["impl"] == impl and "ms" in peer and all(peer[k] == record[k] for k in SAME)
    }
    aim, peer = _aim(record)
    if aim is not None:
        line |= {"aim": f"{aim} {peer}"}
        line |= {"reached": of_peers[peer] >= aim} if peer in of_peers else {}
    ms = predicted_ms(record)
    line |= {"predicted ms": round(ms, 3), "over predicted": round(record["ms"] / ms, 3)}
    return line | {"near predicted": abs(record["ms"] / ms - 1) <= NEAR} | of_peers


def _aim(record: Record) -> tuple[float | None, str]:
    if record["impl"] == FP8:
        return AIMS_FP8.get(record["pass"]), "PyTorch FP8"
    return AIMS.get((record["hidden"], record["pass"])), "PyTorch bf16"


def table(lines: Sequence[Line]) -> str:
    """Markdown; peers say how many times as long they take."""
    head = ("(H, I)", "pass", "routing", "products", "processes", "sums", "ms", "of the product")
    head = (*head, *PEERS, "aim", "of the model's time", "of the bound")
    return "\n".join(map(_joined, [head, ["---"] * len(head), *map(_cells, lines)]))


def _joined(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _cells(line: Line) -> list[object]:
    keys = ("pass", "routing", "products", "processes", "sums")
    cells: list[object] = [f"({line['H']}, {line['I']})", *(line[k] for k in keys)]
    if "error" in line:
        return [*cells, line["error"].replace("\n", " "), *[""] * (len(PEERS) + 4)]
    cells += [f"{line['ms']:.3f}", f"{line['of the product']:.3f}"]
    cells += [line.get(name, "") for name in PEERS]
    verdict = {True: ", reached", False: ", **not reached**", None: ""}[line.get("reached")]
    cells.append(f"{line['aim']}{verdict}" if "aim" in line else "")
    near = {True: "", False: ", **off**", None: ""}[line.get("near predicted")]
    return [*cells, f"{line.get('over predicted', '')}{near}", line.get("over the bound", "")]


def failed(records: Sequence[Record]) -> bool:
    """Whether one of ours did."""
    return any(r["impl"] in PRECISIONS and "error" in r for r in records)
