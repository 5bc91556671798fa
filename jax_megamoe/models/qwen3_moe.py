"""Qwen3-MoE (arXiv 2505.09388) as a Flax NNX module, with this package's layer for its experts.

    config = dataclasses.replace(QWEN3_30B_A3B, num_hidden_layers=4)
    model = Qwen3Moe(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    logits, aux = model(tokens)

Shapes beside the dimensions above: [B, S] sequences and their positions, N heads of queries, G of
keys and values, D of one head, F of the MLP of a layer without experts, V of the vocabulary.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.models import storage
from jax_megamoe.models.qwen3_checks import (
    check_computation,
    check_config,
    check_rngs,
    check_scan,
    check_tokens,
)
from jax_megamoe.models.qwen3_config import QWEN3_30B_A3B as QWEN3_30B_A3B
from jax_megamoe.models.qwen3_config import QWEN3_235B_A22B as QWEN3_235B_A22B
from jax_megamoe.models.qwen3_config import Qwen3MoeConfig as Qwen3MoeConfig
from jax_megamoe.models.qwen3_config import from_hugging_face as from_hugging_face
from jax_megamoe.models.qwen3_config import to_hugging_face as to_hugging_face
from jax_megamoe.models.qwen3_layers import (
    Array,
    Block,
    Place,
    make_parameter,
    rms_norm,
    sums_of_linear,
)
from jax_megamoe.nnx import MegaMoE, MegaMoEAux
from jax_megamoe.quantization import QuantizedExperts, quantize_expert_weights
from jax_megamoe.validation import check_flag, refuse


class Qwen3Moe(nnx.Module):
    """int [B, S] tokens -> float32 [B, S, V] logits of the next one, and each layer's losses.

    Parameters are float32; the layers compute in `dtype`. Norms, softmax, rotations and routers
    compute in float32 whatever it is, and logits are float32 sums. In float32 all products are
    float32, on GPUs too.

    Layers that follow each other and are of one kind, with experts or with an MLP, are one `Block`
    of `runs` whose parameters are stacked, [layers, ...], whatever `scan` is. All layers of the
    published models are one run. The experts' parameters carry `expert_axis` in their metadata, as
    `jax_megamoe.nnx.MegaMoE` says; everything else is replicated, or with `fsdp_axes` stored split
    and gathered layer by layer.

    Parameters:
      embedding: float32 [V, H].
      runs: a list of `Block`.
      norm: float32 [H], the scale of the last norm.
      head: float32 [H, V], without `config.tie_word_embeddings`.
    """

    head: nnx.Param[Array]

    def __init__(
        self,
        config: Qwen3MoeConfig,
        *,
        moe: MegaMoEConfig | None = None,
        expert_axis: str | None = None,
        data_axes: tuple[str, ...] = (),
        fsdp_axes: tuple[str, ...] = (),
        selection_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        attention: str = "xla",
        scan: bool = True,
        remat: bool = True,
        remat_policy: Callable[..., Any] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Draws the parameters.

        Args:
          config: which model it is.
          moe: the static choices of the experts; None: precision "float32" with `dtype` float32,
            and else the defaults, in bf16.
          expert_axis: mesh axis that splits the experts, or None for one device.
          data_axes: mesh axes that, with `expert_axis`, split the sequences.
          fsdp_axes: axes of the mesh that is set, all of which are automatic then, over which each
            parameter is stored split by one of its dimensions, and over `expert_axis` too where the
            experts are not. One with no dimension that the devices divide stays whole.
          selection_bias: the routers have one, see `jax_megamoe.nnx.MegaMoE`, [layers, E] of a run;
            checkpoints of Hugging Face have no place for it.
          dtype: of the activations, float32 or bfloat16.
          attention: "xla", any platform, or "cudnn", a GPU's fused attention: bfloat16 alone.
          scan: a run of layers is a scan over its parameters, so that one layer is compiled;
            False: each layer is in the program by itself.
          remat: keep each layer's input for the backward and compute the rest again.
          remat_policy: of `jax.checkpoint`, what is kept besides; with `moe.save="gate_up"` one
            that saves the name "megamoe_gate_up" (docs/architecture.md).
          rngs: its `params` stream is used.

        Raises:
          TypeError, ValueError: an argument of another type or value than it may have, "cudnn"
            with float32, a policy without `remat`, axes that do not fit the mesh, and what the
            layer refuses.
        """
        check_config(config)
        check_computation(dtype, attention)
        check_scan(scan, remat, remat_policy)
        check_flag("selection_bias", selection_bias)
        storage.check_fsdp_axes(fsdp_axes, expert_axis)
        check_rngs(rngs)
        if moe is None:
            is_float32 = jnp.dtype(dtype) == jnp.float32
            moe = MegaMoEConfig(precision="float32") if is_float32 else MegaMoEConfig()
        self.config = config
        self.moe = moe
        self.expert_axis = expert_axis
        self.data_axes = data_axes
        self.fsdp_axes = fsdp_axes
        self.dtype = dtype
        self.scan = scan
        self.remat = remat
        self.remat_policy = remat_policy
        options = {"moe": moe, "expert_axis": expert_axis, "data_axes": data_axes}
        options |= {"selection_bias": selection_bias, "dtype": dtype, "attention": attention}
        init = nnx.initializers.normal(config.initializer_range)
        self.embedding = make_parameter(rngs, (config.vocab_size, config.hidden_size), init)
        self.runs = nnx.List(
            [
                _stack_of_blocks(config, has_experts, num_layers, options, rngs)
                for has_experts, num_layers in _runs_of(config)
            ]
        )
        self.norm = make_parameter(rngs, (config.hidden_size,), nnx.initializers.ones)
        if not config.tie_word_embeddings:
            self.head = make_parameter(rngs, (config.hidden_size, config.vocab_size), init)
        if fsdp_axes:
            storage.split(self, fsdp_axes, expert_axis)

    def __call__(self, tokens: Array, segment_ids: Array | None = None) -> tuple[Array, MegaMoEAux]:
        """Logits of the token behind each position.

        Args:
          tokens: int [B, S], in [0, V). With `expert_axis`, B is a multiple of the number of
            devices along (*data_axes, expert_axis).
          segment_ids: int [B, S], for rows that hold several sequences, or less than one: positions
            beside each other with one id are one sequence, which attends to itself alone and whose
            positions count from 0. 0 is padding: no expert sees it, no statistic counts it, and its
            logits mean nothing. None: each row is one sequence.

        Returns:
          float32 [B, S, V], and losses and load of each layer with experts, their first dimension.

        Raises:
          TypeError, ValueError: while tracing, for arrays of another dtype or shape.
        """
        hidden, aux = self.hidden(tokens, segment_ids)
        return self.logits(hidden), aux

    def hidden(
        self,
        tokens: Array,
        segment_ids: Array | None = None,
        *,
        quantized_experts: Sequence[QuantizedExperts | None] | None = None,
    ) -> tuple[Array, MegaMoEAux]:
        """What `logits` makes logits of, [B, S, H] in `dtype`, and the aux of `__call__`.

        For a loss that makes the logits of a few positions at a time: all of them at once are the
        largest array of a step.

        quantized_experts: of `quantize_experts`, for calls that share it; None: each layer
          quantises for itself where its precision asks for it, to the same bits.
        """
        check_tokens(tokens, segment_ids)
        quantized = quantized_experts or [None] * len(self.runs)
        if len(quantized) != len(self.runs):
            was, may_be = f"of length {len(quantized)}", f"one for each of {len(self.runs)} runs"
            refuse(ValueError, "quantized_experts", was, may_be)
        place = Place(tokens, segment_ids)
        x = self._rows(tokens).astype(self.dtype)
        found = []
        for run, of_run in zip(self.runs, quantized, strict=True):
            x, aux = self._apply_run(run, x, place, of_run)
            found += [] if aux is None else [aux]
        aux = jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)
        return rms_norm(x, self._whole(self.norm), self.config.rms_norm_eps), aux

    def logits(
        self, hidden: Array, matrix: Array | None = None, rounded: Array | None = None
    ) -> Array:
        """float32 [..., V] of what `hidden` returned, [..., H] in `dtype`.

        matrix: of `output_matrix`, for calls that share it; rounded: it in `dtype`, likewise, of
          which no gradient is taken.
        """
        matrix = self.output_matrix() if matrix is None else matrix
        return sums_of_linear(
            hidden, matrix, matrix.astype(hidden.dtype) if rounded is None else rounded
        )

    def output_matrix(self) -> Array:
        """float32 [H, V], all of it on each device: what `logits` multiplies with."""
        if self.config.tie_word_embeddings:
            return self._whole(self.embedding).T
        return self._whole(self.head)

    def quantize_experts(self) -> tuple[QuantizedExperts | None, ...]:
        """Of each run its experts' weights as precision="fp8_block" multiplies them, each array
        [layers, ...]; None of a run without experts. They are of the parameters as they are now."""
        return tuple(
            jax.vmap(quantize_expert_weights)(
                *(w[...] for w in (run.mlp.w_gate, run.mlp.w_up, run.mlp.w_down))
            )
            if isinstance(run.mlp, MegaMoE)
            else None
            for run in self.runs
        )

    def _whole(self, variable: nnx.Param[Array]) -> Array:
        if not self.fsdp_axes:
            return variable[...]
        return storage.whole(variable, self.expert_axis)

    def _gathered(self, variable: nnx.Variable[Array]) -> nnx.Variable[Array]:
        if not isinstance(variable, nnx.Param):
            return variable
        return variable.replace(storage.whole(variable, self.expert_axis))

    @property
    def _row_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the sequences."""
        return (*self.data_axes, *([] if self.expert_axis is None else [self.expert_axis]))

    def _rows(self, tokens: Array) -> Array:
        """float32 [B, S, H] of the embedding, which lie as the tokens do."""
        embedding = self._whole(self.embedding)
        if self.fsdp_axes:
            return storage.rows_of(embedding, tokens, self._row_axes)
        spec = jax.typeof(tokens).sharding.spec
        is_split = any(axis is not None for axis in spec)  # by explicit axes
        return embedding.at[tokens].get(out_sharding=P(*spec, None) if is_split else None)

    def _apply_run(
        self, run: Block, x: Array, place: Place, quantized: QuantizedExperts | None
    ) -> tuple[Array, MegaMoEAux | None]:
        """x behind all layers of a run, and their stacked aux, None of layers without experts."""
        graph, variables = nnx.split(run)
        state = variables, quantized

        def apply_layer(x: Array, layer: Any) -> tuple[Array, MegaMoEAux | None]:
            variables, quantized = layer
            if self.fsdp_axes:
                x = jax.lax.with_sharding_constraint(x, P(self._row_axes))
                variables = jax.tree.map(self._gathered, variables, is_leaf=_is_variable)
            return nnx.merge(graph, variables)(x, place, quantized)

        if self.remat:
            # Inside of a scan nothing could be merged with what is computed again.
            apply_layer = jax.checkpoint(
                apply_layer, policy=self.remat_policy, prevent_cse=not self.scan
            )
        if self.scan:
            return jax.lax.scan(apply_layer, x, state)
        found = []
        for n in range(len(run.attention_norm[...])):
            x, aux = apply_layer(x, jax.tree.map(lambda a, n=n: a[n], state))
            found.append(aux)
        return x, jax.tree.map(lambda *layers: jnp.stack(layers), *found)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _runs_of(config: Qwen3MoeConfig) -> Iterator[tuple[bool, int]]:
    """(has experts, number of layers) of each run of layers of one kind."""
    for has_experts, layers in itertools.groupby(config.has_experts):
        yield has_experts, len(list(layers))


def _stack_of_blocks(
    config: Qwen3MoeConfig,
    has_experts: bool,
    num_layers: int,
    options: dict[str, Any],
    rngs: nnx.Rngs,
) -> Block:
    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
    def stack(rngs: nnx.Rngs) -> Block:
        return Block(config, has_experts, **options, rngs=rngs)

    return stack(rngs)
