"""The layer over the GPUs of one host beside its peers: what `layer.py --set ranks` measures.

Per GPU T tokens, and E experts in all. jax_megamoe and the JAX peer run in one process over all
GPUs, under shard_map; jax_megamoe also, and PyTorch only, in a process a GPU (_jax_ranks.py,
_torch_ranks.py, _workers.py). A product, one on each GPU at once, is the base of the rates of one
GPU. jax_megamoe on one GPU with all experts and T tokens (EP1) is measured beside: `over_ep1` of a
record says what the exchange costs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _implementations import (
    IMPLEMENTATIONS,
    Dot,
    Layer,
    backend,
    differentiated,
    ragged_sum,
    squares,
    tokamax_dot,
    with_gradients,
    with_quantized,
)
from _measured import Make, Variant, measure_beside, record, run_against_bound
from _report import FP8, OURS, Named, is_chosen
from _shapes import RANK_PEERS, SEED, Shape, inputs, normal
from _timing import Clock, Figures, Method, Run
from _traffic import of_layer
from _workers import How, Workers
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_megamoe import QuantizedExperts, mega_moe, quantize_expert_weights
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.plan import ceil_div

AXIS = "expert"
GATHERED, EXCHANGED, EXCHANGED_FP8 = RANK_PEERS
PROCESS_MODELS = ("single_process", "process_per_gpu")
# Of what is ours over ranks.
PRECISIONS = {OURS: "bf16", FP8: "fp8_block"}
# What runs in a process a GPU, by implementation.
WORKER_MODULES = {
    **dict.fromkeys((OURS, FP8), "_jax_ranks"),
    **dict.fromkeys((EXCHANGED, EXCHANGED_FP8), "_torch_ranks"),
}
# The options of a layer by the dtype of the sums that its ranks send each other.
SUMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"combine_dtype": "bfloat16"},
}
# The JAX peer gathers this share of a balanced rank's rows on top of them, far more than random
# routing needs (0.3 % at T = 16384, K = 8). It is not dropless: rows beyond would be lost.
SPARE_ROWS = 1 / 16


def expert_mesh(num_ranks: int) -> Mesh:
    """Of the first devices; of several processes, of the first one of each."""
    devices = jax.devices()
    if jax.process_count() > 1:
        devices = [next(d for d in devices if d.process_index == p) for p in range(num_ranks)]
    return Mesh(np.array(devices[:num_ranks]), (AXIS,), axis_types=(AxisType.Auto,))


def on_ranks(mesh: Mesh, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Splits the first dimension of each over the mesh; every process has all of each."""
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return [jax.make_array_from_callback(a.shape, sharding, a.__getitem__) for a in arrays]


def split(f: Callable[..., Any], mesh: Mesh, *, check_vma: bool = True) -> Callable[..., Any]:
    """f, a program of all ranks, as one of whole arrays, of which each rank has its share."""
    spec = PartitionSpec(AXIS)
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)


def run_of(mesh: Mesh, program: Callable[..., Any], *arguments: Any) -> Run:
    """Calls of a program of whole arrays."""
    call = functools.partial(jax.jit(program), *arguments)
    if jax.default_backend() == "cpu":
        # Simulated devices wait for each other for ever when calls with collectives queue up.
        return Run(lambda: jax.block_until_ready(call()), lambda _: None, num_devices=mesh.size)
    return Run(call, jax.block_until_ready, num_devices=mesh.size)


def layer_run(
    layer: Layer,
    mesh: Mesh,
    pass_name: str,
    arrays: Sequence[jax.Array],
    *,
    quantized: QuantizedExperts | None = None,
    check_vma: bool = True,
) -> Run:
    """A pass of a layer as one rank sees it, as `_implementations.jax_run`.

    arrays, quantized: those of `on_ranks` and `quantized_on`.
    """

    def forward(quantized: QuantizedExperts | None, *arrays: jax.Array) -> Any:
        return with_quantized(layer, quantized)(*arrays)

    def whole(quantized: QuantizedExperts | None, dy: jax.Array, *arrays: jax.Array) -> Any:
        return with_gradients(with_quantized(layer, quantized), dy, *arrays)

    def pulled(quantized: QuantizedExperts | None, *arrays: jax.Array) -> Callable[..., Any]:
        of_all = functools.partial(split(forward, mesh, check_vma=check_vma), quantized)
        _, pull = differentiated(of_all, True, *arrays)
        return pull

    if pass_name == "forward":
        return run_of(mesh, split(forward, mesh, check_vma=check_vma), quantized, *arrays)
    (dy,) = on_ranks(mesh, [normal(jax.random.key(SEED + 1), arrays[0].shape, "bf16")])
    if pass_name == "backward":
        pull = jax.jit(pulled)(quantized, *arrays)
        return run_of(mesh, lambda pull, dy: pull(dy), pull, dy)
    return run_of(mesh, split(whole, mesh, check_vma=check_vma), quantized, dy, *arrays)


