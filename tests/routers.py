"""The definition of a router in float64, token by token, and routers to hold to it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import RouterConfig, Routing, presets

E = 12
# Of E experts and 3 choices: each preset's kind, and each option by itself.
CONFIGS = {
    "softmax": RouterConfig(),
    "softmax_raw": RouterConfig(renormalize=False),
    "softmax_chosen": presets.GPT_OSS,
    "softmax_bias": RouterConfig(selection_bias=True),
    "softmax_groups": RouterConfig(num_groups=3, num_chosen_groups=2, renormalize=False),
    "sigmoid": RouterConfig(scores="sigmoid"),
    "sigmoid_raw": RouterConfig(scores="sigmoid", renormalize=False, scale=2.0),
    "sigmoid_chosen": RouterConfig(scores="sigmoid", scored="chosen", renormalize=False),
    "chosen_bias_groups": RouterConfig(
        scores="sigmoid",
        scored="chosen",
        num_groups=4,
        num_chosen_groups=2,
        selection_bias=True,
    ),
    "deepseek": RouterConfig(
        scores="sigmoid",
        scale=2.5,
        num_groups=4,
        num_chosen_groups=2,
        selection_bias=True,
    ),
}


def bias_of(config: RouterConfig, num_experts: int = E, seed: int = 5) -> jax.Array | None:
    """A selection bias that changes choices, or None where the config has none."""
    if not config.selection_bias:
        return None
    return jnp.asarray(np.random.default_rng(seed).normal(size=num_experts), jnp.float32)


def route_float64(
    logits: Any,
    num_choices: int,
    config: RouterConfig = RouterConfig(),  # noqa: B008 - frozen
    selection_bias: Any = None,
    mask: Any = None,
) -> Routing:
    """The definition, in NumPy: logits [..., E] with at least one leading dimension."""
    logits = np.asarray(logits, np.float64)
    *shape, num_experts = logits.shape
    mask = np.ones(shape, bool) if mask is None else np.asarray(mask)
    bias = np.zeros(num_experts) if selection_bias is None else np.float64(selection_bias)
    idx = np.full((*shape, num_choices), -1)
    weight = np.zeros((*shape, num_choices))
    probability = np.zeros((*shape, num_experts))
    squared = np.zeros(shape)
    for t in map(tuple, np.argwhere(mask)):
        scores = _score(logits[t], config.scores)
        ranking = (scores if config.scored == "all" else logits[t]) + bias
        idx[t] = _choose(ranking, num_choices, config)
        chosen = idx[t]
        weight[t] = (
            scores[chosen] if config.scored == "all" else _score(logits[t][chosen], config.scores)
        )
        if config.renormalize:
            weight[t] /= weight[t].sum() + 1e-20
        weight[t] *= config.scale
        probability[t] = scores / scores.sum()
        squared[t] = (np.log(np.exp(logits[t] - logits[t].max()).sum()) + logits[t].max()) ** 2
    rows = probability.reshape(-1, shape[-1], num_experts)
    choices = idx.reshape(-1, shape[-1], num_choices)
    counts = mask.reshape(-1, shape[-1]).sum(-1)
    pairs = zip(choices, rows, counts, strict=True)
    by_sequence = [_balance(c, p, n) for c, p, n in pairs if n]
    num_tokens = max(counts.sum(), 1)
    return Routing(
        expert_idx=idx,  # pyright: ignore[reportArgumentType]
        expert_weight=weight,  # pyright: ignore[reportArgumentType]
        load_balance_loss=_balance(idx, probability.reshape(-1, num_experts), num_tokens),
        sequence_balance_loss=np.mean(by_sequence) if by_sequence else 0.0,  # pyright: ignore[reportArgumentType]
        z_loss=squared.sum() / num_tokens,
        load=_load(idx, num_experts),
    )


def _score(logits: np.ndarray, scores: str) -> np.ndarray:
    if scores == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    exp = np.exp(logits - logits.max())
    return exp / exp.sum()


def _choose(ranking: np.ndarray, num_choices: int, config: RouterConfig) -> list[int]:
    size = len(ranking) // config.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
    of_groups = [sum(sorted(ranking[list(group)])[-2:]) for group in groups]
    best = sorted(range(len(groups)), key=lambda g: (-of_groups[g], g))[: config.num_chosen_groups]
    eligible = [e for g in best for e in groups[g]]
    return sorted(eligible, key=lambda e: (-ranking[e], e))[:num_choices]


def _load(idx: np.ndarray, num_experts: int) -> Any:
    return np.bincount(idx[idx >= 0], minlength=num_experts)


def _balance(idx: np.ndarray, probability: np.ndarray, num_tokens: int) -> Any:
    num_experts = probability.shape[-1]
    fractions = _load(idx, num_experts) / num_tokens
    return num_experts * np.sum(fractions * probability.sum(0) / num_tokens)
