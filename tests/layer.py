"""One compiled function per way to run the layer; tests share them, so that each compiles once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_megamoe import mega_moe
from tests.cases import Batch, Results
from tests.gated import Biases


def expert_mesh(num_ranks: int) -> Mesh:
    """A mesh of the first devices with the one axis "expert"."""
    devices = np.array(jax.devices()[:num_ranks])
    return Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))


def bind(**options: Any) -> Callable[..., Any]:
    """mega_moe with its static options; the type of its result is for the caller to know."""
    return functools.partial(mega_moe, **options)


def results_and_pullback(op: Callable[..., Any]) -> Callable[..., Results]:
    """A function of the arrays of a batch: y and its five gradients, all in one program."""
    run = _value_and_pullback(op)
    return lambda *arrays: Results(*run(*arrays))


def biased_results_and_pullback(op: Callable[..., Any]) -> Callable[..., tuple[Results, Biases]]:
    """The same of experts with biases, which come before dy: also the gradients of these."""

    def with_biases(*arrays: Any) -> Any:
        return op(*arrays[:-3], **dict(zip(Biases._fields, arrays[-3:], strict=True)))

    def run(*arrays: Any) -> tuple[Results, Biases]:
        results = _value_and_pullback(with_biases)(*arrays)
        return Results(*results[:-3]), Biases(*results[-3:])

    return run


def _value_and_pullback(op: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def run(x: Any, expert_idx: Any, expert_weight: Any, *rest: Any) -> tuple[Any, ...]:
        *experts, dy = rest
        y, pull = jax.vjp(
            lambda x, w, *experts: op(x, expert_idx, w, *experts), x, expert_weight, *experts
        )
        return y, *pull(dy)

    return run


@functools.cache
def compiled(
    num_ranks: int | None = None, *, biased: bool = False, check_vma: bool = True, **options: Any
) -> Any:
    """The layer and its gradients as one jitted function of a batch's arrays.

    Args:
      num_ranks: None: one device, without shard_map; else the size of the expert axis, over which
        tokens and experts are split.
      biased: experts have biases.
      options: the static options of `mega_moe`.
    """
    axis_name = None if num_ranks is None else "expert"
    pullback = biased_results_and_pullback if biased else results_and_pullback
    run = pullback(bind(axis_name=axis_name, **options))
    if num_ranks is not None:
        run = jax.shard_map(
            run,
            mesh=expert_mesh(num_ranks),
            in_specs=PartitionSpec("expert"),
            out_specs=PartitionSpec("expert"),
            check_vma=check_vma,
        )
    return jax.jit(run)


def run(batch: Batch, num_ranks: int | None = None, **how: Any) -> Results:
    """The results of `compiled(num_ranks, **how)` on a batch, as NumPy arrays."""
    return Results(*map(np.asarray, compiled(num_ranks, **how)(*batch)))


def run_biased(
    batch: Batch, biases: Biases, num_ranks: int | None = None, **how: Any
) -> tuple[Results, Biases]:
    """As `run`, of experts with biases."""
    found = compiled(num_ranks, biased=True, **how)(*batch[:-1], *biases, batch.dy)
    return jax.tree.map(np.asarray, found)


def after_steps(step: Callable[..., Any], batch: Batch, num_ranks: int, count: int = 1000) -> Any:
    """x after so many steps inside one program over ranks, as a NumPy array.

    step(i, x, ids, w, *weights) is y of a step, which the next one takes as x, divided by its
    largest value, plus 1.
    """

    def steps(x: Any, *rest: Any) -> Any:
        def one(i: Any, x: Any) -> Any:
            y = step(i, x, *rest)
            largest = jax.lax.pmax(jnp.max(jnp.abs(y)).astype(jnp.float32), "expert")
            return (y / largest.astype(y.dtype) + 1).astype(x.dtype)

        return jax.lax.fori_loop(0, count, one, x)

    spec, mesh = PartitionSpec("expert"), expert_mesh(num_ranks)
    run = jax.shard_map(steps, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = np.asarray(jax.jit(run)(*map(jnp.asarray, batch[:-1])))
    assert np.isfinite(found.astype(np.float32)).all()
    return found
