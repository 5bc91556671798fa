"""Layers of other code in NumPy, each in the convention of its own layout, on random weights.

A layer here is a dict of tensors, as a checkpoint has them, and a function from one token and the
number of an expert to that expert's output. The functions share nothing with the package.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

E, H, I, S = 4, 6, 10, 8
PREFIX = "model.layers.3.mlp."
Tensors = dict[str, np.ndarray]
Expert = Callable[[Mapping[str, Any], np.ndarray, int], np.ndarray]


def silu(a: np.ndarray) -> np.ndarray:
    return a / (1 + np.exp(-a))


def tensors(shapes: Mapping[str, tuple[int, ...]], dtype: Any = np.float32) -> Tensors:
    """Random tensors of the given shapes, by prefixed name; all of them differ."""
    rng = np.random.default_rng(0)
    return {PREFIX + n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}


def _linears(names: Iterable[str], hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Weights of three PyTorch Linears: of gate, up and down."""
    gate, up, down = names
    return {
        f"{gate}.weight": (inner, hidden),
        f"{up}.weight": (inner, hidden),
        f"{down}.weight": (hidden, inner),
    }


def _of_linears(t: Mapping[str, Any], x: np.ndarray, names: Iterable[str]) -> np.ndarray:
    """nn.Linear: y = x weight^T."""
    w_gate, w_up, w_down = (t[f"{PREFIX}{name}.weight"] for name in names)
    return (silu(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T


def qwen3_moe(hidden: int = H, inner: int = I) -> tuple[dict[str, tuple[int, ...]], Expert]:
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (E, hidden)}
    for e in range(E):
        names = (f"experts.{e}.{name}_proj" for name in ("gate", "up", "down"))
        shapes |= _linears(names, hidden, inner)

    def expert(t: Mapping[str, Any], x: np.ndarray, e: int) -> np.ndarray:
        names = (f"experts.{e}.{name}_proj" for name in ("gate", "up", "down"))
        return _of_linears(t, x, names)

    return shapes, expert


def with_shared(
    name: str, hidden: int, inner: int, **more: tuple[int, ...]
) -> tuple[dict[str, tuple[int, ...]], Expert]:
    shapes, expert = qwen3_moe(hidden, inner)
    names = (f"{name}.{part}_proj" for part in ("gate", "up", "down"))
    return shapes | _linears(names, hidden, S) | more, expert


def deepseek_v3(hidden: int = H, inner: int = I) -> tuple[dict[str, tuple[int, ...]], Expert]:
    return with_shared("shared_experts", hidden, inner, **{"gate.e_score_correction_bias": (E,)})


def qwen2_moe(hidden: int = H, inner: int = I) -> tuple[dict[str, tuple[int, ...]], Expert]:
    return with_shared("shared_expert", hidden, inner, **{"shared_expert_gate.weight": (1, hidden)})


def mixtral(hidden: int = H, inner: int = I) -> tuple[dict[str, tuple[int, ...]], Expert]:
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (E, hidden)}
    for e in range(E):
        shapes |= _linears((f"experts.{e}.{w}" for w in ("w1", "w3", "w2")), hidden, inner)

    def expert(t: Mapping[str, Any], x: np.ndarray, e: int) -> np.ndarray:
        return _of_linears(t, x, (f"experts.{e}.{w}" for w in ("w1", "w3", "w2")))

    return shapes, expert


def transformers_stacked(
    hidden: int = H, inner: int = I
) -> tuple[dict[str, tuple[int, ...]], Expert]:
    shapes = {
        "gate.weight": (E, hidden),
        "experts.gate_up_proj": (E, 2 * inner, hidden),
        "experts.down_proj": (E, hidden, inner),
    }

    def expert(t: Mapping[str, Any], x: np.ndarray, e: int) -> np.ndarray:
        gate, up = np.split(x @ t[f"{PREFIX}experts.gate_up_proj"][e].T, 2)
        return (silu(gate) * up) @ t[f"{PREFIX}experts.down_proj"][e].T

    return shapes, expert


