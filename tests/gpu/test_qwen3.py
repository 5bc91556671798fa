"""Qwen3-MoE on a GPU, in bfloat16: the kernels under it, and both of its attentions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_megamoe import MegaMoEConfig
from jax_megamoe.models.qwen3_moe import QWEN3_30B_A3B, Qwen3Moe

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(
    QWEN3_30B_A3B,
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=8,
    head_dim=64,
    moe_intermediate_size=128,
    num_experts=16,
    num_experts_per_tok=4,
)
TOKENS = jax.random.randint(jax.random.key(0), (4, 128), 0, CONFIG.vocab_size)
PACKED = jnp.asarray(np.repeat([[1, 2, 0]], 4, 0).repeat([48, 64, 16], 1), jnp.int32)


def run(segment_ids: jax.Array | None, **options: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Logits, the gradient of the embedding, and all gradients."""
    model = nnx.jit(lambda: Qwen3Moe(CONFIG, **options, rngs=nnx.Rngs(0)))()

    def loss(model: Qwen3Moe) -> Any:
        logits, aux = model(TOKENS, segment_ids)
        return jnp.mean(logits**2) + 0.01 * aux.load_balance_loss.mean(), logits

    gradients, logits = nnx.jit(nnx.grad(loss, has_aux=True))(model)
    return np.asarray(logits), np.asarray(gradients["embedding"][...]), gradients


def assert_near(found: Any, expected: Any) -> None:
    """bfloat16 of both, of which a router may make other choices for a few tokens."""
    for a, b in zip(found[:2], expected[:2], strict=True):
        scale = np.sqrt(np.mean(b.astype(np.float64) ** 2))
        assert np.median(np.abs(a - b)) < 0.02 * scale
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found[2]))


@pytest.mark.parametrize("segment_ids", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("attention", ["xla", "cudnn"])
def test_bfloat16_is_near_float32(attention: str, segment_ids: jax.Array | None) -> None:
    kernels = {"moe": MegaMoEConfig(backend="cuda"), "dtype": jnp.bfloat16}
    assert_near(run(segment_ids, attention=attention, **kernels), run(segment_ids))
