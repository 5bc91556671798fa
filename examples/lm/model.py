"""A small byte-level language model whose feed-forward layers are mixtures of experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jax_megamoe.config import MegaMoEConfig, RouterConfig
from jax_megamoe.nnx import MegaMoE, MegaMoEAux

VOCABULARY = 256
ROPE_BASE = 10_000.0
INIT_SCALE = 0.02  # of the embedding and the experts, as in Qwen3-MoE


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model; `dtype` is that of the activations, parameters are float32."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    experts: int
    choices: int
    dtype: DTypeLike
    moe: MegaMoEConfig


class Attention(nnx.Module):
    """Causal self-attention with rotary positions: [B, S, H] -> [B, S, H]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.qkv = nnx.Linear(
            config.hidden, 3 * config.hidden, use_bias=False, dtype=config.dtype, rngs=rngs
        )
        self.out = nnx.Linear(
            config.hidden, config.hidden, use_bias=False, dtype=config.dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).reshape(batch, seq, 3, self.heads, hidden // self.heads)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.reshape(batch, seq, hidden))


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding (arXiv 2104.09864) of x [B, S, heads, D], D even."""
    seq, half = x.shape[1], x.shape[3] // 2
    rates = ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.outer(jnp.arange(seq, dtype=jnp.float32), rates)[None, :, None, :]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Block(nnx.Module):
    """Attention and experts, each on the normalised input and added to it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.experts_norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)
        self.experts = MegaMoE(
            config.hidden,
            config.intermediate,
            config.experts,
            config.choices,
            config=config.moe,
            expert_axis="expert",
            data_axes=("data",),
            router_config=RouterConfig(renormalize=config.choices > 1),
            dtype=config.dtype,
            kernel_init=nnx.initializers.normal(INIT_SCALE),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MegaMoEAux]:
        x = x + self.attention(self.attention_norm(x))
        y, aux = self.experts(self.experts_norm(x))
        return x + y, aux


class LanguageModel(nnx.Module):
    """int32 [B, S] bytes -> float32 [B, S, 256] logits of the next byte, and each layer's aux."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.dtype = config.dtype
        self.embedding = nnx.Param(
            INIT_SCALE * jax.random.normal(rngs.params(), (VOCABULARY, config.hidden))
        )

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def stack_of_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.blocks = stack_of_blocks(rngs)
        self.final_norm = nnx.RMSNorm(config.hidden, dtype=config.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, MegaMoEAux]:
        @nnx.scan(
            in_axes=(0, nnx.Carry),
            out_axes=(nnx.Carry, 0),
            transform_metadata={nnx.PARTITION_NAME: None},
        )
        @nnx.remat
        def apply_block(block: Block, x: jax.Array) -> tuple[jax.Array, MegaMoEAux]:
            return block(x)

        embedding = self.embedding[...].astype(self.dtype)
        x, aux = apply_block(self.blocks, embedding[tokens])
        logits = jnp.einsum(
            "bsh,vh->bsv", self.final_norm(x), embedding, preferred_element_type=jnp.float32
        )
        return logits, aux


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean loss in nats per byte of float32 [B, S, 256] logits for int32 [B, S] targets."""
    target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target_logit)


def generate(
    model: LanguageModel, prompt: np.ndarray, num_new: int, seq: int, temperature: float
) -> jax.Array:
    """Continues int32 [B, S] prompts by `num_new` bytes: [B, S + num_new].

    The model sees the last `seq` bytes at each step, S included. Temperature 0 takes the likeliest
    byte; otherwise bytes are drawn with a fixed key.
    """
    length = prompt.shape[1]
    total = max(length + num_new, seq)
    text = jnp.pad(jnp.asarray(prompt), ((0, 0), (0, total - length)))
    graph, state = nnx.split(model)

    def append(position: jax.Array, text: jax.Array) -> jax.Array:
        start = jnp.maximum(position - seq, 0)
        window = jax.lax.dynamic_slice_in_dim(text, start, seq, axis=1)
        logits, _ = nnx.merge(graph, state, copy=True)(window)
        last = jax.lax.dynamic_index_in_dim(logits, position - start - 1, axis=1, keepdims=False)
        if temperature > 0:
            key = jax.random.fold_in(jax.random.key(0), position)
            chosen = jax.random.categorical(key, last / temperature, axis=-1)
        else:
            chosen = jnp.argmax(last, axis=-1)
        return jax.lax.dynamic_update_slice_in_dim(
            text, chosen[:, None].astype(text.dtype), position, axis=1
        )

    return jax.lax.fori_loop(length, length + num_new, append, text)[:, : length + num_new]
