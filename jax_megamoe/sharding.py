"""`sharded_mega_moe`: the op on global arrays, for callers under plain `jit` with a mesh."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jax_megamoe._ids import canonical_ids, checked
from jax_megamoe._quantized_checks import check_quantized
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.ops import ArrayLike, apply, apply_keeping, name_kept, vary_alike
from jax_megamoe.quantization import QuantizedExperts
from jax_megamoe.validation import check_sharded_call, given_biases, make_config

Array = jax.Array


def sharded_mega_moe(
    x: ArrayLike,
    expert_idx: ArrayLike,
    expert_weight: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    *,
    b_gate: ArrayLike | None = None,
    b_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    quantized_experts: QuantizedExperts | None = None,
    expert_axis: str,
    data_axes: Sequence[str] = (),
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """`mega_moe` wrapped in `jax.shard_map` over every mesh axis that is not manual yet.

    The first leading dimension of x is split over (*data_axes, expert_axis), the experts over
    expert_axis. Arguments that are sharded otherwise (FSDP weights, say) are resharded on entry,
    their gradients on the way back, and y returns with the sharding of x. Works with explicit and
    automatic axes, and inside a shard_map that is manual over other axes, such as the data axes.

    Args:
      x: [T, ..., H]; expert_idx, expert_weight: [T, ..., K]. T is a multiple of the number of
        devices that it is split over. Dtypes as in `mega_moe`.
      w_gate, w_up: [E, H, I]; w_down: [E, I, H]; b_gate, b_up: [E, I] and b_down: [E, H], or None.
      quantized_experts: as for `mega_moe`, of all E experts.
      expert_axis: the mesh axis of the experts, of size 1, 2, 4 or 8.
      data_axes: further mesh axes that split the tokens; those that are manual already are left
        out. Devices along axes that are named nowhere do the same work.
      mesh: default: the one set with `jax.set_mesh`, or that of the enclosing shard_map.
      **options: the static options of `mega_moe`.

    Returns:
      y [T, ..., H] in the dtype of x; with return_counts also the rows of each expert over all
      tokens, int32 [E].

    Raises:
      TypeError, ValueError: while tracing, as `mega_moe`, and for a mesh or an axis that does not
        fit.
    """
    config = make_config("sharded_mega_moe", options)
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    experts = (w_gate, w_up, w_down, *given_biases(b_gate, b_up, b_down))
    arrays = (x, expert_idx, expert_weight, *experts)
    free_data_axes = check_sharded_call(
        *arrays, config=config, mesh=mesh, expert_axis=expert_axis, data_axes=data_axes
    )
    check_quantized(quantized_experts, w_gate, config, mesh=mesh)
    if isinstance(expert_idx, np.ndarray):
        if config.debug_checks:
            expert_idx = checked(expert_idx, num_experts=w_gate.shape[0])
        expert_idx = canonical_ids(expert_idx, num_experts=w_gate.shape[0])
    call = _Call(mesh, expert_axis, free_data_axes, config, len(experts))
    quantized, *operands = vary_alike(quantized_experts, x, expert_idx, expert_weight, *experts)
    quantized = jax.tree.map(lambda a: call.reshard(a, call.of_experts), quantized)
    resharded = [call.reshard(a, spec) for a, spec in zip(operands, call.specs, strict=True)]
    y, counts = _sharded(call, quantized, *resharded)
    y = call.reshard(y, jax.typeof(x).sharding.spec)
    return (y, counts) if config.return_counts else y


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of one sharded call."""

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    expert_axis: str
    data_axes: tuple[str, ...]
    config: MegaMoEConfig
    num_expert_arrays: int

    @property
    def of_tokens(self) -> PartitionSpec:
        return PartitionSpec((*self.data_axes, self.expert_axis))

    @property
    def of_experts(self) -> PartitionSpec:
        """Of what belongs to the experts, and of each array of their quantised weights."""
        return PartitionSpec(self.expert_axis)

    @property
    def specs(self) -> tuple[PartitionSpec, ...]:
        """Of x, expert_idx, expert_weight, the experts' weights and, if there are any, biases."""
        return (self.of_tokens,) * 3 + (self.of_experts,) * self.num_expert_arrays

    def op(self, quantized: QuantizedExperts | None, *arrays: Array) -> tuple[Array, Array]:
        y, counts = apply(self.config, self.expert_axis, *arrays, quantized=quantized)
        return y, self.over_data(counts)

    def op_keeping(
        self, quantized: QuantizedExperts | None, *arrays: Array
    ) -> tuple[Array, Array, tuple[Array, ...]]:
        y, counts, kept = apply_keeping(self.config, self.expert_axis, *arrays, quantized=quantized)
        return y, self.over_data(counts), kept

    def over_data(self, counts: Array) -> Array:
        return jax.lax.psum(counts, self.data_axes) if self.data_axes else counts

    def shard_map(self, f: Any, in_specs: Any, out_specs: Any) -> Any:
        free = set(self.mesh.axis_names) - set(self.mesh.manual_axes)
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=free
        )

    def reshard(self, a: Array, spec: PartitionSpec) -> Array:
        """Moves to `spec` along the explicit axes, where JAX wants it said; the others follow."""
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        if AxisType.Explicit not in types.values():
            return a
        parts = []
        for entry in spec:
            names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
            parts.append(tuple(n for n in names if types[n] == AxisType.Explicit) or None)
        return jax.sharding.reshard(a, jax.NamedSharding(self.mesh, PartitionSpec(*parts)))


# The derivative is taken inside the shard_map, not of it. So the residuals are the inputs, what
# config.save keeps and nothing else, and a shard_map nested in one that is manual over the data
# axes can be differentiated at all: JAX 0.11 would shard its residuals over axes that are manual
# already.
def _evaluate(
    call: _Call, quantized: QuantizedExperts | None, *arrays: Array
) -> tuple[Array, Array]:
    out_specs = (call.of_tokens, call.of_experts)
    return call.shard_map(call.op, (call.of_experts, *call.specs), out_specs)(quantized, *arrays)


def _sharded_fwd(call: _Call, quantized: QuantizedExperts | None, *arrays: Array):
    out_specs = (call.of_tokens, call.of_experts, call.of_tokens)
    run = call.shard_map(call.op_keeping, (call.of_experts, *call.specs), out_specs)
    y, counts, kept = run(quantized, *arrays)
    return (y, counts), (arrays, quantized, name_kept(kept))


def _sharded_bwd(
    call: _Call,
    residuals: tuple[tuple[Array, ...], QuantizedExperts | None, tuple[Array, ...]],
    cotangents: tuple[ArrayLike, object],
):
    def gradient(
        kept: tuple[Array, ...],
        quantized: QuantizedExperts | None,
        dy: Array,
        x: Array,
        expert_idx: Array,
        *rest: Array,
    ):
        def of_floats(x: Array, *rest: Array) -> Array:
            given = {"quantized": quantized, "kept": kept}
            return apply(call.config, call.expert_axis, x, expert_idx, *rest, **given)[0]

        return jax.vjp(of_floats, x, *rest)[1](dy)

    arrays, quantized, kept = residuals
    tokens, _, *specs = call.specs
    in_specs = (tokens, call.of_experts, tokens, *call.specs)
    run = call.shard_map(gradient, in_specs, (tokens, *specs))
    dx, *rest = run(kept, quantized, jnp.asarray(cotangents[0]), *arrays)
    return None, dx, np.zeros(arrays[1].shape, jax.dtypes.float0), *rest


_sharded = jax.custom_vjp(_evaluate, nondiff_argnums=(0,))
_sharded.defvjp(_sharded_fwd, _sharded_bwd)
