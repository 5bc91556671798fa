"""The layers of Qwen3-MoE: attention, MLP or experts, and what they share."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jax_megamoe import presets
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.models.qwen3_config import Qwen3MoeConfig
from jax_megamoe.nnx import MegaMoE, MegaMoEAux
from jax_megamoe.quantization import QuantizedExperts

ATTENTIONS = ("xla", "cudnn")

Array = jax.Array


class Place:
    """Where tokens stand in their sequences.

    Attributes:
      position: int32 [B, S], or [1, S] for all, counted from the start of the sequence.
      may_attend: bool [B, 1, S, S], which key is of the query's sequence; None: each is.
      mask: bool [B, S], False for padding; None: there is none.
    """

    def __init__(self, tokens: Array, segment_ids: Array | None) -> None:
        position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        self.position, self.may_attend, self.mask = position, None, None
        if segment_ids is None:
            return
        is_start = jnp.diff(segment_ids, axis=1) != 0
        is_start = jnp.pad(is_start, ((0, 0), (1, 0)), constant_values=True)
        start = jax.lax.cummax(jnp.where(is_start, position, 0), axis=1)
        self.position = position - start
        self.may_attend = (start[:, :, None] == start[:, None, :])[:, None]
        self.mask = segment_ids != 0


class Attention(nnx.Module):
    """Causal attention with grouped heads, normalised queries and keys, and rotary positions.

    Parameters, float32:
      query: [H, N D]. key, value: [H, G D]. out: [N D, H].
      query_bias, key_bias, value_bias, out_bias: of their outputs, with `attention_bias`; zeros at
        first.
      query_norm, key_norm: [D], scales that all heads share.
    """

    query: nnx.Param[Array]
    key: nnx.Param[Array]
    value: nnx.Param[Array]
    out: nnx.Param[Array]
    query_bias: nnx.Param[Array]
    key_bias: nnx.Param[Array]
    value_bias: nnx.Param[Array]
    out_bias: nnx.Param[Array]

    def __init__(self, config: Qwen3MoeConfig, implementation: str, rngs: nnx.Rngs) -> None:
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.rope_theta = config.rope_theta
        self.has_bias = config.attention_bias
        self.implementation = implementation
        hidden = config.hidden_size
        of_queries = config.num_attention_heads * config.head_dim
        of_keys = config.num_key_value_heads * config.head_dim
        shapes = {
            "query": (hidden, of_queries),
            "key": (hidden, of_keys),
            "value": (hidden, of_keys),
            "out": (of_queries, hidden),
        }
        init = nnx.initializers.normal(config.initializer_range)
        for name, shape in shapes.items():
            setattr(self, name, make_parameter(rngs, shape, init))
            if config.attention_bias:
                bias = make_parameter(rngs, shape[1:], nnx.initializers.zeros)
                setattr(self, f"{name}_bias", bias)
        self.query_norm = make_parameter(rngs, (config.head_dim,), nnx.initializers.ones)
        self.key_norm = make_parameter(rngs, (config.head_dim,), nnx.initializers.ones)

    def __call__(self, x: Array, place: Place) -> Array:
        """[B, S, H] of x [B, S, H]."""
        query, key, value = (self._heads(name, x) for name in ("query", "key", "value"))
        query, key = (
            rotate(rms_norm(a, scale[...], self.eps), place.position, self.rope_theta)
            for a, scale in ((query, self.query_norm), (key, self.key_norm))
        )
        if self.implementation == "cudnn":
            # JAX's own code mixes dtypes, which a program may have forbidden in its own.
            with jax.numpy_dtype_promotion("standard"):
                mixed = jax.nn.dot_product_attention(
                    query,
                    key,
                    value,
                    mask=place.may_attend,
                    is_causal=True,
                    implementation="cudnn",
                )
        else:
            mixed = attend(query, key, value, place.may_attend)
        return self._project("out", mixed.reshape(*x.shape[:2], -1))

    def _heads(self, name: str, x: Array) -> Array:
        """[B, S, heads, D]."""
        return self._project(name, x).reshape(*x.shape[:2], -1, self.head_dim)

    def _project(self, name: str, x: Array) -> Array:
        y = linear(x, getattr(self, name)[...])
        if not self.has_bias:
            return y
        return y + getattr(self, f"{name}_bias")[...].astype(y.dtype)[None, None]


class Mlp(nnx.Module):
    """The gated MLP of a layer without experts: w_gate and w_up float32 [H, F], w_down [F, H]."""

    def __init__(self, config: Qwen3MoeConfig, rngs: nnx.Rngs) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        init = nnx.initializers.normal(config.initializer_range)
        self.w_gate = make_parameter(rngs, (hidden, inner), init)
        self.w_up = make_parameter(rngs, (hidden, inner), init)
        self.w_down = make_parameter(rngs, (inner, hidden), init)

    def __call__(self, x: Array) -> Array:
        h = jax.nn.silu(linear(x, self.w_gate[...])) * linear(x, self.w_up[...])
        return linear(h, self.w_down[...])


class Block(nnx.Module):
    """A layer: attention, then experts or an MLP, each on the normalised input and added to it."""

    def __init__(
        self,
        config: Qwen3MoeConfig,
        has_experts: bool,
        *,
        moe: MegaMoEConfig,
        expert_axis: str | None,
        data_axes: tuple[str, ...],
        selection_bias: bool,
        dtype: DTypeLike,
        attention: str,
        rngs: nnx.Rngs,
    ) -> None:
        self.eps = config.rms_norm_eps
        self.has_experts = has_experts
        scale = nnx.initializers.ones
        self.attention_norm = make_parameter(rngs, (config.hidden_size,), scale)
        self.attention = Attention(config, attention, rngs)
        self.mlp_norm = make_parameter(rngs, (config.hidden_size,), scale)
        if not has_experts:
            self.mlp = Mlp(config, rngs)
            return
        self.mlp = MegaMoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.num_experts_per_tok,
            config=moe,
            router_config=dataclasses.replace(
                presets.QWEN3_MOE,
                renormalize=config.norm_topk_prob,
                selection_bias=selection_bias,
            ),
            expert_axis=expert_axis,
            data_axes=data_axes,
            dtype=dtype,
            kernel_init=nnx.initializers.normal(config.initializer_range),
            rngs=rngs,
        )

    def __call__(
        self, x: Array, place: Place, quantized: QuantizedExperts | None = None
    ) -> tuple[Array, MegaMoEAux | None]:
        x = x + self.attention(rms_norm(x, self.attention_norm[...], self.eps), place)
        h = rms_norm(x, self.mlp_norm[...], self.eps)
        if isinstance(self.mlp, Mlp):
            return x + self.mlp(h), None
        y, aux = self.mlp(h, place.mask, quantized_experts=quantized)
        return x + y, aux


def attend(query: Array, key: Array, value: Array, may_attend: Array | None) -> Array:
    """Causal attention, [B, S, N, D] of query [B, S, N, D] and key and value [B, S, G, D].

    As `jax.nn.dot_product_attention` in XLA, whose gradients in bfloat16 JAX 0.11.2 refuses under
    strict dtype promotion. may_attend: as in `Place`. Head n of the queries is of group n // (N/G).
    """
    seq, head_dim = query.shape[1], query.shape[3]
    grouped = query.reshape(*query.shape[:2], key.shape[2], -1, head_dim)
    with _exact_products(query.dtype):
        scores = jnp.einsum("bsgnd,btgd->bgnst", grouped, key, preferred_element_type=jnp.float32)
        may_see = jnp.tri(seq, dtype=jnp.bool_)[None, None]
        if may_attend is not None:
            may_see &= may_attend
        least = jnp.finfo(jnp.float32).min
        scores = jnp.where(may_see[:, :, None], scores * head_dim**-0.5, least)
        weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
        return jnp.einsum("bgnst,btgd->bsgnd", weights, value).reshape(query.shape)


def make_parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], init: nnx.Initializer
) -> nnx.Param[Array]:
    """A float32 parameter that all devices have; it lies so from the start where a mesh is set."""
    value = init(rngs.params(), shape, jnp.float32)
    mesh_is_set = not jax.sharding.get_abstract_mesh().empty
    return nnx.Param(value, out_sharding=(None,) * len(shape), eager_sharding=mesh_is_set)


def linear(x: Array, matrix: Array) -> Array:
    """x [..., inputs] times [inputs, outputs] in the dtype of x, which the result has, too."""
    with _exact_products(x.dtype):
        return jnp.matmul(x, matrix.astype(x.dtype))


@jax.custom_vjp
def sums_of_linear(x: Array, matrix: Array, rounded: Array) -> Array:
    """The same as float32, not rounded. Gradients are products in the dtype of x again: of float32
    operands they would take several times as long.

    rounded: the matrix in the dtype of x, which the products take; the gradient is that of
      `matrix`, which is float32. Who multiplies several times makes it once.
    """
    with _exact_products(x.dtype):
        return jnp.matmul(x, rounded, preferred_element_type=jnp.float32)


def _forward_of_sums(x: Array, matrix: Array, rounded: Array) -> tuple[Array, tuple[Array, Array]]:
    return sums_of_linear(x, matrix, rounded), (x, rounded)


def _backward_of_sums(kept: tuple[Array, Array], dy: Array) -> tuple[Array, Array, None]:
    x, rounded = kept
    dy = dy.astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    with _exact_products(x.dtype):
        dx = jnp.matmul(dy, rounded.T)
        d_matrix = jax.lax.dot_general(
            x,
            dy,
            ((rows, rows), ((), ())),
            preferred_element_type=jnp.float32,
            out_sharding=_explicit_sharding(rounded),
        )
    return dx, d_matrix, None


def _explicit_sharding(a: Array) -> jax.sharding.Sharding | None:
    """Of an array over explicit mesh axes, which sums over split rows have to be told."""
    sharding = jax.typeof(a).sharding
    is_explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    return sharding if is_explicit else None


sums_of_linear.defvjp(_forward_of_sums, _backward_of_sums)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """x over the root of its mean square (arXiv 1910.07467) times scale, rounded once."""
    x32 = x.astype(jnp.float32)
    x32 *= jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * jnp.expand_dims(scale, tuple(range(x.ndim - 1)))).astype(x.dtype)


def rotate(x: Array, position: Array, theta: float) -> Array:
    """Rotary positions (arXiv 2104.09864) of x [B, S, heads, D]: element d is paired with d + D/2,
    and their angle at position p is p theta^(-2d/D)."""
    half = x.shape[-1] // 2
    rates = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (position.astype(jnp.float32)[..., None] * rates[None, None])[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _exact_products(dtype: DTypeLike) -> contextlib.AbstractContextManager[None]:
    """float32 products in float32, which a GPU else does in TF32."""
    is_float32 = jnp.dtype(dtype) == jnp.float32
    return jax.default_matmul_precision("highest") if is_float32 else contextlib.nullcontext()
