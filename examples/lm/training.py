"""One optimizer step and one evaluation of the language model, compiled for the mesh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lm.model import LanguageModel, ModelConfig, cross_entropy

from jax_megamoe.models.training import keep_layout, make_optimizer

BALANCE_FACTOR = 0.01
Z_FACTOR = 0.001
WARMUP_SHARE = 0.1
WEIGHT_DECAY = 0.1
GRADIENT_NORM_LIMIT = 1.0
TOKENS = jax.P(("data", "expert"))


class StepMetrics(NamedTuple):
    """float32 [] each: nats per byte; the busiest expert's load over the mean, mean over layers."""

    loss: jax.Array
    imbalance: jax.Array


def create(
    config: ModelConfig, *, learning_rate: float, steps: int, seed: int
) -> tuple[LanguageModel, nnx.Optimizer]:
    """Draws the parameters, the same for every mesh, laid out as their metadata says."""
    tx = make_optimizer(
        learning_rate=learning_rate,
        steps=steps,
        warmup=max(int(WARMUP_SHARE * steps), 1),
        weight_decay=WEIGHT_DECAY,
        gradient_norm=GRADIENT_NORM_LIMIT,
    )

    @nnx.jit
    def draw() -> tuple[LanguageModel, nnx.Optimizer]:
        model = LanguageModel(config, rngs=nnx.Rngs(seed))
        return keep_layout(model, nnx.Optimizer(model, tx, wrt=nnx.Param))

    return draw()


@nnx.jit(donate_argnums=(0, 1))
def train_step(
    model: LanguageModel, optimizer: nnx.Optimizer, sequences: np.ndarray
) -> StepMetrics:
    """Updates model and optimizer on int32 [B, S + 1] sequences."""

    def loss_of(model: LanguageModel) -> tuple[jax.Array, StepMetrics]:
        tokens = jax.lax.with_sharding_constraint(jnp.asarray(sequences), TOKENS)
        logits, aux = model(tokens[:, :-1])
        loss = cross_entropy(logits, tokens[:, 1:])
        load = aux.load.astype(jnp.float32)
        imbalance = jnp.mean(load.max(axis=-1) / load.mean(axis=-1))
        total = loss + BALANCE_FACTOR * aux.load_balance_loss.mean() + Z_FACTOR * aux.z_loss.mean()
        return total, StepMetrics(loss, imbalance)

    gradients, metrics = nnx.grad(loss_of, has_aux=True)(model)
    optimizer.update(model, gradients)
    keep_layout(model, optimizer)
    return metrics


@nnx.jit
def evaluate(model: LanguageModel, sequences: np.ndarray) -> jax.Array:
    """Loss in nats per byte, float32 [], of int32 [B, S + 1] sequences."""
    tokens = jax.lax.with_sharding_constraint(jnp.asarray(sequences), TOKENS)
    logits, _ = model(tokens[:, :-1])
    return cross_entropy(logits, tokens[:, 1:])
