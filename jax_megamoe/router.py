"""From router logits to expert choices, their weights, and the two router losses.

Semantics of Qwen3-MoE (`Qwen3MoeSparseMoeBlock` in Hugging Face transformers): softmax in float32
over all experts, the K largest, and, with `norm_topk_prob`, weights divided by their sum.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_megamoe.config import MAX_CHOICES, MAX_EXPERTS
from jax_megamoe.validation import check_array, check_flag, check_size, refuse

# Names for jax.checkpoint_policies.save_only_these_names: saving both keeps a rematerialised layer
# on the routes of its forward.
EXPERT_IDX_NAME = "megamoe_expert_idx"
EXPERT_WEIGHT_NAME = "megamoe_expert_weight"


class Routing(NamedTuple):
    """What the router decided for the tokens of one call.

    Attributes:
      expert_idx: int32 [..., K], in falling order of score; -1 for a masked token.
      expert_weight: float32 [..., K]; 0 for a masked token.
      load_balance_loss: float32 [], see `load_balance_loss`; K when the load is perfectly even.
      z_loss: float32 [], mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5).
      load: int32 [E], how many choices fell on each expert.
    """

    expert_idx: jax.Array
    expert_weight: jax.Array
    load_balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array


def route(
    logits: jax.Array,
    num_choices: int,
    *,
    renormalize: bool = True,
    mask: jax.Array | None = None,
) -> Routing:
    """Chooses `num_choices` experts for each token.

    All arithmetic is float32 whatever the dtype of `logits`. Equal logits are chosen in the order
    of their expert ids, so repeated and recomputed calls agree. The losses and the load are over
    all tokens of the call: over the global batch when called on global arrays under jit, over the
    tokens of one rank inside shard_map.

    Args:
      logits: floating [..., E].
      num_choices: K, in [1, E].
      renormalize: divide the weights of a token by their sum. With K = 1 every weight is then 1
        and the router gets no gradient through the experts.
      mask: bool [...], False for padding. Such a token gets ids -1 and weights 0, its logits reach
        nothing, and no statistic counts it; with no token left both losses are 0.

    Raises:
      TypeError: `logits` or `mask` is no array, `logits` is not floating, `num_choices` is not an
        int, `renormalize` is not True or False, `mask` is not bool.
      ValueError: `logits` has no expert axis or one that is too long, `num_choices` is not in
        [1, E] or too large, or the shape of `mask` is not that of `logits` without its last axis.
    """
    _check_arguments(logits, num_choices, renormalize, mask)
    logits = logits.astype(jnp.float32)
    if mask is not None:
        logits = jnp.where(mask[..., None], logits, 0.0)

    scores = softmax_scores(logits)
    expert_idx, expert_weight = choose(logits, scores, num_choices)
    if renormalize:
        expert_weight /= expert_weight.sum(axis=-1, keepdims=True)
    if mask is not None:
        expert_idx = jnp.where(mask[..., None], expert_idx, -1)
        expert_weight = jnp.where(mask[..., None], expert_weight, 0.0)

    load = _one_hot(expert_idx, logits.shape[-1]).sum(
        axis=tuple(range(logits.ndim)), dtype=jnp.int32
    )
    return Routing(
        expert_idx=checkpoint_name(expert_idx, EXPERT_IDX_NAME),
        expert_weight=checkpoint_name(expert_weight, EXPERT_WEIGHT_NAME),
        load_balance_loss=load_balance_loss(scores, load, mask),
        z_loss=z_loss(logits, mask),
        load=load,
    )


def softmax_scores(logits: jax.Array) -> jax.Array:
    """Scores float32 [..., E] of float32 logits: the probability of each expert."""
    return jax.nn.softmax(logits, axis=-1)


def choose(ranking: jax.Array, scores: jax.Array, num_choices: int) -> tuple[jax.Array, jax.Array]:
    """The experts that rank highest, and their scores.

    Softmax scores rank as their logits do; ranking by the logits keeps apart what the softmax
    would round together, and makes a tie independent of how the exponential is computed.

    Args:
      ranking: float32 [..., E]; carries no gradient. Ties go to the lowest expert id.
      scores: float32 [..., E], the differentiable weights.
      num_choices: K.

    Returns:
      int32 [..., K] expert ids in falling order, float32 [..., K] their scores.
    """
    ranking = jax.lax.stop_gradient(ranking)
    ranking = jnp.where(ranking == 0, 0.0, ranking)  # top_k orders -0.0 below 0.0
    _, expert_idx = jax.lax.top_k(ranking, num_choices, is_stable=True)
    # A sum with one term, rather than a gather: it has no scatter in its gradient, and it works
    # for any sharding of the tokens.
    chosen = _one_hot(expert_idx, scores.shape[-1])
    return expert_idx, jnp.where(chosen, scores[..., None, :], 0.0).sum(axis=-1)


def load_balance_loss(scores: jax.Array, load: jax.Array, mask: jax.Array | None) -> jax.Array:
    """E * sum_e (choices of e per token) * (mean score of e), float32 [].

    Switch Transformer, arXiv 2101.03961, eq. 4, for any K, as `load_balancing_loss_func` of
    Qwen3-MoE computes it for one layer: the K choices of a token are not averaged, so an even load
    gives K. The gradient goes through `scores` only.

    Args:
      scores: float32 [..., E].
      load: int32 [E], choices of each expert among the same tokens.
      mask: bool [...] or None, True for the tokens that count.
    """
    num_experts = scores.shape[-1]
    choices_per_token = load.astype(jnp.float32) / _num_tokens(scores, mask)
    return num_experts * jnp.sum(choices_per_token * _mean_over_tokens(scores, mask))


def z_loss(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Mean over tokens of logsumexp(logits)^2, float32 []; ST-MoE, arXiv 2202.08906, eq. 5.

    Args:
      logits: float32 [..., E].
      mask: bool [...] or None, True for the tokens that count.
    """
    squared = jax.nn.logsumexp(logits, axis=-1, keepdims=True) ** 2
    return _mean_over_tokens(squared, mask).sum()


