"""A run of the step benchmark in PyTorch alone, a process a GPU. Started by step.py.

Over several GPUs parameters are split by FSDP (`fully_shard`), gathered in bf16 layer by layer, and
again in the backward; gradients are summed in float32 where they are stored. The experts are
divided among the ranks of a group first, and their rows exchanged (_torch_ranks.py). On one GPU
there is no FSDP: float32 parameters are cast where they are used. AdamW is PyTorch's fused one.
"""

import functools
import json
import os
import pathlib
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

# Rows of the experts are of another number in each step.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
import torch.multiprocessing as multiprocessing  # pyright: ignore[reportMissingImports]
from _step_job import Job, Result, answer, learning_rate
from _step_torch_attention import choose_attention
from _step_torch_model import EXPERTS, Model, make_layer_function
from _torch_ranks import connect, on_gpu
from torch.distributed.fsdp import (  # pyright: ignore[reportMissingImports]
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import (  # pyright: ignore[reportMissingImports]
    DTensor,
    distribute_tensor,
)

from jax_megamoe.models.training import ADAM_B2

MESH = ("fsdp", "expert")
# Of this model by those of `jax_megamoe.models.qwen3_moe`, which are [input, output].
_OF_A_LAYER = {
    **{name: name for name in ("attention_norm", "mlp_norm")},
    **{n: f"attention.{n}" for n in ("query", "key", "value", "out", "query_norm", "key_norm")},
    "router": "mlp.router",
    **{f"experts.{name}": f"mlp.{name}" for name in EXPERTS},
}


class Ranks(NamedTuple):
    """Where this process stands: one of `size` ranks, `expert` of which share the experts.

    mesh: (fsdp, expert); everywhere: all in one dimension. None: there is one rank.
    """

    rank: int
    size: int
    expert: int
    mesh: Any = None
    everywhere: Any = None

    @property
    def group(self) -> Any:
        return None if self.mesh is None else self.mesh["expert"].get_group()


def find_out(job: Job) -> Result | None:
    if job.num_devices == 1:
        return run(job, Ranks(0, 1, 1))
    with tempfile.TemporaryDirectory() as folder:
        found = pathlib.Path(folder) / "found.json"
        arguments = (job, str(pathlib.Path(folder) / "rendezvous"), str(found))
        try:
            multiprocessing.spawn(_rank, arguments, nprocs=job.num_devices)
        except multiprocessing.ProcessRaisedException as error:
            # Its text is the traceback of the rank that failed.
            what = str(error).strip().splitlines()[-1]
            raise RuntimeError(f"rank {error.error_index}: {what}") from error
        return json.loads(found.read_text())


def _rank(rank: int, job: Job, rendezvous: str, path: str) -> None:
    size, expert = job.num_devices, job.config["expert_parallel"]
    connect(rank, size, rendezvous)
    device = "cuda" if on_gpu else "cpu"
    mesh = dist.init_device_mesh(device, (size // expert, expert), mesh_dim_names=MESH)
    found = run(job, Ranks(rank, size, expert, mesh, dist.init_device_mesh(device, (size,))))
    if rank == 0:
        pathlib.Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(job: Job, ranks: Ranks) -> Result:
    config = job.config
    device = torch.device("cuda", ranks.rank) if on_gpu else torch.device("cpu")
    dtype = torch.float32 if config["precision"] == "float32" else torch.bfloat16
    batches = np.load(job.batches)
    mine = np.split(batches, ranks.size, axis=1)[ranks.rank]
    attend = choose_attention(config, mine.shape[1], device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    model = Model(config["model"], ranks.expert, dtype, config["loss_chunk"])
    split(model, ranks, dtype)
    model.to_empty(device=device)
    fill(model, job, ranks)
    optimizer = make_optimizer(model, config)
    tokens = torch.from_numpy(mine).to(device, torch.int64)
    num_layers, num_experts = (config["model"][n] for n in ("num_hidden_layers", "num_experts"))
    bias = torch.zeros(num_layers, num_experts, device=device)
    num_tokens = mine.shape[1] * config["seq"]
    how = (num_tokens, ranks.expert, ranks.group)
    layer = make_layer_function(config["model"], attend, *how)
    step = functools.partial(
        train_step, model, optimizer, layer, bias, config, batches.shape[1] * config["seq"]
    )
    losses, loads, ends, waiting = [], [], [], []
    for number, of_step in enumerate(tokens, 1):
        loss, load = step(number, of_step)
        losses.append(loss)
        loads.append(load)
        waiting.append(torch.cuda.current_stream().record_event() if on_gpu else None)
        if number > 1:
            ends.append(_end(waiting.pop(0)))
    ends.append(_end(waiting.pop(0)))
    first = job.first_measured - 1
    of_ranks = torch.stack(loads).unflatten(-1, (ranks.expert, -1)).sum(-1).float()
    peak = torch.tensor(torch.cuda.max_memory_allocated() if on_gpu else 0, device=device)
    if ranks.size > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {
        "runs_on": f"PyTorch {torch.__version__}, attention {attend.__name__}",
        "process_model": "single_process" if ranks.size == 1 else "process_per_gpu",
        "losses": torch.stack(losses).tolist(),
        "step_seconds": np.diff(ends)[first - 1 :].tolist(),
        "measured": [ends[first - 1], ends[-1]],
        "peak_bytes": peak.item() if on_gpu else None,
        "busiest_rank": (of_ranks.amax(-1) / of_ranks.mean(-1)).max().item(),
    }


def train_step(
    model: Model,
    optimizer: Any,
    layer: Any,
    bias: Any,
    config: dict[str, Any],
    num_targets: int,
    number: int,
    tokens: Any,
) -> tuple[Any, Any]:
    """Step `number`, from 1; tokens: int64 [B, S + 1] of this rank; moves bias in place.

    Returns:
      The mean loss over all ranks, float32 [], and the load, int64 [layers, E].
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, number)
    total, load = model(layer, tokens[:, :-1], tokens[:, 1:], bias)
    # Gradients are summed over ranks.
    (total / num_targets).backward()
    loss = total.detach() / num_targets
    gradients = [_local(p.grad) for p in model.parameters()]
    square = torch.stack(torch._foreach_norm(gradients)).square().sum()
    if dist.is_initialized():
        for a in (loss, load, square):
            dist.all_reduce(a)
    # As optax.clip_by_global_norm: no larger norm than this.
    torch._foreach_mul_(gradients, (config["gradient_norm"] / square.sqrt()).clamp(max=1.0))
    optimizer.step()
    optimizer.zero_grad()
    share = load.sum(-1, keepdim=True) - load * load.shape[-1]
    bias += share.sign() * config["bias_speed"]
    return loss, load


def split(model: Model, ranks: Ranks, dtype: Any) -> None:
    """FSDP of all but the experts over all ranks, of a rank's experts over the others' like it."""
    if ranks.mesh is None:
        return
    # Places, weights of experts and biases stay as they are.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    everywhere, like_it = ranks.everywhere, ranks.mesh["fsdp"]
    ignored: set[Any] = set()
    for block in model.blocks:
        if ranks.expert > 1 and like_it.size() > 1:
            fully_shard(block.experts, mesh=like_it, mp_policy=policy)
        elif ranks.expert > 1:
            ignored.update(block.experts.parameters())
        fully_shard(block, mesh=everywhere, mp_policy=policy, ignored_params=ignored)
    fully_shard(model, mesh=everywhere, mp_policy=policy, ignored_params=ignored)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def fill(model: Model, job: Job, ranks: Ranks) -> None:
    """The parameters before the first step: those of the job's folder, or drawn by PyTorch."""
    config = job.config["model"]
    for name, parameter in model.named_parameters():
        value = _first_value(name, parameter, job, config, ranks)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                how = (parameter.device_mesh, parameter.placements)
                value = distribute_tensor(value, *how, src_data_rank=None).to_local()
            _local(parameter).copy_(value)


def _first_value(name: str, parameter: Any, job: Job, config: dict[str, Any], ranks: Ranks) -> Any:
    """float32, all of a parameter as this rank's model has it, on its device."""
    device, is_expert = _local(parameter).device, ".experts." in name
    shape = list(parameter.shape)
    if job.parameters is None:
        if name.endswith("norm"):
            return torch.ones(shape, device=device)
        if is_expert:
            shape[0] *= ranks.expert
        generator = torch.Generator(device).manual_seed(
            job.config["seed"] + zlib.crc32(name.encode())
        )
        value = torch.empty(shape, device=device)
        value.normal_(0, config["initializer_range"], generator=generator)
    else:
        value = _of_folder(pathlib.Path(job.parameters), name, device)
    if is_expert and ranks.expert > 1:
        value = value.chunk(ranks.expert)[ranks.mesh["expert"].get_local_rank()]
    return value


def _of_folder(folder: pathlib.Path, name: str, device: Any) -> Any:
    kind, *rest = name.split(".", 2)
    if kind != "blocks":
        value = np.load(folder / f"{name}.npy")
        is_transposed = kind == "head"
    else:
        number, own = rest
        file = folder / f"runs.0.{_OF_A_LAYER[own]}.npy"
        value = np.load(file, mmap_mode="r")[int(number)]
        is_transposed = value.ndim > 1
    value = torch.from_numpy(np.array(value)).to(device)
    return value.transpose(-2, -1) if is_transposed else value


def make_optimizer(model: Model, config: dict[str, Any]) -> Any:
    """AdamW; weight decay is for the matrices of layers. DTensors are a group of their own."""
    groups: dict[tuple[bool, bool], list[Any]] = {}
    for name, parameter in model.named_parameters():
        decays = name.startswith("blocks.") and parameter.ndim > 1
        groups.setdefault((decays, isinstance(parameter, DTensor)), []).append(parameter)
    options = {"betas": (0.9, ADAM_B2), "eps": 1e-8, "fused": True}
    return torch.optim.AdamW(list(_with_decay(groups, config["weight_decay"])), **options)


def _with_decay(
    groups: dict[tuple[bool, bool], list[Any]], weight_decay: float
) -> Iterator[dict[str, Any]]:
    for (decays, _), parameters in groups.items():
        yield {"params": parameters, "weight_decay": weight_decay if decays else 0.0}


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _end(event: Any) -> float:
    if event is not None:
        event.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    answer(find_out, sys.argv[1:])
