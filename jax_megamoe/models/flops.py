"""Floating-point operations of a training step, for MFU: of the model, not of its recomputation.

    MFU = step_flops / (seconds * devices * peak_flops)

A multiply and an add are two. Counted are the products of a forward with the parameters of a token
(its K experts, not all E) and of attention, for the pairs that it may look at; a backward takes
twice as many. What `remat` computes again is not counted, nor are norms, softmax and the optimizer.
"""

import numpy as np

from jax_megamoe.models.qwen3_config import Qwen3MoeConfig

# Dense bf16 FLOP/s of NVIDIA's data sheets, by a part of the name that JAX gives a GPU; the first
# that fits.
_PEAKS = {
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
}
_PASSES = 3  # a backward is two forwards


def peak_flops(device_kind: str) -> float | None:
    """bf16 FLOP/s of a device, also where the experts are FP8; None: not known."""
    return next((peak for part, peak in _PEAKS.items() if part in device_kind), None)


def step_flops(config: Qwen3MoeConfig, num_tokens: int, num_pairs: int) -> float:
    """Of forward and backward.

    Args:
      num_tokens: positions that go through the layers and the output matrix.
      num_pairs: (query, key) with the key not behind the query and in its sequence.
    """
    of_heads = config.num_attention_heads * config.head_dim
    of_groups = config.num_key_value_heads * config.head_dim
    hidden = config.hidden_size
    parameters = hidden * config.vocab_size
    for has_experts in config.has_experts:
        parameters += hidden * (2 * of_heads + 2 * of_groups)
        if has_experts:
            experts = 3 * config.moe_intermediate_size * config.num_experts_per_tok
            parameters += hidden * (experts + config.num_experts)
        else:
            parameters += 3 * hidden * config.intermediate_size
    of_attention = 4 * of_heads * config.num_hidden_layers
    return _PASSES * (2.0 * parameters * num_tokens + float(of_attention) * num_pairs)


def attended_pairs(segment_ids: np.ndarray) -> int:
    """How many pairs there are in rows [..., S] of sequences that follow each other."""
    starts = np.ones(segment_ids.shape, np.bool_)
    starts[..., 1:] = segment_ids[..., 1:] != segment_ids[..., :-1]
    place = np.arange(segment_ids.shape[-1])
    first = np.maximum.accumulate(np.where(starts, place, 0), axis=-1)
    return int((place - first + 1).sum())