def quantized_on(mesh: Mesh, arrays: Sequence[jax.Array]) -> QuantizedExperts:
    """The weights among arrays of `on_ranks` as a step in FP8 quantises them once, split alike."""
    return jax.jit(split(quantize_expert_weights, mesh))(*arrays[3:])


def jax_megamoe(
    mesh: Mesh,
    pass_name: str,
    save: str,
    arrays: Sequence[jax.Array],
    sums: str = "float32",
    quantized: QuantizedExperts | None = None,
) -> Run:
    """In FP8 if there are quantised weights."""
    layer = functools.partial(
        mega_moe,
        axis_name=AXIS,
        backend=backend(),
        save=save,
        precision="bf16" if quantized is None else "fp8_block",
        **SUMS[sums],
    )
    return layer_run(layer, mesh, pass_name, arrays, quantized=quantized)


def tokamax_all_gather(mesh: Mesh, pass_name: str, arrays: Sequence[jax.Array]) -> Run:
    # Pallas kernels say nothing of the axes that their results vary over.
    return layer_run(gathered_layer(tokamax_dot()), mesh, pass_name, arrays, check_vma=False)


def gathered_layer(dot: Dot, spare_rows: float = SPARE_ROWS) -> Layer:
    """All tokens and routes to every rank, its experts' sums of them, and their sums back.

    spare_rows: a rank has room for so large a share of a balanced one's rows on top of them.
    """

    def layer(x: jax.Array, ids: jax.Array, w: jax.Array, *weights: jax.Array) -> jax.Array:
        num_rows = ceil_div(round(ids.size * (1 + spare_rows)), 8) * 8
        num_local = weights[0].shape[0]
        x, ids, w = (jax.lax.all_gather(a, AXIS, tiled=True) for a in (x, ids, w))
        local = ids - jax.lax.axis_index(AXIS) * num_local
        local = jnp.where((local >= 0) & (local < num_local), local, num_local)
        sums = ragged_sum(dot, x, local, w, *weights, num_rows=min(num_rows, ids.size))
        return jax.lax.psum_scatter(sums, AXIS, tiled=True).astype(x.dtype)

    return layer


def matmuls(mesh: Mesh, size: int) -> Run:
    """A bf16 product of two square matrices on each GPU, at the same time."""
    factors = on_ranks(mesh, squares(mesh.size, size))
    return run_of(mesh, split(lambda a, b: (a[0] @ b[0])[None], mesh), *factors)


def rank_variants(
    shape: Shape,
    pass_name: str,
    *,
    only: Sequence[str],
    saves: Sequence[str],
    process_models: Sequence[str] = PROCESS_MODELS,
) -> list[Variant]:
    """jax_megamoe over the GPUs and on one, with each `save`, and the peers over the GPUs; what is
    in `BY_NAME` when `only` names it.

    With a process a GPU it sends float32 sums only.
    """
    forward = pass_name == "forward"
    kept = ["none"] if forward else saves
    one, several = PROCESS_MODELS
    found = []
    for ours in (OURS, FP8):
        if one in process_models:
            found += [Variant(ours, save, ep=shape.R, sums=sums) for sums in SUMS for save in kept]
        if several in process_models:
            found += [Variant(ours, save, ep=shape.R, process_model=several) for save in kept]
        found += [Variant(ours, save) for save in kept]
    for peer in shape.peers:
        model = one if peer == GATHERED else several
        keeps = "none" if forward else "activations"
        found.append(Variant(peer, keeps, ep=shape.R, process_model=model))
    return [v for v in found if is_chosen(v.impl, only)]


