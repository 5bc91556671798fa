"""One optimizer step and one evaluation of the language model, compiled for the mesh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from lm.model import LanguageModel, ModelConfig, cross_entropy

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
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=max(int(WARMUP_SHARE * steps), 1),
        decay_steps=max(steps, 2),
        end_value=0.0,
    )
    tx = optax.chain(
        optax.clip_by_global_norm(GRADIENT_NORM_LIMIT),
        optax.adamw(schedule, b2=0.95, weight_decay=WEIGHT_DECAY, mask=_is_matrix_of_a_layer),
    )

    @nnx.jit
    def draw() -> tuple[LanguageModel, nnx.Optimizer]:
        model = LanguageModel(config, rngs=nnx.Rngs(seed))
        return _keep_layout(model, nnx.Optimizer(model, tx, wrt=nnx.Param))

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
    _keep_layout(model, optimizer)
    return metrics


@nnx.jit
def evaluate(model: LanguageModel, sequences: np.ndarray) -> jax.Array:
    """Loss in nats per byte, float32 [], of int32 [B, S + 1] sequences."""
    tokens = jax.lax.with_sharding_constraint(jnp.asarray(sequences), TOKENS)
    logits, _ = model(tokens[:, :-1])
    return cross_entropy(logits, tokens[:, 1:])


def _keep_layout(
    model: LanguageModel, optimizer: nnx.Optimizer
) -> tuple[LanguageModel, nnx.Optimizer]:
    """Constrains parameters and optimizer state to the layout of their metadata."""
    state = nnx.state((model, optimizer))
    nnx.update(
        (model, optimizer),
        jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)),
    )
    return model, optimizer


def _is_matrix_of_a_layer(params: nnx.State) -> nnx.State:
    """True where weight decay applies: not on norms [L, H] and the embedding [256, H]."""
    return jax.tree.map(lambda value: value.ndim > 2, params)
