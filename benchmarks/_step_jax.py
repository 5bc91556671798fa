"""A run of the step benchmark in JAX: one process with all GPUs. Started by step.py."""

import os
import pathlib
import sys
import time
from typing import Any, NamedTuple

# As in training: all but what step.py, NCCL and the kernels' workspaces between GPUs take.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import jax
import numpy as np
from _implementations import use_peers
from _step_job import Job, Result, answer
from _step_peers import PRODUCTS, exchange, most_rows, parameters

from jax_megamoe.models.training import (
    BATCH_SPEC,
    Batch,
    StepMetrics,
    create,
    experts_run_on,
    make_mesh,
    train_step,
)
from jax_megamoe.models.training_config import TrainingConfig, from_dict


class Trained(NamedTuple):
    """Of each step: float64 [steps] losses, host's seconds at its end; int [steps, layers, E]."""

    losses: np.ndarray
    ends: np.ndarray
    loads: np.ndarray


def find_out(job: Job) -> Result:
    use_peers(pathlib.Path(job.peers_path) if job.peers_path else None)
    config = from_dict(job.config)
    mesh = make_mesh(config, jax.devices()[: job.num_devices])
    runs_on = _runs_on(job.impl, config)
    trained = train(job, config, mesh)
    stats = [device.memory_stats() for device in mesh.devices.flat]
    first = job.first_measured - 1
    result = {
        "runs_on": runs_on,
        "process_model": "single_process",
        "losses": trained.losses.tolist(),
        "step_seconds": np.diff(trained.ends)[first - 1 :].tolist(),
        "measured": [trained.ends[first - 1], trained.ends[-1]],
        "peak_bytes": max(s["peak_bytes_in_use"] for s in stats) if all(stats) else None,
        "busiest_rank": max(most_rows(load, config.expert_parallel) for load in trained.loads),
    }
    lost = job.impl in PRODUCTS and result["busiest_rank"] > job.peer_rows
    if lost and config.expert_parallel > 1:
        was = f"{result['busiest_rank']:.2f} times the rows of an even routing"
        result["error"] = f"a rank had {was}, more than --peer-rows {job.peer_rows}: rows were lost"
    return result


def train(job: Job, config: TrainingConfig, mesh: jax.sharding.Mesh) -> Trained:
    """All steps. Each is given to the devices before the one before it is waited for."""
    metrics: list[StepMetrics] = []
    ends: list[float] = []
    # Simulated devices wait for each other for ever when steps with collectives queue up.
    num_waiting = 0 if jax.default_backend() == "cpu" else 1
    sharding = jax.NamedSharding(mesh, BATCH_SPEC)
    with jax.set_mesh(mesh):
        model, optimizer = create(config)
        if job.parameters:
            for name, value in parameters(model).items():
                np.save(pathlib.Path(job.parameters) / f"{name}.npy", np.asarray(value))
        if job.impl in PRODUCTS:
            exchange(model, job.impl, job.peer_rows)
        batches = [jax.device_put(Batch(b[None]), sharding) for b in np.load(job.batches)]
        jax.block_until_ready(batches)
        for step, batch in enumerate(batches):
            metrics.append(train_step(model, optimizer, batch, config))
            if step >= num_waiting:
                ends.append(_end(metrics[step - num_waiting]))
        ends += [_end(m) for m in metrics[len(ends) :]]
    found: Any = jax.device_get(metrics)
    return Trained(
        losses=np.array([m.loss for m in found], np.float64),
        ends=np.array(ends),
        loads=np.array([m.load for m in found]),
    )


def _end(metrics: StepMetrics) -> float:
    jax.block_until_ready(metrics)
    return time.perf_counter()


def _runs_on(impl: str, config: TrainingConfig) -> str:
    if impl in PRODUCTS:
        return impl
    model = config.model
    sizes = {"H": model.hidden_size, "I": model.moe_intermediate_size, "R": config.expert_parallel}
    return experts_run_on(config.experts, **sizes)


if __name__ == "__main__":
    answer(find_out, sys.argv[1:])