def gpt_oss(hidden: int = H, inner: int = I) -> tuple[dict[str, tuple[int, ...]], Expert]:
    """As transformers' GptOssExperts computes it, with biases and its own activation."""
    shapes = {
        "router.weight": (E, hidden),
        "router.bias": (E,),
        "experts.gate_up_proj": (E, hidden, 2 * inner),
        "experts.gate_up_proj_bias": (E, 2 * inner),
        "experts.down_proj": (E, inner, hidden),
        "experts.down_proj_bias": (E, hidden),
    }

    def expert(t: Mapping[str, Any], x: np.ndarray, e: int) -> np.ndarray:
        gate_up = x @ t[f"{PREFIX}experts.gate_up_proj"][e]
        gate_up = gate_up + t[f"{PREFIX}experts.gate_up_proj_bias"][e]
        gate, up = gate_up[::2].clip(max=7.0), gate_up[1::2].clip(-7.0, 7.0)
        glu = gate / (1 + np.exp(-1.702 * gate))
        o = ((up + 1) * glu) @ t[f"{PREFIX}experts.down_proj"][e]
        return o + t[f"{PREFIX}experts.down_proj_bias"][e]

    return shapes, expert


def maxtext(hidden: int = H, inner: int = I) -> tuple[dict[str, tuple[int, ...]], Expert]:
    shapes = {
        "gate/kernel": (hidden, E),
        "wi_0": (E, hidden, inner),
        "wi_1": (E, hidden, inner),
        "wo": (E, inner, hidden),
    }

    def expert(t: Mapping[str, Any], x: np.ndarray, e: int) -> np.ndarray:
        gate, up = (np.einsum("d,df->f", x, t[f"{PREFIX}{name}"][e]) for name in ("wi_0", "wi_1"))
        return np.einsum("f,fd->d", silu(gate) * up, t[f"{PREFIX}wo"][e])

    return shapes, expert


def megablocks(hidden: int = H, inner: int = I) -> tuple[dict[str, tuple[int, ...]], Expert]:
    shapes = {"router.layer.weight": (E, hidden)} | {
        f"experts.mlp.{name}": (E * inner, hidden) for name in ("w1", "v1", "w2")
    }

    def expert(t: Mapping[str, Any], x: np.ndarray, e: int) -> np.ndarray:
        rows = slice(e * inner, (e + 1) * inner)
        w1, v1, w2 = (t[f"{PREFIX}experts.mlp.{name}"][rows] for name in ("w1", "v1", "w2"))
        return (silu(w1 @ x) * (v1 @ x)) @ w2

    return shapes, expert


def up_first(hidden: int = H, inner: int = I) -> tuple[dict[str, tuple[int, ...]], Expert]:
    """A tensor of each expert with up above gate, input before output."""
    shapes: dict[str, tuple[int, ...]] = {}
    for e in range(E):
        shapes |= {f"{e}/up_gate": (hidden, 2 * inner), f"{e}/down": (inner, hidden)}

    def expert(t: Mapping[str, Any], x: np.ndarray, e: int) -> np.ndarray:
        up_gate = x @ t[f"{PREFIX}{e}/up_gate"]
        return (up_gate[:inner] * silu(up_gate[inner:])) @ t[f"{PREFIX}{e}/down"]

    return shapes, expert


def interleaved_rows(hidden: int = H, inner: int = I) -> tuple[dict[str, tuple[int, ...]], Expert]:
    """[E 2I, H] with gate in the odd rows: flat, transposed and interleaved at once."""
    shapes = {"gu": (E * 2 * inner, hidden), "d": (E * hidden, inner)}

    def expert(t: Mapping[str, Any], x: np.ndarray, e: int) -> np.ndarray:
        rows = t[f"{PREFIX}gu"][2 * inner * e : 2 * inner * (e + 1)]
        down = t[f"{PREFIX}d"][hidden * e : hidden * (e + 1)]
        return down @ (silu(rows[1::2] @ x) * (rows[::2] @ x))

    return shapes, expert


FAMILIES = {
    f.__name__: f
    for f in (
        qwen3_moe,
        qwen2_moe,
        deepseek_v3,
        mixtral,
        transformers_stacked,
        gpt_oss,
        maxtext,
        megablocks,
        up_first,
        interleaved_rows,
    )
}
