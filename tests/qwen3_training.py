"""A tiny Qwen3-MoE that is trained for some steps on a mesh of simulated devices."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jax_megamoe.models import training, training_config

# 37 is a size of nothing else.
VOCABULARY, SEQ, BATCH, CHUNK = 4 * 37, 16, 8, 4
MODEL = {
    "base": "qwen3-30b-a3b",
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
RUN: dict[str, Any] = {
    "model": MODEL,
    "seq": SEQ,
    "batch": BATCH,
    "loss_chunk": CHUNK,
    "precision": "float32",
    "remat": "none",
    "steps": 8,
    "warmup": 1,
    "learning_rate": 1e-2,
}


class Trained(NamedTuple):
    """What is left of a run: metrics of each step, and the state with its layout."""

    config: training_config.TrainingConfig
    metrics: list[training.StepMetrics]
    state: dict[tuple[Any, ...], nnx.Variable[jax.Array]]
    model: Any
    optimizer: Any

    @property
    def losses(self) -> np.ndarray:
        return np.array([m.loss for m in self.metrics])


def make_config(**changes: Any) -> training_config.TrainingConfig:
    return training_config.from_dict(RUN | changes)


def make_batch(num_microbatches: int = 1) -> training.Batch:
    """Rows that each hold parts of several sequences, one of them with padding behind."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (BATCH, SEQ + 1)).astype(np.int32)
    ids = 1 + np.sort(rng.integers(0, 3, (BATCH, SEQ + 1)), axis=1).astype(np.int32)
    ids[-1, 9:] = 0
    parts = (a.reshape(num_microbatches, -1, SEQ + 1) for a in (tokens, ids))
    return training.Batch(*parts)


@functools.cache
def trained(num_devices: int = 1, num_steps: int = 4, **changes: Any) -> Trained:
    config = make_config(**changes)
    mesh = training.make_mesh(config, jax.devices()[:num_devices])
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, training.BATCH_SPEC)
        batch = jax.device_put(make_batch(config.microbatches), sharding)
        model, optimizer = training.create(config)
        metrics = [
            jax.device_get(training.train_step(model, optimizer, batch, config))
            for _ in range(num_steps)
        ]
    state = dict(nnx.to_flat_state(nnx.state((model, optimizer))))
    return Trained(config, metrics, state, model, optimizer)
