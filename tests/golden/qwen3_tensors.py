"""Small Qwen3-MoE checkpoints that NumPy draws, so that nobody has to store them.

Names and shapes are those of transformers, written here from its sources: nothing of this project
is asked for them, so that both the script beside this file and the tests can build on it.
"""

from typing import Any

import numpy as np

Fields = dict[str, Any]

_SIZES: Fields = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "rope_theta": 1_000_000.0,
}
# Each a config.json, and between them every choice that such a file has.
CASES: dict[str, Fields] = {
    "published": _SIZES,
    "other_choices": _SIZES
    | {
        "num_key_value_heads": 1,
        "norm_topk_prob": False,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-2,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_only_layers": [0],
    },
    "mixed_layers": _SIZES
    | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
}


def has_experts(fields: Fields, layer: int) -> bool:
    is_sparse = (layer + 1) % fields.get("decoder_sparse_step", 1) == 0
    return is_sparse and layer not in fields.get("mlp_only_layers", ())


def shapes(fields: Fields) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a checkpoint."""
    hidden, vocabulary = fields["hidden_size"], fields["vocab_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(fields["num_hidden_layers"]):
        of_layer = _attention(fields)
        of_layer |= {f"{name}.weight": (hidden,) for name in _NORMS}
        if has_experts(fields, layer):
            of_layer["mlp.gate.weight"] = (fields["num_experts"], hidden)
            for e in range(fields["num_experts"]):
                inner = fields["moe_intermediate_size"]
                of_layer |= _mlp(f"mlp.experts.{e}", hidden, inner)
        else:
            of_layer |= _mlp("mlp", hidden, fields["intermediate_size"])
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    found["model.norm.weight"] = (hidden,)
    if not fields.get("tie_word_embeddings", False):
        found["lm_head.weight"] = (vocabulary, hidden)
    return found


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _attention(fields: Fields) -> dict[str, tuple[int, ...]]:
    hidden, head = fields["hidden_size"], fields["head_dim"]
    of_queries, of_keys = (
        fields[f"num_{kind}_heads"] * head for kind in ("attention", "key_value")
    )
    linears = {
        "q_proj": (of_queries, hidden),
        "k_proj": (of_keys, hidden),
        "v_proj": (of_keys, hidden),
        "o_proj": (hidden, of_queries),
    }
    found = {f"self_attn.{name}.weight": shape for name, shape in linears.items()}
    if fields.get("attention_bias", False):
        found |= {f"self_attn.{name}.bias": shape[:1] for name, shape in linears.items()}
    return found | {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    linears = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    return {f"{prefix}.{name}.weight": shape for name, shape in linears.items()}


def tensors(name: str) -> dict[str, np.ndarray]:
    """float32, of a case: scales of norms around 1, matrices that keep the size of what they take,
    and an embedding, biases and routers that differ enough to matter."""
    # The legacy generator, whose numbers NumPy promises to keep.
    rng = np.random.RandomState(list(CASES).index(name))
    found = {}
    for key, shape in shapes(CASES[name]).items():
        drawn = rng.standard_normal(shape)
        if "norm" in key:
            drawn = 1 + 0.2 * drawn
        elif key.endswith(".bias"):
            drawn = 0.3 * drawn
        elif "embed_tokens" not in key:
            drawn = drawn * shape[-1] ** -0.5
        found[key] = drawn.astype(np.float32)
    return found


def batch(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, int32 [3, 14], and which of them are real, bool: the last row ends early."""
    rng = np.random.RandomState(100 + list(CASES).index(name))
    tokens = rng.randint(0, CASES[name]["vocab_size"], (3, 14)).astype(np.int32)
    is_real = np.ones(tokens.shape, bool)
    is_real[-1, 9:] = False
    return tokens, is_real
