"""The oracle of `tests.device_oracle` with the experts over ranks, in bf16 and in FP8:

    python -m tests.ranks_oracle BACKEND RANKS T,K,E,H,I ...

T tokens on each rank. Of random routing y and all gradients are judged, of one expert for all
tokens and of a skewed routing y alone: their float32 sums of gradients are too long to be exact.
"""

import sys
from typing import Any

from tests import device_oracle, layer
from tests.cases import ROUTINGS, Size
from tests.forward_programs import done

TAGS = {"bf16": device_oracle.NUM_TAGS, "fp8_block": device_oracle.NUM_FP8_TAGS}
UNEVEN = ("one_expert", "skewed")


def faults(backend: str, ranks: int, size: Size, precision: str, routing: str) -> dict[str, Any]:
    """What is wrong, by result: the first tokens or experts."""
    T, K, E, H, I = size
    ids = ROUTINGS[routing](tokens=ranks * T, choices=K, experts=E)
    kind = {"experts": E, "num_tags": TAGS[precision]}
    arrays = device_oracle.operands(ids, hidden=H, intermediate=I, **kind)
    run = layer.compiled(ranks, backend=backend, precision=precision, save="gate_up")
    y, *gradients = run(*arrays, device_oracle.cotangent(ranks * T, H))
    rows = device_oracle.rows_wrong(y, ids, **kind)
    wrong = {"y": rows} if rows else {}
    if routing not in UNEVEN:
        wrong |= device_oracle.gradients_wrong(gradients, ids, **kind)
    return wrong


def judge(backend: str, ranks: int, sizes: list[Size]) -> tuple[int, int]:
    """How many cases there are, and how many are wrong, which are printed."""
    cases = [
        (size, precision, routing)
        for size in sizes
        for precision in TAGS
        for routing in ("distinct", *UNEVEN)
    ]
    num_wrong = 0
    for size, precision, routing in cases:
        found = faults(backend, ranks, size, precision, routing)
        num_wrong += bool(found)
        print(f"{size}, {ranks} ranks, {precision}, {routing}: {found or 'exact'}", flush=True)
    return len(cases), num_wrong


if __name__ == "__main__":
    backend, ranks, *texts = sys.argv[1:]
    sizes = [tuple(map(int, text.split(","))) for text in texts]
    num_cases, num_wrong = judge(backend, int(ranks), sizes)
    done(cases=num_cases, wrong=num_wrong)