def _one_hot(expert_idx: jax.Array, num_experts: int) -> jax.Array:
    """bool [..., K, E]; an id outside [0, E) gives a row of False."""
    return jax.nn.one_hot(expert_idx, num_experts, dtype=jnp.bool_)


def _num_tokens(values: jax.Array, mask: jax.Array | None) -> jax.Array | float:
    """How many tokens of `values` [..., C] count; at least 1, so that it may divide."""
    if mask is None:
        return float(max(math.prod(values.shape[:-1]), 1))
    return jnp.maximum(mask.sum(dtype=jnp.int32), 1).astype(jnp.float32)


def _mean_over_tokens(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """[C], the mean of float32 `values` [..., C] over the tokens that count; 0 without any."""
    if mask is not None:
        values = jnp.where(mask[..., None], values, 0.0)
    return values.sum(axis=tuple(range(values.ndim - 1))) / _num_tokens(values, mask)


def _check_arguments(
    logits: jax.Array, num_choices: int, renormalize: bool, mask: jax.Array | None
) -> None:
    check_array("logits", logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        refuse(TypeError, "logits", f"of dtype {logits.dtype}", "of a floating dtype")
    if logits.ndim < 1:
        refuse(ValueError, "logits", f"of shape {logits.shape}", "[..., E]")
    num_experts = logits.shape[-1]
    if not 1 <= num_experts <= MAX_EXPERTS:
        refuse(ValueError, "logits", f"of E = {num_experts}", f"of E in 1..{MAX_EXPERTS}")
    check_size("num_choices", num_choices, min(num_experts, MAX_CHOICES))
    check_flag("renormalize", renormalize)
    if mask is not None:
        check_mask(mask, logits.shape[:-1])


def check_mask(mask: jax.Array, token_shape: tuple[int, ...]) -> None:
    """Raises TypeError or ValueError unless `mask` is bool of the shape of the tokens."""
    check_array("mask", mask)
    if mask.dtype != jnp.bool_:
        refuse(TypeError, "mask", f"of dtype {mask.dtype}", "of dtype bool, True for real tokens")
    if mask.shape != token_shape:
        refuse(
            ValueError, "mask", f"of shape {mask.shape}", f"of shape {token_shape}, as the tokens"
        )
