"""The losses of a router, and over which tokens they are."""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Which tokens a statistic is over.

    Attributes:
      shape: [...], the tokens of this rank.
      mask: bool [...] or None, True for those that count.
      axis_name: mesh axes whose ranks' tokens count together, or None for this rank's alone.
    """

    shape: tuple[int, ...]
    mask: jax.Array | None = None
    axis_name: str | tuple[str, ...] | None = None

    def over_ranks(self, value: jax.Array) -> jax.Array:
        """The sum of each rank's `value`."""
        return value if self.axis_name is None else jax.lax.psum(value, self.axis_name)

    def count(self) -> jax.Array | float:
        """How many tokens count; at least 1, so that it may divide."""
        if self.mask is not None:
            count = self.over_ranks(self.mask.sum(dtype=jnp.int32))
            return jnp.maximum(count, 1).astype(jnp.float32)
        num_ranks = 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)
        return float(max(math.prod(self.shape) * num_ranks, 1))

    def mean(self, values: jax.Array) -> jax.Array:
        """float32 [C], the mean of `values` [..., C]; 0 without a token."""
        if self.mask is not None:
            values = jnp.where(self.mask[..., None], values, 0.0)
        total = values.sum(axis=tuple(range(len(self.shape))))
        return self.over_ranks(total) / self.count()


def load_balance_loss(probabilities: jax.Array, load: jax.Array, tokens: Tokens) -> jax.Array:
    """E * sum_e (choices of e per token) * (mean probability of e), float32 [].

    Switch Transformer, arXiv 2101.03961, eq. 4, for any K, as `load_balancing_loss_func` of
    Qwen3-MoE computes it for one layer: the K choices of a token are not averaged, so an even load
    gives K. The gradient goes through `probabilities` only.

    Args:
      probabilities: float32 [..., E], over all experts.
      load: int32 [E], choices of each expert among `tokens`.
      tokens: the [...] tokens.
    """
    choices_per_token = load.astype(jnp.float32) / tokens.count()
    return load.size * jnp.sum(choices_per_token * tokens.mean(probabilities))


def sequence_balance_loss(probabilities: jax.Array, chosen: jax.Array, tokens: Tokens) -> jax.Array:
    """The load-balance loss of each sequence by itself, mean over the sequences, float32 [].

    DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20, with two differences: it is K times that, so that
    an even load gives K as in `load_balance_loss`; and the load is that of the choices made, by
    biased scores where there is a selection bias. A sequence without a token does not count.

    Args:
      probabilities: float32 [..., S, E], over all experts.
      chosen: bool [..., S, K, E], the choices; nothing for a masked token.
      tokens: the [..., S] tokens.
    """
    mask = tokens.mask
    if not tokens.shape:  # a sequence of one token
        alone = Tokens((1,), None if mask is None else mask[None], tokens.axis_name)
        return sequence_balance_loss(probabilities[None], chosen[None], alone)
    if mask is None:
        lengths, has_token = jnp.float32(max(tokens.shape[-1], 1)), None
    else:
        lengths = jnp.maximum(mask.sum(axis=-1, dtype=jnp.int32), 1).astype(jnp.float32)
        has_token = mask.any(axis=-1)
        probabilities = jnp.where(mask[..., None], probabilities, 0.0)
    load = chosen.sum(axis=(-3, -2), dtype=jnp.int32).astype(jnp.float32)
    products = jnp.sum(load * probabilities.sum(axis=-2), axis=-1)
    losses = probabilities.shape[-1] * products / lengths**2
    sequences = Tokens(tokens.shape[:-1], has_token, tokens.axis_name)
    return sequences.mean(losses[..., None]).sum()


def z_loss(logits: jax.Array, tokens: Tokens) -> jax.Array:
    """Mean over tokens of logsumexp(logits)^2, float32 []; ST-MoE, arXiv 2202.08906, eq. 5.

    Args:
      logits: float32 [..., E].
      tokens: the [...] tokens.
    """
    squared = jax.nn.logsumexp(logits, axis=-1, keepdims=True) ** 2
    return tokens.mean(squared).sum()
