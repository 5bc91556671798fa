"""What a step of Qwen3-MoE is given, and its loss, with few logits in memory."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jax_megamoe.models.qwen3_moe import Qwen3Moe
from jax_megamoe.nnx import MegaMoEAux

Array = jax.Array

AXES = ("data", "fsdp", "expert")
# A step's sequences, each of its microbatches over all devices.
BATCH_SPEC = P(None, AXES)


class Batch(NamedTuple):
    """The sequences of a step, of A microbatches of B, laid out as `BATCH_SPEC`.

    Attributes:
      tokens: int32 [A, B, S + 1], numpy or jax: each position but the last predicts the next.
      segment_ids: int32 [A, B, S + 1], as `Qwen3Moe` takes them; a token of another sequence than
        the next one, or padding, predicts nothing. None: each row is one sequence.
    """

    tokens: Any
    segment_ids: Any = None


def split(batch: Batch) -> Batch:
    """Constrained to `BATCH_SPEC`."""
    return jax.lax.with_sharding_constraint(jax.tree.map(jnp.asarray, batch), BATCH_SPEC)


def is_target(batch: Batch) -> Array:
    """bool [..., S]: which positions predict the next token."""
    ids = batch.segment_ids
    if ids is None:
        return jnp.ones_like(batch.tokens[..., 1:], jnp.bool_)
    return (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != 0)


def of_microbatch(
    model: Qwen3Moe, part: Batch, quantized: Any, positions_at_a_time: int
) -> tuple[Array, MegaMoEAux]:
    """`summed_loss` of one of the A microbatches, and the aux of its layers.

    quantized: of `model.quantize_experts`, or None.
    """
    ids = None if part.segment_ids is None else part.segment_ids[:, :-1]
    hidden, aux = model.hidden(part.tokens[:, :-1], ids, quantized_experts=quantized)
    targets = part.tokens[:, 1:]
    return summed_loss(model, hidden, targets, is_target(part), positions_at_a_time), aux


def summed_loss(
    model: Qwen3Moe, hidden: Array, targets: Array, is_target: Array, positions_at_a_time: int
) -> Array:
    """Sum of -log p(target) over the targets, float32 [], with few logits in memory.

    Args:
      model: of `training.make_model`, on the mesh that is set.
      hidden: [B, S, H], of `model.hidden`.
      targets: int32 [B, S]. is_target: bool [B, S], which of them count.
      positions_at_a_time: that many of each sequence, a divisor of S, have their logits made
        together; the backward makes them again.
    """

    def parts(a: Array) -> Array:
        batch, seq, *rest = a.shape
        chunks = a.reshape(batch, seq // positions_at_a_time, positions_at_a_time, *rest)
        return jnp.moveaxis(chunks, 1, 0)

    def of_a_device(matrix: Array, *rows: Array) -> Array:
        # Varying before the scan, so that its gradient is summed over devices behind it, once.
        matrix, zero = jax.lax.pcast((matrix, jnp.float32(0)), AXES, to="varying")
        rounded = jax.lax.stop_gradient(matrix).astype(hidden.dtype)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def add(total: Array, part: tuple[Array, ...]) -> tuple[Array, None]:
            hidden, targets, is_target = part
            logits = model.logits(hidden, matrix, rounded)
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            return total + jnp.where(is_target, nll, 0.0).sum(), None

        total, _ = jax.lax.scan(add, zero, tuple(map(parts, rows)))
        return jax.lax.psum(total, AXES)

    run = jax.shard_map(of_a_device, in_specs=(P(), P(AXES), P(AXES), P(AXES)), out_specs=P())
    return run(model.output_matrix(), hidden, targets, is_target)
