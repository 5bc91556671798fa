"""Experts of JAX's existing kernels in the place of the layer of a model that is there.

The drop-in of docs/drop-in.md the other way round: the submodule is exchanged after construction,
and takes the variables of the one before, so that parameters, optimizer state, router, losses and
load are those of jax_megamoe.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from _implementations import Dot, ragged_layer, tokamax_dot
from _ranks import AXIS, gathered_layer
from flax import nnx
from jax.sharding import PartitionSpec

from jax_megamoe import route
from jax_megamoe.models.qwen3_moe import Qwen3Moe
from jax_megamoe.nnx import MegaMoE, MegaMoEAux
from jax_megamoe.quantization import QuantizedExperts

# Grouped products by the name of the implementation that they make.
PRODUCTS: Mapping[str, Callable[[], Dot]] = {
    "tokamax_ragged_dot": functools.cache(tokamax_dot),
    "lax_ragged_dot": lambda: jax.lax.ragged_dot,
}


class RaggedMoE(MegaMoE):
    """`MegaMoE` whose experts are sorted rows, three grouped products and a weighted sum.

    Over several ranks all tokens and routes go to each, and a float32 `psum_scatter` brings the
    sums back, as `_ranks.gathered_layer`: of what JAX has, the fastest (docs/measurements.md).
    """

    def __init__(self, theirs: MegaMoE, product: str, peer_rows: float) -> None:
        """Takes the variables and choices of `theirs`.

        Args:
          theirs: without what Qwen3-MoE has not: a linear bias, shared experts, biases of experts.
          product: of PRODUCTS.
          peer_rows: a rank has room for so many times the rows of an even routing; what is beyond
            is lost. At least the number of ranks loses nothing.
        """
        for name, value in vars(theirs).items():
            if not name.startswith("_"):
                setattr(self, name, value)
        self.product = product
        self.peer_rows = peer_rows

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        *,
        quantized_experts: QuantizedExperts | None = None,
    ) -> tuple[jax.Array, MegaMoEAux]:
        """As `MegaMoE`, of x [B, S, H], without a mask and without quantised weights."""
        if mask is not None or quantized_experts is not None:
            raise NotImplementedError("a mask or quantised weights for grouped products of JAX")
        x32, router = (a.astype(jnp.float32) for a in (x, self.router[...]))
        logits = jnp.matmul(x32, router, precision=jax.lax.Precision.HIGHEST)
        bias = self.selection_bias[...] if self.router_config.selection_bias else None
        choices = self.num_experts_per_token
        routing = route(logits, choices, self.router_config, selection_bias=bias)
        weights = (w[...] for w in (self.w_gate, self.w_up, self.w_down))
        y = self._experts(x, routing.expert_idx, routing.expert_weight, *weights)
        return y, MegaMoEAux(**{name: getattr(routing, name) for name in MegaMoEAux._fields})

    def _experts(self, *arrays: jax.Array) -> jax.Array:
        dot = PRODUCTS[self.product]()
        num_ranks = jax.sharding.get_abstract_mesh().shape[AXIS]
        layer = ragged_layer(dot) if num_ranks == 1 else gathered_layer(dot, self.peer_rows - 1)

        def of_a_device(x: jax.Array, ids: jax.Array, w: jax.Array, *weights: jax.Array):
            rows = (a.reshape(-1, a.shape[-1]) for a in (x, ids, w))
            return layer(*rows, *(a.astype(x.dtype) for a in weights)).reshape(x.shape)

        tokens, experts = PartitionSpec((*self.data_axes, AXIS)), PartitionSpec(AXIS)
        # Pallas kernels say nothing of the axes that their results vary over.
        return jax.shard_map(
            of_a_device,
            in_specs=(*(tokens,) * 3, *(experts,) * 3),
            out_specs=tokens,
            check_vma=False,
        )(*arrays)


def exchange(model: Qwen3Moe, product: str, peer_rows: float) -> None:
    """Puts a `RaggedMoE` in the place of each layer's experts.

    Raises:
      ValueError: the model has none.
    """
    found = [(run, run.mlp) for run in model.runs if isinstance(run.mlp, MegaMoE)]
    if not found:
        raise ValueError("the model has no layer with experts")
    for run, mlp in found:
        run.mlp = RaggedMoE(mlp, product, peer_rows)


def most_rows(load: Any, num_ranks: int) -> float:
    """The rows of a step's busiest rank over those of an even routing; load: int [layers, E]."""
    of_ranks = load.reshape(load.shape[0], num_ranks, -1).sum(-1)
    return float((of_ranks.max(1) / of_ranks.mean(1)).max())


def parameters(model: nnx.Module) -> dict[str, jax.Array]:
    """By their paths, with dots between."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}
