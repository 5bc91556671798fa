"""The bytes that a call moves over NVLink, by the model of docs/protocol.md."""

import math

from _shapes import Shape

SUM_BYTES = {"float32": 4, "bf16": 2}


def reach(shape: Shape) -> float:
    """q: the part of tokens with a route on a given other rank, K different experts at random."""
    others = shape.E - shape.E // shape.R
    return 1 - math.comb(others, shape.K) / math.comb(shape.E, shape.K)


def nvlink_bytes(shape: Shape, pass_name: str, sums: str = "float32") -> dict[str, float]:
    """What a rank sends to all others together, and likewise gets; payload of random routing.

    pass_name: forward, backward, or forward_backward for both. sums: the dtype of partial sums.
    """
    T, K, H, R, q = shape.T, shape.K, shape.H, shape.R, reach(shape)
    if pass_name == "forward_backward":
        passes = [nvlink_bytes(shape, p, sums) for p in ("forward", "backward")]
        return {name: sum(p[name] for p in passes) for name in passes[0]}
    is_backward = pass_name == "backward"
    to_each = {
        "routing": 8 * T * K,
        "rows": (2 if is_backward else 1) * 2 * q * T * H,
        "sums": SUM_BYTES[sums] * q * T * H,
        "dw": 4 * T * K / R if is_backward else 0,
        "flags": 4 * q * T + 4,
    }
    return {name: float((R - 1) * of_one) for name, of_one in to_each.items()}