def run_over_ranks(
    shape: Shape,
    pass_name: str,
    chosen: Sequence[Variant],
    workers: Mapping[str, Workers],
    method: Method,
    clock: Clock | None,
    matmul_size: int,
    *,
    counts_bytes: bool = True,
) -> list[Named]:
    """The records of the chosen variants, all measured in the same rounds.

    workers: by implementation, for its variants with a process a GPU. They compile while this
    process does, after the product, whose algorithm XLA chooses by timing. counts_bytes: those over
    NVLink of ours, each by a program of its own.
    """
    mesh = expert_mesh(shape.R)
    product = matmuls(mesh, matmul_size)
    product.seconds(1)
    hows = {v: _how(v, pass_name, shape) for v in chosen if v.process_model != PROCESS_MODELS[0]}
    for impl, of_impl in workers.items():
        if mine := [how for v, how in hows.items() if v.impl == impl]:
            of_impl.begin(mine)
    arrays = on_ranks(mesh, inputs(shape, "bf16"))
    quantized = quantized_on(mesh, arrays) if any(v.impl == FP8 for v in chosen) else None
    has_one = any(v.ep == 1 for v in chosen)
    alone = inputs(dataclasses.replace(shape, R=1), "bf16") if has_one else []
    makes: dict[Variant, Make] = {}
    for v in chosen:
        of_ours = quantized if v.impl == FP8 else None
        if v in hows:
            makes[v] = functools.partial(workers[v.impl].finish, hows[v])
        elif v.impl == GATHERED:
            makes[v] = functools.partial(tokamax_all_gather, mesh, pass_name, arrays)
        elif v.ep > 1:
            how = (mesh, pass_name, v.save, arrays, v.sums, of_ours)
            makes[v] = functools.partial(jax_megamoe, *how)
        else:
            makes[v] = functools.partial(IMPLEMENTATIONS[v.impl].make, pass_name, v.save, alone)
    title = f"{shape.name} {pass_name}"
    results, rate = measure_beside(title, makes, product, matmul_size, method, clock)
    named = []
    for v in chosen:
        found = record(v, pass_name, shape, results[v], rate)
        of_one, result = results.get(Variant(v.impl, v.save)), results[v]
        if v.impl in PRECISIONS and v.ep > 1:
            if counts_bytes:
                options: dict[str, Any] = {"save": v.save, "precision": PRECISIONS[v.impl]}
                config = MegaMoEConfig(backend="cuda", **options, **SUMS[v.sums])
                of_ours = quantized if v.impl == FP8 else None
                found["nvlink_bytes"] = of_layer(mesh, shape, pass_name, config, arrays, of_ours)
            if isinstance(of_one, Figures) and isinstance(result, Figures):
                found["over_ep1"] = round(result.ms / of_one.ms, 4)
        named.append((f"{shape.name}, EP{v.ep}", found))
    return named


def _how(variant: Variant, pass_name: str, shape: Shape) -> How:
    """What the `make` of a module for _workers.py takes behind rank, ranks and rendezvous."""
    if variant.impl in PRECISIONS:
        return pass_name, shape, variant.save, variant.sums, PRECISIONS[variant.impl]
    return pass_name, shape, "fp8_rows" if variant.impl == EXCHANGED_FP8 else "bf16"


def run_ranks_against_bound(
    shapes: Sequence[Shape],
    pass_name: str,
    method: Method,
    clock: Clock | None,
    matmul_size: int,
    impl: str = OURS,
    save: str = "none",
) -> list[Named]:
    """As `_measured.run_against_bound`, over the GPUs: the bound is that of the busiest one.

    impl: OURS or FP8.
    """
    mesh = expert_mesh(shapes[0].R)

    def make(shape: Shape) -> Run:
        arrays = on_ranks(mesh, inputs(shape, "bf16"))
        quantized = quantized_on(mesh, arrays) if impl == FP8 else None
        return jax_megamoe(mesh, pass_name, save, arrays, quantized=quantized)

    return run_against_bound(
        shapes,
        method,
        clock,
        matmul_size,
        pass_name=pass_name,
        make=make,
        product=matmuls(mesh, matmul_size),
        variant=Variant(impl, save, ep=shapes[0].R),
    )
