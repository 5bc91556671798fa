"""A training step of Qwen3-MoE over a mesh: experts over some devices, everything stored split.

    config = TrainingConfig(model=QWEN3_30B_A3B, expert_parallel=8)
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        model, optimizer = create(config)
        metrics = train_step(model, optimizer, batch, config)

The mesh is (data, fsdp, expert). A step's sequences are split over all its devices, and so are
parameters and optimizer state but for the experts', which lie on the devices of the axis expert and
are split over the others. Parameters, gradients and moments are float32.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_megamoe._backend import reason_for_reference
from jax_megamoe.config import MegaMoEConfig
from jax_megamoe.models.loss import AXES, is_target, of_microbatch, split
from jax_megamoe.models.loss import BATCH_SPEC as BATCH_SPEC
from jax_megamoe.models.loss import Batch as Batch
from jax_megamoe.models.loss import summed_loss as summed_loss
from jax_megamoe.models.qwen3_moe import Qwen3Moe
from jax_megamoe.models.training_config import TrainingConfig
from jax_megamoe.nnx import MegaMoE
from jax_megamoe.ops import GATE_UP_NAME
from jax_megamoe.router import update_selection_bias
from jax_megamoe.validation import refuse

Array = jax.Array

ADAM_B2 = 0.95


class StepMetrics(NamedTuple):
    """Of a step, before its update.

    Attributes:
      loss: float32 [], mean over what was predicted, in nats per token, without the router's.
      gradient_norm: float32 [], of the whole loss, before it is clipped.
      load: int32 [layers with experts, E], choices that fell on each expert.
    """

    loss: Array
    gradient_norm: Array
    load: Array


class Evaluation(NamedTuple):
    """Of a batch.

    Attributes:
      nll: float32 [], sum of -log p over what was predicted, without the router's losses.
      num_targets: int32 [], how many that was.
    """

    nll: Array
    num_targets: Array


def make_mesh(config: TrainingConfig, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The mesh (data, fsdp, expert) of the given devices; None: of all that JAX has.

    Raises:
      ValueError: another number of devices than the config says, or one that does not divide the
        sequences of a microbatch.
    """
    devices = jax.devices() if devices is None else devices
    others = config.data_parallel * config.expert_parallel
    sizes = (
        config.data_parallel,
        config.fsdp or max(len(devices) // others, 1),
        config.expert_parallel,
    )
    if math.prod(sizes) != len(devices):
        may_be = f"what makes {len(devices)}, the number of devices"
        refuse(ValueError, "data_parallel, fsdp and expert_parallel", sizes, may_be)
    if config.batch // config.microbatches % len(devices):
        was = f"{config.batch} in {config.microbatches} microbatches"
        refuse(ValueError, "batch", was, f"a multiple of the {len(devices)} devices in each")
    auto = (jax.sharding.AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=auto, devices=devices)


def experts_run_on(moe: MegaMoEConfig, *, H: int, I: int, R: int) -> str:
    """Which backend runs a layer of these sizes here, and why it is not the kernels; for people.

    Raises:
      ValueError: the kernels are asked for by name and cannot run.
    """
    by_name = moe.backend == "cuda"
    open_call = dataclasses.replace(moe, backend="auto") if by_name else moe
    # By name they run over several ranks, too.
    reason = reason_for_reference(open_call, H=H, I=I, R=1 if by_name else R)
    if jax.default_backend() != "gpu" and moe.backend != "reference":
        reason = f"JAX runs on the {jax.default_backend()}"
    if by_name and reason:
        refuse(ValueError, "backend", f"'cuda', but {reason}", "'auto' or 'reference' here")
    return f"the reference ({reason})" if reason else "the CUDA kernels"


def make_model(config: TrainingConfig) -> Qwen3Moe:
    """The model of a run, drawn from its seed; the same for every mesh, which has to be set."""
    keeps_gate_up = config.remat == "gate_up"
    policy = jax.checkpoint_policies.save_only_these_names(GATE_UP_NAME) if keeps_gate_up else None
    return Qwen3Moe(
        config.model,
        moe=config.experts,
        expert_axis="expert",
        data_axes=("data", "fsdp"),
        fsdp_axes=("data", "fsdp"),
        selection_bias=config.balance == "bias",
        dtype=jnp.float32 if config.precision == "float32" else jnp.bfloat16,
        attention=config.attention,
        remat=config.remat != "none",
        remat_policy=policy,
        rngs=nnx.Rngs(config.seed),
    )


@functools.cache
def make_optimizer(
    *, learning_rate: float, steps: int, warmup: int, weight_decay: float, gradient_norm: float
) -> optax.GradientTransformation:
    """AdamW behind clipping; its rate rises from 0 in `warmup` steps and falls to 0 as a cosine.

    Weight decay is for the matrices of layers, which are stacked: norms, biases, embedding and
    output matrix have none. Made once for equal arguments, so that they share compiled programs.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=0.0,
    )
    return optax.chain(
        optax.clip_by_global_norm(gradient_norm),
        optax.adamw(schedule, b2=ADAM_B2, weight_decay=weight_decay, mask=_is_stack_of_matrices),
    )


def create(config: TrainingConfig) -> tuple[Qwen3Moe, nnx.Optimizer]:
    """Model and optimizer state of a run's first step, on the mesh that is set."""
    return _create(config)


@functools.partial(nnx.jit, static_argnums=0)
def _create(config: TrainingConfig) -> tuple[Qwen3Moe, nnx.Optimizer]:
    names = ("learning_rate", "steps", "warmup", "weight_decay", "gradient_norm")
    model = make_model(config)
    tx = make_optimizer(**{name: getattr(config, name) for name in names})
    return keep_layout(model, nnx.Optimizer(model, tx, wrt=nnx.Param))


@functools.partial(nnx.jit, static_argnums=3, donate_argnums=(0, 1))
def train_step(
    model: Qwen3Moe, optimizer: nnx.Optimizer, batch: Batch, config: TrainingConfig
) -> StepMetrics:
    """Updates model and optimizer by one batch. Compiled; their arrays are given up for the new."""
    gradients, loss, load = _gradients(model, batch, config)
    # Optax mixes dtypes, which a program may have forbidden in its own.
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(model, gradients)
    if config.balance == "bias":
        _move_selection_bias(model, load, config.bias_speed)
    keep_layout(model, optimizer)
    squares = [jnp.sum(gradient**2) for gradient in jax.tree.leaves(gradients)]
    return _on_each_device(StepMetrics(loss, jnp.sqrt(jnp.stack(squares).sum()), load))


def evaluate(model: Qwen3Moe, batch: Batch, config: TrainingConfig) -> Evaluation:
    """The loss of a batch, which may be any; it changes nothing. Compiled."""
    # Not nnx.jit, which gives the whole model back, in arrays of its own.
    return _evaluate(*nnx.split(model), batch, config)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _evaluate(graph: Any, state: Any, batch: Batch, config: TrainingConfig) -> Evaluation:
    model = nnx.merge(graph, state)
    quantized = _quantized(model, config)

    def add(sums: Evaluation, part: Batch) -> tuple[Evaluation, None]:
        nll, _ = of_microbatch(model, part, quantized, config.positions_at_a_time)
        return Evaluation(sums.nll + nll, sums.num_targets + is_target(part).sum()), None

    zeros = Evaluation(jnp.float32(0), jnp.int32(0))
    sums, _ = jax.lax.scan(add, zeros, split(batch))
    return _on_each_device(sums)


def _gradients(model: Qwen3Moe, batch: Batch, config: TrainingConfig) -> tuple[Any, Array, Array]:
    """Gradients of the mean loss over the whole batch, that loss, and the load of each layer."""
    quantized = _quantized(model, config)
    graph, parameters, state = nnx.split(model, nnx.Param, ...)
    specs = nnx.get_partition_spec(parameters)
    batch = split(batch)
    num_targets = jnp.maximum(is_target(batch).sum(), 1).astype(jnp.float32)

    def loss_of(parameters: Any, part: Batch) -> tuple[Array, tuple[Array, Array]]:
        model = nnx.merge(graph, parameters, state)
        nll, aux = of_microbatch(model, part, quantized, config.positions_at_a_time)
        loss = nll / num_targets
        of_router = config.z_factor * aux.z_loss.mean()
        if config.balance == "loss":
            of_router += config.loss_factor * aux.load_balance_loss.mean()
        return loss + of_router / config.microbatches, (loss, aux.load)

    def add(sums: Any, part: Batch) -> tuple[Any, None]:
        gradients, (loss, load) = jax.grad(loss_of, has_aux=True)(parameters, part)
        sums = jax.tree.map(jnp.add, sums, (gradients, loss, load))
        return (jax.lax.with_sharding_constraint(sums[0], specs), *sums[1:]), None

    zeros = jax.lax.with_sharding_constraint(jax.tree.map(jnp.zeros_like, parameters), specs)
    num_layers = sum(config.model.has_experts)
    load = jnp.zeros((num_layers, config.model.num_experts), jnp.int32)
    sums, _ = jax.lax.scan(add, (zeros, jnp.float32(0), load), batch)
    return sums


def keep_layout[M: nnx.Module](model: M, optimizer: nnx.Optimizer) -> tuple[M, nnx.Optimizer]:
    """Constrains parameters and optimizer state to the layout of their metadata."""
    state = nnx.state((model, optimizer))
    nnx.update(
        (model, optimizer),
        jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)),
    )
    return model, optimizer


def _on_each_device[T](metrics: T) -> T:
    """So that each process can read them."""
    return jax.lax.with_sharding_constraint(metrics, P())


def _quantized(model: Qwen3Moe, config: TrainingConfig) -> Any:
    """What all microbatches of a step share."""
    return model.quantize_experts() if config.precision == "fp8_block" else None


def _move_selection_bias(model: Qwen3Moe, load: Array, speed: float) -> None:
    move = jax.vmap(functools.partial(update_selection_bias, speed=speed))
    first = 0
    for run in model.runs:
        if isinstance(run.mlp, MegaMoE):
            bias = run.mlp.selection_bias
            num_layers = bias.shape[0]
            bias[...] = move(bias[...], load[first : first + num_layers])
            first += num_layers


def _is_stack_of_matrices(params: Any) -> Any:
    return jax.tree.map(lambda value: value.ndim > 2, params)
