"""The step benchmark's records out of what its processes found, as a table and as a picture."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from _report import FP8, OURS
from training import differences

from jax_megamoe.models import flops
from jax_megamoe.models.qwen3_config import Qwen3MoeConfig
from jax_megamoe.models.training_config import TrainingConfig

Record = Mapping[str, Any]
Result = Mapping[str, Any]
ALL_OURS = (OURS, FP8)
TOLERANCE = 1e-2  # of losses, relative, at each step
COLUMNS = (
    "implementation",
    "precision",
    "s a step",
    "spread",
    "tokens/s of a device",
    "MFU",
    "peak GiB",
    "MHz",
    "last loss",
    "times ours",
)


def num_parameters(model: Qwen3MoeConfig) -> int:
    """Of a model all of whose layers have experts."""
    H, D = model.hidden_size, model.head_dim
    of_heads, of_groups = model.num_attention_heads * D, model.num_key_value_heads * D
    attention = 2 * H * (of_heads + of_groups) + 2 * D
    experts = model.num_experts * H * (3 * model.moe_intermediate_size + 1)
    matrices = 1 if model.tie_word_embeddings else 2
    of_layers = model.num_hidden_layers * (attention + experts + 2 * H)
    return matrices * model.vocab_size * H + H + of_layers


def record(
    config: TrainingConfig,
    num_devices: int,
    peak: float | None,
    rounds: Sequence[Result],
) -> dict[str, Any]:
    """Of one implementation, whose rounds are what `_step_job.run` returned, at least one.

    peak: FLOP/s of a device, None where it is not known.
    """
    model = config.model
    found: dict[str, Any] = {
        "layers": model.num_hidden_layers,
        "hidden": model.hidden_size,
        "intermediate": model.moe_intermediate_size,
        "experts": model.num_experts,
        "top_k": model.num_experts_per_tok,
        "vocabulary": model.vocab_size,
        "parameters": num_parameters(model),
        "seq": config.seq,
        "batch": config.batch,
        "ep": config.expert_parallel,
        "fsdp": num_devices // config.expert_parallel,
        "precision": config.precision,
        "attention": config.attention,
        "remat": config.remat,
        "seed": config.seed,
        "rounds": len(rounds),
    }
    for result in rounds:
        if "error" in result:
            return found | {"error": result["error"]}
    of_rounds = [float(np.mean(result["step_seconds"])) for result in rounds]
    seconds = float(np.mean(of_rounds))
    per_device = config.batch * config.seq / seconds / num_devices
    pairs = flops.attended_pairs(np.zeros((config.batch, config.seq), np.int8))
    of_step = flops.step_flops(model, config.batch * config.seq, pairs)
    clocks = [result["clock_mhz"] for result in rounds if result.get("clock_mhz")]
    peaks = [result["peak_bytes"] for result in rounds]
    first = rounds[0]
    return found | {
        **{name: first[name] for name in ("runs_on", "process_model", "start")},
        "seconds": round(seconds, 6),
        "seconds_spread": round(max(of_rounds) - min(of_rounds), 6),
        "seconds_of_rounds": [round(s, 6) for s in of_rounds],
        "seconds_of_steps": [[round(s, 6) for s in result["step_seconds"]] for result in rounds],
        "clock_mhz": int(np.median(clocks)) if clocks else None,
        "tokens_per_s_device": round(per_device, 1),
        "mfu": None if peak is None else round(of_step / seconds / num_devices / peak, 4),
        "peak_bytes": None if None in peaks else max(peaks),
        "busiest_rank": round(max(result["busiest_rank"] for result in rounds), 4),
        "losses": [round(loss, 6) for loss in first["losses"]],
    }


def compared(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each of ours beside each other one that did not fail: times, and losses step by step.

    ratio: of the other's time over ours, of the means; least and most of a round by itself.
    agree: no loss is further from the other's than TOLERANCE. of_same_parameters: both began with
    the same ones; where not, losses that differ say nothing.
    """
    there = [r for r in records if "error" not in r]
    ours = [r for r in there if r["impl"] in ALL_OURS]
    found = []
    for a, b in itertools.product(ours, there):
        if b["impl"] in ALL_OURS and not (a["impl"] == FP8 and b["impl"] == OURS):
            continue
        rounds = zip(a["seconds_of_rounds"], b["seconds_of_rounds"], strict=False)
        ratios = [of_b / of_a for of_a, of_b in rounds]
        apart = differences(np.array(a["losses"]), np.array(b["losses"]))
        found.append(
            {
                "pair": [a["impl"], b["impl"]],
                "ratio": round(b["seconds"] / a["seconds"], 4),
                "ratio_least": round(min(ratios), 4),
                "ratio_most": round(max(ratios), 4),
                "largest_difference": apart["largest"],
                "at_step": apart["at_step"],
                "agree": bool(apart["largest"] <= TOLERANCE),
                "of_same_parameters": a["start"] == b["start"],
            }
        )
    return found


def table(records: Sequence[Record]) -> str:
    """Markdown, one line a record."""
    ours = next((r for r in records if r["impl"] == OURS and "error" not in r), None)
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for r in records:
        head = (r["impl"], r["precision"])
        if "error" in r:
            text = r["error"].replace("\n", " ").replace("|", "/")
            rows.append((*head, text, *[""] * (len(COLUMNS) - len(head) - 1)))
            continue
        figures = (
            f"{r['seconds']:.4f}",
            f"{r['seconds_spread']:.4f}",
            f"{r['tokens_per_s_device']:.0f}",
            "" if r["mfu"] is None else f"{r['mfu']:.3f}",
            "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.1f}",
            str(r["clock_mhz"] or ""),
            f"{r['losses'][-1]:.4f}",
            f"{r['seconds'] / ours['seconds']:.2f}" if ours else "",
        )
        rows.append((*head, *figures))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def sentences(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for c in comparisons:
        ours, other = c["pair"]
        verdict = "agree" if c["agree"] else "do not agree"
        if not c["of_same_parameters"]:
            verdict = "are of other parameters at the start"
        found.append(
            f"{other} takes {c['ratio']:.2f} times as long as {ours}"
            f" ({c['ratio_least']:.2f} to {c['ratio_most']:.2f}); losses {verdict}: at most"
            f" {c['largest_difference']:.2e} relative, at step {c['at_step']}"
        )
    return found


def draw(path: pathlib.Path, records: Sequence[Record], title: str) -> None:
    """Losses of each step, and tokens/s of a device."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    there = [r for r in records if "error" not in r]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4), layout="constrained", width_ratios=(3, 2)
    )
    styles = itertools.cycle(("-", "--", "-.", ":"))
    for place, r in enumerate(there):
        steps = np.arange(1, len(r["losses"]) + 1)
        left.plot(steps, r["losses"], next(styles), label=r["impl"], lw=1.6, color=f"C{place}")
        right.barh(place, r["tokens_per_s_device"], color=f"C{place}")
        right.text(0, place, f" {r['tokens_per_s_device']:,.0f}", va="center")
    left.set(xlabel="step", ylabel="nats per token")
    if there:
        left.legend()
    right.set_yticks(range(len(there)), [r["impl"] for r in there])
    right.invert_yaxis()
    right.set(xlabel="tokens/s of a device")
    right.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
