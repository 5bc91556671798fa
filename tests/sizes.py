"""Sizes at which each pass is tested on a GPU: those of known models, and very large ones."""

import numpy as np

from jax_megamoe.config import Dims
from tests.cases import ROUTINGS
from tests.forward import one_rank

# H and I.
MODELS = (
    (2880, 2880),
    (4096, 704),
    (7168, 2048),
    (8192, 3072),
    (2048, 768),
    (5120, 1536),
    (64, 64),
    (64, 192),
    (128, 64),
)

# Elements of an array, past which an int32 offset is wrong.
END_OF_INT32 = 2**31
# T, K, E, H, I by what has more elements than that: rows of the pool, of H columns (o, dx) or of I
# (h, dg), tokens or weights. All to one expert makes the last row count.
LARGE = {
    "pool": (65_536, 8, 8, 8192, 64),
    "pool of one expert": (65_536, 8, 8, 8192, 64),
    "tokens": (140_000, 1, 8, 16_384, 64),
    "intermediates": (140_000, 1, 8, 64, 16_384),
    "weights": (64, 1, 40, 4096, 16_384),
}


def large_case(name: str) -> tuple[Dims, np.ndarray]:
    """The dimensions of one of LARGE, and the expert ids of its tokens, int32 [T, K]."""
    T, K, E, H, I = LARGE[name]
    dims = one_rank(T=T, K=K, E=E, H=H, I=I)
    rows = dims.pool_rows
    elements = {"pool": rows * H, "tokens": T * H, "intermediates": rows * I, "weights": E * H * I}
    assert elements[name.split()[0]] > END_OF_INT32
    if name == "weights":  # half of the tokens to the last expert
        last = np.arange(T) < T // 2
        return dims, np.where(last, E - 1, E - 9 + np.arange(T) % 8)[:, None].astype(np.int32)
    routing = ROUTINGS["one_expert" if "one expert" in name else "distinct"]
    return dims, routing(tokens=T, choices=K, experts=E)
