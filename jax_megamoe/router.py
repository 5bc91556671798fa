"""From router logits to expert choices, their weights, the router's losses and its load.

    logits -> scores -> + selection bias -> groups -> K experts -> their unbiased scores
                                                                -> renormalised -> scaled

A `RouterConfig` says which of these a router has; `presets.py` has those of published models.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_megamoe._router_checks import check_route, check_update, warn_if_weights_are_constant
from jax_megamoe._router_losses import Tokens, load_balance_loss, sequence_balance_loss, z_loss
from jax_megamoe.config import RouterConfig

# Names for jax.checkpoint_policies.save_only_these_names: saving both keeps a rematerialised layer
# on the routes of its forward.
EXPERT_IDX_NAME = "megamoe_expert_idx"
EXPERT_WEIGHT_NAME = "megamoe_expert_weight"


class Routing(NamedTuple):
    """What the router decided for the tokens of one call.

    Attributes:
      expert_idx: int32 [..., K], in falling order of what they were chosen by; -1 for a masked
        token.
      expert_weight: float32 [..., K]; 0 for a masked token.
      load_balance_loss: float32 [], E * sum_e (choices of e per token) * (mean probability of e):
        Switch Transformer, arXiv 2101.03961, eq. 4, times K; K when the load is perfectly even.
      sequence_balance_loss: float32 [], the same within each sequence, a row of tokens along their
        last axis, mean over the sequences: DeepSeek-V3, arXiv 2412.19437, eq. 17, times K.
      z_loss: float32 [], mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5).
      load: int32 [E], how many choices fell on each expert.
    """

    expert_idx: jax.Array
    expert_weight: jax.Array
    load_balance_loss: jax.Array
    sequence_balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array


def route(
    logits: jax.Array,
    num_choices: int,
    config: RouterConfig = RouterConfig(),  # noqa: B008 - frozen
    *,
    selection_bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> Routing:
    """Chooses `num_choices` experts for each token.

    All arithmetic is float32 whatever the dtype of `logits`. What ranks equal is chosen in the
    order of expert ids, groups too, so repeated and recomputed calls agree. NaN ranks highest: a
    logit that is NaN shows in the weights of its token.

    The losses and the load are over all tokens of the call: over the global batch when called on
    global arrays under jit; inside shard_map over the tokens of one rank, or, with `axis_name`,
    over those of all ranks along these axes, the same on each. Their probabilities are the softmax
    of the logits, or the sigmoid scores divided by their sum over all experts. Gradients of the
    losses go through the probabilities and the logits, those of the weights through the chosen
    scores; the choice has none.

    Args:
      logits: floating [..., E].
      num_choices: K, in [1, E]; at most the experts of the chosen groups.
      config: what the router does; the default is `presets.QWEN3_MOE`.
      selection_bias: float32 [E], given with `config.selection_bias` and only then. Gets no
        gradient; `update_selection_bias` moves it.
      mask: bool [...], False for padding. Such a token gets ids -1 and weights 0, its logits reach
        nothing, and no statistic counts it; with no token left all losses are 0.
      axis_name: mesh axes of the enclosing shard_map, or of a vmap.

    Raises:
      TypeError: an argument or a field of `config` of another type or dtype than it may be.
      ValueError: a shape, a size or a combination that is none: no or too many experts, more
        choices than experts to choose from, groups that do not divide E, a missing or unused
        selection bias, an axis that is not bound.

    Warns:
      UserWarning: K = 1 with weights that are the same for any logits, so that the router gets no
        gradient through the experts.
    """
    check_route(logits, num_choices, config, selection_bias, mask, axis_name)
    warn_if_weights_are_constant("num_choices", num_choices, "config", config)
    logits = logits.astype(jnp.float32)
    if mask is not None:
        logits = jnp.where(mask[..., None], logits, 0.0)

    scores = score(logits, config.scores)
    expert_idx = choose(logits, scores, num_choices, config, selection_bias)
    expert_weight = weigh(logits, scores, expert_idx, config)
    if mask is not None:
        expert_idx = jnp.where(mask[..., None], expert_idx, -1)
        expert_weight = jnp.where(mask[..., None], expert_weight, 0.0)

    probabilities = scores if config.scores == "softmax" else _normalize(scores)
    tokens = Tokens(logits.shape[:-1], mask, axis_name)
    chosen = _one_hot(expert_idx, logits.shape[-1])
    load = tokens.over_ranks(chosen.sum(axis=tuple(range(logits.ndim)), dtype=jnp.int32))
    return Routing(
        expert_idx=checkpoint_name(expert_idx, EXPERT_IDX_NAME),
        expert_weight=checkpoint_name(expert_weight, EXPERT_WEIGHT_NAME),
        load_balance_loss=load_balance_loss(probabilities, load, tokens),
        sequence_balance_loss=sequence_balance_loss(probabilities, chosen, tokens),
        z_loss=z_loss(logits, tokens),
        load=load,
    )


def update_selection_bias(
    bias: jax.Array, load: jax.Array, speed: float | jax.Array = 1e-3
) -> jax.Array:
    """The selection bias of the next step, float32 [E]: balancing without a loss.

    DeepSeek-V3, arXiv 2412.19437, section 2.1.2: by `speed` down for each expert with more than the
    mean load, up for each with less. Compared in integers, so an expert at the mean stays.

    Args:
      bias: float32 [E].
      load: of a signed integer dtype [E], the choices of a whole step: summed over its
        microbatches, and over ranks where `route` has not done so. Its sum fits its dtype.
      speed: of the update, at least 0. The default is that of DeepSeek-V3 for most of its training.

    Raises:
      TypeError: an argument of another type or dtype than it may be.
      ValueError: a shape that does not fit, or a negative speed.
    """
    check_update(bias, load, speed)
    load = jnp.asarray(load)
    whole, rest = jnp.divmod(load.sum(dtype=load.dtype), load.size)  # the mean: whole + rest / E
    direction = jnp.sign(2 * jnp.sign(whole - load) + jnp.sign(rest))
    return bias + direction.astype(jnp.float32) * jnp.asarray(speed, jnp.float32)


def score(logits: jax.Array, scores: str) -> jax.Array:
    """Scores float32 [..., C] of float32 logits [..., C]: "softmax" over them, or "sigmoid"."""
    return jax.nn.softmax(logits, axis=-1) if scores == "softmax" else jax.nn.sigmoid(logits)


def choose(
    logits: jax.Array,
    scores: jax.Array,
    num_choices: int,
    config: RouterConfig,
    selection_bias: jax.Array | None,
) -> jax.Array:
    """The experts that rank highest, int32 [..., K], in falling order; ties go to the lowest id.

    Scores rank as their logits do where nothing is added to them. Ranking by the logits keeps apart
    what softmax and sigmoid round together, and makes a tie independent of how the exponential is
    computed.

    Args:
      logits, scores: float32 [..., E]; no gradient goes through either.
      num_choices: K.
      config: of the router.
      selection_bias: float32 [E], where the config has one.
    """
    logits, scores = jax.lax.stop_gradient((logits, scores))
    biased = scores if config.scored == "all" else logits
    if selection_bias is not None:
        bias = jax.lax.stop_gradient(selection_bias)
        biased = biased + jnp.expand_dims(bias, tuple(range(logits.ndim - 1)))
    ranking = logits if selection_bias is None else biased
    if config.num_groups > 1:
        ranking = limit_to_groups(ranking, biased, config)
    return _top(ranking, num_choices)


def limit_to_groups(ranking: jax.Array, scores: jax.Array, config: RouterConfig) -> jax.Array:
    """`ranking` [..., E] with -inf for all experts outside the chosen groups of each token.

    Groups rank by the sum of their two highest `scores` [..., E]. What is ranked inside a chosen
    group stays above -inf, whatever the bias has made of it.
    """
    of_groups = scores.reshape(*scores.shape[:-1], config.num_groups, -1)
    two_highest = jax.lax.sort(of_groups)[..., -2:]  # NaN is last
    group_idx = _top(two_highest.sum(axis=-1), config.num_chosen_groups)
    is_chosen = _one_hot(group_idx, config.num_groups).any(axis=-2)
    is_eligible = jnp.repeat(is_chosen, of_groups.shape[-1], axis=-1)
    lowest = jnp.finfo(jnp.float32).min
    return jnp.where(is_eligible, jnp.maximum(ranking, lowest), -jnp.inf)


def weigh(
    logits: jax.Array, scores: jax.Array, expert_idx: jax.Array, config: RouterConfig
) -> jax.Array:
    """The weights float32 [..., K] of the chosen experts; differentiable in logits and scores."""
    chosen = _one_hot(expert_idx, logits.shape[-1])
    # A sum with one term, rather than a gather: it has no scatter in its gradient, and it works
    # for any sharding of the tokens.
    values = scores if config.scored == "all" else logits
    weights = jnp.where(chosen, values[..., None, :], 0.0).sum(axis=-1)
    if config.scored == "chosen":
        weights = score(weights, config.scores)
    if config.renormalize:
        weights = _normalize(weights)
    return weights * config.scale


def _normalize(weights: jax.Array) -> jax.Array:
    """float32 [..., C] of at least 0, divided by their sum + 1e-20."""
    # The power of two changes no quotient; it keeps the square of the divisor, which the gradient
    # divides by, inside of float32.
    weights = weights * 2.0**32
    return weights / (weights.sum(axis=-1, keepdims=True) + 2.0**32 * 1e-20)


def _top(ranking: jax.Array, count: int) -> jax.Array:
    """int32 [..., count]: where float32 `ranking` is highest, in falling order; ties by index."""
    if _is_split_by_xla():
        return _top_by_sort(ranking, count)
    return jax.lax.top_k(_ordered(ranking), count, is_stable=True)[1]


def _top_by_sort(ranking: jax.Array, count: int) -> jax.Array:
    """The same, by a sort, which XLA splits over devices as the tokens are: for top_k it brings
    those of all devices to each of them."""
    order = jax.lax.rev(jnp.arange(ranking.shape[-1], dtype=jnp.int32), (0,))
    idx = jax.lax.full_like(ranking, 0, jnp.int32)
    idx += jnp.expand_dims(order, tuple(range(ranking.ndim - 1)))
    # Rising and reversed, so that NaN, which a sort puts last, comes first.
    backwards = jax.lax.rev(ranking, (ranking.ndim - 1,))
    _, idx = jax.lax.sort((backwards, idx), num_keys=1, is_stable=True)
    return jax.lax.rev(idx[..., -count:], (idx.ndim - 1,))


def _is_split_by_xla() -> bool:
    """Whether the mesh that is set has axes over which XLA may split an array."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in set(mesh.axis_names) - set(mesh.manual_axes))


def _ordered(ranking: jax.Array) -> jax.Array:
    """float32 `ranking` for top_k, which orders -0.0 below 0.0, and a NaN by its sign: above all
    else or below, and the sign depends on what has computed it."""
    ranking = jnp.where(ranking == 0, 0.0, ranking)
    return jnp.where(jnp.isnan(ranking), jnp.nan, ranking)


def _one_hot(idx: jax.Array, size: int) -> jax.Array:
    """bool [..., K, size]; an id outside [0, size) gives a row of False."""
    return jax.nn.one_hot(idx, size, dtype=jnp.bool_)
