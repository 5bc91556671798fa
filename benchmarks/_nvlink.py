"""The bytes that a call moves over NVLink, by the model of docs/protocol.md."""

import math

from _shapes import Shape

from jax_megamoe._arrays import up_to
from jax_megamoe.config import FP8_GROUP

SUM_BYTES = {"float32": 4, "bf16": 2}


def reach(shape: Shape) -> float:
    """q: the part of tokens with a route on a given other rank, K different experts at random."""
    others = shape.E - shape.E // shape.R
    return 1 - math.comb(others, shape.K) / math.comb(shape.E, shape.K)


def row_bytes(H: int, is_backward: bool, precision: str, takes_gate_up: bool) -> int:
    """What a token brings. In FP8 the gradients of weights read x and dy as they are, all else
    their codes, with the scales in whole 16 bytes (cuda/shared/fp8.h)."""
    values = 2 * H * (1 + is_backward)
    if precision != "fp8_block":
        return values
    codes = H + up_to(16, H // FP8_GROUP * 4)
    if not is_backward:
        return codes
    return values + codes * (1 if takes_gate_up else 2)


def nvlink_bytes(
    shape: Shape,
    pass_name: str,
    sums: str = "float32",
    precision: str = "bf16",
    save: str = "none",
) -> dict[str, float]:
    """What a rank sends to all others together, and likewise gets; payload of random routing.

    pass_name: forward, backward, or forward_backward for both. sums: the dtype of partial sums.
    precision, save: as for `mega_moe`.
    """
    T, K, H, R, q = shape.T, shape.K, shape.H, shape.R, reach(shape)
    if pass_name == "forward_backward":
        how = {"sums": sums, "precision": precision, "save": save}
        passes = [nvlink_bytes(shape, p, **how) for p in ("forward", "backward")]
        return {name: sum(p[name] for p in passes) for name in passes[0]}
    is_backward = pass_name == "backward"
    to_each = {
        "routing": 8 * T * K,
        "rows": q * T * row_bytes(H, is_backward, precision, save == "gate_up"),
        "sums": SUM_BYTES[sums] * q * T * H,
        "dw": 4 * T * K / R if is_backward else 0,
        "flags": 4 * q * T + 4,
    }
    return {name: float((R - 1) * of_one) for name, of_one in to_each.items()}
