"""What the layer benchmark runs on: shapes, routings, inputs, and the time a shape may take."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe.config import TILE_ROWS
from jax_megamoe.plan import ceil_div

SEED = 0
ROUTINGS = ("random", "zipf", "one-hot")
DTYPES = {"bf16": jnp.bfloat16, "float32": jnp.float32}
# Useful FLOPs of a pass are these times T K H I: a forward has three products of 2 T K H I each, a
# backward without its recompute twice as many.
FLOP_FACTORS = {"forward": 6, "backward": 12, "forward_backward": 18}


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer and its batch; the letters are the dimension key of jax_megamoe/config.py.

    name: in tables and pictures. routing: one of ROUTINGS. peers: which implementations run beside
    jax_megamoe; () for shapes that are held against a bound in place of peers. R: GPUs that share
    the experts, T tokens on each.
    """

    name: str
    T: int
    K: int
    E: int
    H: int
    I: int
    routing: str = "random"
    peers: tuple[str, ...] = ()
    R: int = 1

    def useful_flops(self, pass_name: str, *, trainable: bool = True) -> float:
        """Of one GPU, when all have as many rows. Gradients of weights are half of a backward's."""
        factor = FLOP_FACTORS[pass_name]
        if not trainable and pass_name != "forward":
            factor -= FLOP_FACTORS["backward"] // 2
        return float(factor) * self.T * self.K * self.H * self.I


PEERS = ("torch_grouped_mm", "torch_scaled_grouped_mm", "tokamax_ragged_dot")
RANK_PEERS = ("tokamax_all_gather", "torch_all_to_all", "torch_all_to_all_fp8")
BASE = Shape("30B", T=16384, K=8, E=128, H=2048, I=768, peers=PEERS)


def _variant(name: str, **changes: int | str) -> Shape:
    return dataclasses.replace(BASE, name=f"30B {name}", peers=(), **changes)


# What one program run measures. `main`: the shapes of Qwen3-30B-A3B and Qwen3-235B-A22B, and one
# small enough for lax.ragged_dot, which multiplies every row by every expert. `cliffs`: the 30B
# width with one of its sizes changed at a time. `corners`: with three changed at once. `ranks`: the
# large ones over two GPUs; `ranks-cliffs`: the 30B one under uneven routings. `tiny` and those that
# begin with `ranks-tiny`: run anywhere, to try the program; their figures mean nothing.
SETS: dict[str, tuple[Shape, ...]] = {
    "main": (
        BASE,
        Shape("235B", T=16384, K=8, E=128, H=4096, I=1536, peers=PEERS),
        Shape("small", T=4096, K=2, E=8, H=1024, I=512, peers=(*PEERS, "lax_ragged_dot")),
    ),
    "cliffs": (
        dataclasses.replace(BASE, peers=()),
        _variant("T=4096", T=4096),
        _variant("T=65536", T=65536),
        _variant("E=8", E=8),
        _variant("E=256", E=256),
        _variant("K=1", K=1),
        _variant("zipf", routing="zipf"),
        _variant("one-hot", routing="one-hot"),
    ),
    "corners": (
        dataclasses.replace(BASE, peers=()),
        *(
            _variant(f"T={T} E={E} K={K}", T=T, E=E, K=K)
            for T in (4096, 65536)
            for E in (8, 256)
            for K in (1, 8)
        ),
    ),
    "ranks": (
        dataclasses.replace(BASE, peers=RANK_PEERS, R=2),
        Shape("235B", T=16384, K=8, E=128, H=4096, I=1536, peers=RANK_PEERS, R=2),
    ),
    "ranks-cliffs": (
        dataclasses.replace(BASE, peers=(), R=2),
        _variant("zipf", routing="zipf", R=2),
        _variant("one-hot", routing="one-hot", R=2),
    ),
    "tiny": (Shape("tiny", T=96, K=2, E=4, H=128, I=128, peers=(*PEERS, "lax_ragged_dot")),),
    "ranks-tiny": (Shape("tiny", T=96, K=2, E=4, H=64, I=64, peers=RANK_PEERS, R=2),),
    "ranks-tiny-cliffs": (
        Shape("tiny", T=96, K=2, E=4, H=64, I=64, R=2),
        Shape("tiny one-hot", T=96, K=2, E=4, H=64, I=64, routing="one-hot", R=2),
    ),
}


