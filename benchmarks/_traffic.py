"""The bytes of payload that a rank's call moves over NVLink: as its kernels count them, and as the
model says, exactly, from the ids of the call.

The model is docs/protocol.md's: a token goes once to each rank that has a route of it, however many
of its experts are there, and one row of sums comes back from each.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from _nvlink import row_bytes
from _shapes import Shape
from jax.sharding import Mesh, PartitionSpec

from jax_megamoe import QuantizedExperts, _ffi
from jax_megamoe._call_arrays import TRAFFIC_RECORDS
from jax_megamoe.config import Dims, MegaMoEConfig

# Those of PeerTraffic in cuda/shared/trace.h, in their order: what the rank reads of others, and
# what it sends to them.
COUNTS = ("inputs_read", "sums_sent", "dw_sent", "routing_sent", "flags_sent")

Traffic = dict[str, int]


def of_layer(
    mesh: Mesh,
    shape: Shape,
    pass_name: str,
    config: MegaMoEConfig,
    arrays: Sequence[jax.Array],
    quantized: QuantizedExperts | None = None,
) -> dict[str, list[Traffic] | None]:
    """The traffic of each rank in one call of a pass, of both passes if it is "forward_backward".

    Args:
      arrays: those of the layer, split over the one axis of the mesh.
      quantized: with config.precision "fp8_block" its quantised weights, split likewise.

    Returns:
      "model", and "counted": by the kernels; None where they do not run.
    """
    dims = _dims(shape)
    ids = np.asarray(arrays[1]).reshape(dims.R, dims.T, dims.K)
    passes = {"forward": (False,), "backward": (True,)}.get(pass_name, (False, True))
    of_pass = functools.partial(
        model,
        ids,
        dims,
        combine_dtype=config.combine_dtype,
        precision=config.precision,
        takes_gate_up=config.save == "gate_up",
    )
    said = [_sum(of_pass(rank, is_backward=b) for b in passes) for rank in range(dims.R)]
    if jax.default_backend() != "gpu":
        return {"model": said, "counted": None}
    run = jax.jit(traced(mesh, shape, pass_name, config))
    records = [np.asarray(a) for a in run(quantized, *arrays)]
    split = [np.split(a, dims.R) for a in records]
    found = [_sum(map(counted, of_rank)) for of_rank in zip(*split, strict=True)]
    return {"model": said, "counted": found}


def traced(
    mesh: Mesh, shape: Shape, pass_name: str, config: MegaMoEConfig
) -> Callable[..., tuple[jax.Array, ...]]:
    """A program of all ranks, of quantised weights or None and the layer's arrays: the records of
    each call, one rank behind another."""
    (axis,) = mesh.axis_names
    common = {"dims": _dims(shape), "config": config, "axis_name": axis, "trace": True}
    keeps = config.save == "gate_up"

    def run(quantized: QuantizedExperts | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        how = {**common, "quantized": quantized}
        _, _, *kept, of_forward = _ffi.forward_call(*arrays, keep_gate_up=keeps, **how)
        if pass_name == "forward":
            return (of_forward,)
        gate_up = kept[0] if kept else None
        *_, of_backward = _ffi.backward_call(arrays[0], *arrays, gate_up=gate_up, **how)
        return (of_backward,) if pass_name == "backward" else (of_forward, of_backward)

    spec = PartitionSpec(axis)
    return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)


def counted(records: np.ndarray) -> Traffic:
    """What the kernels of one rank counted, from its records of a call with trace=True over several
    ranks, int32 [1 + capacity + TRAFFIC_RECORDS, 4]."""
    words = np.ascontiguousarray(records[-TRAFFIC_RECORDS:]).view(np.uint64).reshape(-1)
    return dict(zip(COUNTS, words.tolist(), strict=False))


def model(
    expert_idx: np.ndarray,
    dims: Dims,
    rank: int,
    *,
    is_backward: bool,
    combine_dtype: str = "float32",
    precision: str = "bf16",
    takes_gate_up: bool = False,
) -> Traffic:
    """The same by formula, of a call in one pass.

    Args:
      expert_idx: [R, T, K] of all ranks; ids outside [0, E) are no routes.
      takes_gate_up: the backward computes neither g nor u again.
    """
    local = expert_idx.astype(np.int64) - rank * dims.experts_per_rank
    is_route = (local >= 0) & (local < dims.experts_per_rank)
    is_route[rank] = False
    num_tokens = int(is_route.any(axis=2).sum())
    num_peers = dims.R - 1
    return {
        "inputs_read": num_tokens * row_bytes(dims.H, is_backward, precision, takes_gate_up),
        "sums_sent": num_tokens * dims.H * np.dtype(combine_dtype).itemsize,
        "dw_sent": int(is_route.sum()) * 4 * is_backward,
        "routing_sent": num_peers * dims.T * dims.K * 8,
        "flags_sent": (num_tokens + num_peers) * 4,
    }


def _dims(shape: Shape) -> Dims:
    return Dims(T=shape.T, K=shape.K, E=shape.E, R=shape.R, H=shape.H, I=shape.I)


def _sum(calls: Iterable[Traffic]) -> Traffic:
    each = list(calls)
    return {name: sum(call[name] for call in each) for name in COUNTS}
