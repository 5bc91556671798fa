"""The rates that the model of a layer is made of: which are measured, and which are assumed."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from _report import OURS

RESULTS = pathlib.Path(__file__).parent / "results"
TWO_H200 = "measured on two H200 of one host, 2026-11-30"
H200 = "measured on an H200, November 2026"


@dataclasses.dataclass(frozen=True)
class Rate:
    value: float
    unit: str
    source: str


# NVLink is measured with both directions busy and nothing else running.
RATES = {
    "nvlink_loads": Rate(337, "GB/s", f"{TWO_H200}: bulk copies from a peer, 132 blocks"),
    "nvlink_stores": Rate(350, "GB/s", f"{TWO_H200}: stores of 16 bytes to a peer"),
    "peer_flag": Rate(1.35, "us", f"{TWO_H200}: a barrier of flags"),
    "copy": Rate(4156, "GB/s", f"{H200}: a device copy, bytes read and written"),
    "dram_price": Rate(0.1, "ms a GB", f"{H200}: more traffic beside products, working copies"),
    "fixed": Rate(54, "us", f"{H200}: of a forward with K = 1, what its rows do not explain"),
    "plan": Rate(7.5, "us", f"{H200}: results/plan.json, forward, even routing"),
    "fixed_backward": Rate(54, "us", "assumed: as that of a forward"),
    "launch": Rate(5, "us", "assumed: of the kernel that shares the inputs"),
    "plan_of_ranks": Rate(1, "plans a rank", "assumed: a plan takes R times as long as for R = 1"),
    "switch": Rate(1, "of the rate", "assumed: to several peers together as to one, measured"),
    "network": Rate(50, "GB/s a GPU", "assumed: 400 Gb/s for each GPU, each direction"),
}


def value(name: str) -> float:
    return RATES[name].value


Record = Mapping[str, Any]


def measured(file: str) -> list[Record]:
    """The records of a results file that have a time; none where there is no such file."""
    path = RESULTS / file
    if not path.exists():
        return []
    return [r for r in json.loads(path.read_text())["records"] if "ms" in r]


def ours(records: list[Record], **fields: Any) -> list[Record]:
    """Those of jax_megamoe with bf16 weights and these fields."""
    fields = {"impl": OURS, "weights_dtype": "bf16", **fields}
    return [r for r in records if all(r.get(k) == v for k, v in fields.items())]
