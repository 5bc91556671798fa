"""The layer benchmark's records as a table and as a picture."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Named = tuple[str, Record]  # with the name of its shape
OURS = "jax_megamoe"
FROZEN = "jax_megamoe_frozen"  # with experts that are not trained
CLAMPED_BIAS = "jax_megamoe_clamped_bias"  # with the activation and the biases of gpt-oss
FP8 = "jax_megamoe_fp8"  # of weights that are quantised before
FP8_PER_CALL = "jax_megamoe_fp8_per_call"
QUANTIZATION = "quantize_expert_weights"  # of all of them, which is no pass
ALL_OURS = (OURS, FROZEN, CLAMPED_BIAS, FP8, FP8_PER_CALL, QUANTIZATION)
FP8_PEER = "torch_scaled_grouped_mm"
FP8_RANK_PEER = "torch_all_to_all_fp8"
# What is measured by name alone.
BY_NAME = (*ALL_OURS[1:], FP8_PEER, FP8_RANK_PEER)
# The dtype of the operands of products, where it is not bf16.
DTYPES = {
    **dict.fromkeys((FP8, FP8_PER_CALL), "fp8_block"),
    **dict.fromkeys((FP8_PEER, FP8_RANK_PEER), "fp8_rows"),
}


def is_chosen(impl: str, only: Sequence[str]) -> bool:
    """Whether it is to be measured, where `only` names what is or, empty, leaves it to BY_NAME."""
    return impl in only if only else impl not in BY_NAME


COLUMNS = (
    "shape",
    "pass",
    "implementation",
    "save",
    "weights",
    "sums",
    "processes",
    "ms",
    "spread",
    "MHz",
    "TFLOP/s",
    "of the matmul",
    "times ours",
    "times the bound",
    "over EP1",
)


def table(named: Sequence[Named]) -> str:
    """Markdown, one line a record."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    records = [record for _, record in named]
    for name, record in named:
        head = (name, *(record[k] for k in ("pass", "impl", "save", "weights_dtype")))
        head = (*head, record.get("sums_dtype") or "", record["process_model"])
        if "error" in record:
            rows.append(
                (*head, record["error"].replace("\n", " "), *[""] * (len(COLUMNS) - len(head) - 1))
            )
            continue
        ours = _same_work(record, records)
        figures = (
            f"{record['ms']:.3f}",
            f"{record['ms_spread']:.3f}",
            record["clock_mhz"] or "",
            f"{record['tflops']:.1f}" if "tflops" in record else "",
            f"{record['fraction']:.3f}" if "fraction" in record else "",
            f"{record['ms'] / ours['ms']:.2f}" if ours else "",
            record.get("bound_ratio", ""),
            record.get("over_ep1", ""),
        )
        rows.append((*head, *map(str, figures)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _same_work(record: Record, records: Sequence[Record]) -> Record | None:
    """The fastest record of jax_megamoe for the same shape and pass, of all saves, process models
    and dtypes but that of sums: float32. Of experts that are trained: the others do less."""
    same = ("pass", "ep", "tokens", "hidden", "intermediate", "experts", "top_k", "routing")
    ours = [
        r
        for r in records
        if r["impl"] == OURS
        and "ms" in r
        and r.get("sums_dtype") != "bf16"
        and all(r[k] == record[k] for k in same)
    ]
    return min(ours, key=lambda r: r["ms"], default=None)


def _how(record: Record) -> str:
    """The implementation, and of ours what is not the default."""
    ours = record["impl"] in ALL_OURS
    changed = [f"save {record['save']}"] * (ours and record["save"] != "none")
    changed += [f"{record['weights_dtype']} weights"] * (record["weights_dtype"] != "bf16")
    changed += ["bf16 sums"] * (record.get("sums_dtype") == "bf16")
    of_gpu = record["impl"] in ALL_OURS and record["process_model"] == "process_per_gpu"
    changed += ["a process a GPU"] * of_gpu
    return ", ".join([record["impl"], *changed])


def _colour(record: Record) -> str:
    return "#d1495b" if record["impl"] in ALL_OURS else "#8d99ae"


def draw(path: pathlib.Path, named: Sequence[Named], device: str) -> None:
    """A bar a record: its fraction of the matmul rate, and its time, or that it failed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [f"{name}, {record['pass'].replace('_', ' + ')}" for name, record in named]
    height = 0.34 * len(named) + 0.5 * len(set(labels)) + 1.1
    figure, axes = plt.subplots(figsize=(9, height), layout="constrained")
    y, ticks = 0.0, []
    for i, (label, (_, record)) in enumerate(zip(labels, named, strict=True)):
        if i == 0 or label != labels[i - 1]:
            y += 1.4
            axes.text(0, y - 0.75, label, fontweight="bold", va="center")
        fraction = record.get("fraction", 0.0)  # of what is no pass, too
        axes.barh(y, fraction, 0.8, color=_colour(record))
        text = f" {fraction:.2f}   {record['ms']:.2f} ms" if "ms" in record else " failed"
        axes.text(fraction, y, text, va="center")
        ticks.append(y)
        y += 1
    axes.set_yticks(ticks, [_how(record) for _, record in named])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlim(0, 1.12)
    axes.set_xlabel(f"useful FLOP/s over those of a bf16 8192³ matmul, sustained, {device}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