def expert_ids(shape: Shape) -> np.ndarray:
    """int32 [R T, K]. random: K distinct experts a token, all equally likely. zipf: K distinct ones
    drawn without replacement, the r-th most popular with weight 1/r, popularity in random order.
    one-hot: every route of every token goes to one expert.
    """
    rng = np.random.default_rng(SEED)
    if shape.routing == "one-hot":
        return np.full((shape.R * shape.T, shape.K), shape.E // 2, np.int32)
    # The K largest of log(weight) + Gumbel noise are such a draw; for equal weights any noise does.
    scores = rng.random((shape.R * shape.T, shape.E), np.float32)
    if shape.routing == "zipf":
        scores = -np.log(-np.log(np.clip(scores, 1e-7, 1 - 1e-7)))
        scores -= np.log(1 + rng.permutation(shape.E).astype(np.float32))
    elif shape.routing != "random":
        raise ValueError(f"routing = {shape.routing!r}; it may be one of {ROUTINGS}")
    return np.argpartition(-scores, shape.K - 1, axis=-1)[:, : shape.K].astype(np.int32)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def normal(key: jax.Array, size: tuple[int, ...], dtype: str, scale: float = 1.0) -> jax.Array:
    """Drawn in float32: a draw in bf16 has few different values, and power depends on the data."""
    return (jax.random.normal(key, size, jnp.float32) * scale).astype(DTYPES[dtype])


def inputs(shape: Shape, weights_dtype: str) -> list[jax.Array]:
    """x bf16, expert_idx int32, expert_weight float32, w_gate, w_up, w_down; drawn on the device.

    Those of all R ranks, on one device.
    x is standard normal; the weights are normal with a variance of 1 over their input dimension.
    """
    keys = jax.random.split(jax.random.key(SEED), 5)
    wide, narrow = (shape.E, shape.H, shape.I), (shape.E, shape.I, shape.H)
    ids = jnp.asarray(expert_ids(shape))
    return jax.block_until_ready(
        [
            normal(keys[0], (shape.R * shape.T, shape.H), "bf16"),
            ids,
            jax.random.uniform(keys[1], ids.shape, jnp.float32, 0.05, 0.25),
            normal(keys[2], wide, weights_dtype, shape.H**-0.5),
            normal(keys[3], wide, weights_dtype, shape.H**-0.5),
            normal(keys[4], narrow, weights_dtype, shape.I**-0.5),
        ]
    )


def expert_rows(shape: Shape) -> np.ndarray:
    """int64 [R, E/R], the rows of each expert."""
    return np.bincount(expert_ids(shape).ravel(), minlength=shape.E).reshape(shape.R, -1)


def padded_rows(counts: np.ndarray) -> int:
    """Rows of the pool when each expert's are padded to whole tiles; counts: rows per expert."""
    return sum(ceil_div(int(n), TILE_ROWS) * TILE_ROWS for n in counts)


def bound_ms(
    shape: Shape, base: Shape, base_ms: float, copy_bytes_per_second: float
) -> dict[str, float]:
    """What a forward of `shape` takes at the rate of another shape, by arithmetic and by memory.

    rows: its padded rows at the rate at which the base shape gets through its own. weights: the
    bf16 weights of the experts that have rows, at the rate of a device copy (bytes read + written).
    Of several GPUs, those of the one that has most.

    Returns:
      Milliseconds "rows" and "weights"; the bound is the larger.
    """
    counts = {s: expert_rows(s) for s in (shape, base)}
    work = {s: max(map(padded_rows, counts[s])) * s.H * s.I for s in (shape, base)}
    num_experts = int(np.count_nonzero(counts[shape], axis=1).max())
    weight_bytes = 2 * 3 * shape.H * shape.I * num_experts
    return {
        "rows": base_ms * work[shape] / work[base],
        "weights": weight_bytes / copy_bytes_per_second * 1e3,
    }
