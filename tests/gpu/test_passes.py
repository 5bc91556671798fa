"""Calls of several passes on two GPUs: y, dx and dw of one GPU with all experts, and the bytes that
were planned."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_megamoe import memory_plan
from jax_megamoe.plan import forward_steps, make_plan
from tests import cases, compare, emulated, layer
from tests.cases import BF16, F32, ROUTINGS, Batch, Results
from tests.forward import poison_free_memory

pytestmark = pytest.mark.multi_gpu(2)

# T of both ranks, K, E, H, I: two experts for each rank, and many.
SIZES = ((778, 3, 4, 256, 192), (4096, 8, 128, 512, 256), (600, 32, 64, 448, 320))


def ids_of(size: tuple[int, ...], routing: str) -> np.ndarray:
    """ "rank r": all routes go to the experts of that one."""
    tokens, choices, experts, *_ = size
    if routing.startswith("rank "):
        owner = int(routing.split()[1])
        local = np.random.default_rng(owner).integers(0, experts // 2, (tokens, choices))
        return (local + owner * (experts // 2)).astype(np.int32)
    return ROUTINGS[routing](tokens=tokens, choices=choices, experts=experts)


def batch_of(size: tuple[int, ...], routing: str, dtype: np.dtype = BF16) -> Batch:
    _, _, experts, hidden, intermediate = size
    sizes: dict[str, Any] = {"num_experts": experts, "hidden": hidden, "intermediate": intermediate}
    return cases.normal(ids_of(size, routing), **sizes, dtype=dtype)


def passes(batch: Batch, pool_factor: float) -> list[int]:
    """How many each rank needs."""
    dims = emulated.dims_of(batch, 2, pool_factor)
    ids = batch.expert_idx.reshape(2, dims.T, dims.K)
    steps = forward_steps(dims)
    return [int(make_plan(ids, dims, rank, steps).totals[2]) for rank in range(2)]


def run(batch: Batch, **how: Any) -> Results:
    return layer.run(batch, 2, backend="cuda", **how)


def assert_right(found: Results, batch: Batch) -> None:
    """Weight gradients are rounded once more for each pass."""
    right = layer.run(batch, backend="cuda")
    for name, a, b in zip(Results._fields[:3], found, right, strict=False):
        compare.assert_bitwise(a, b, name)
    bound = 1e-6 if right.dw_gate.dtype == F32 else 4e-3
    compare.assert_within(found, Results(*(a.astype(F32) for a in right)), bound)


@pytest.mark.parametrize("pool_factor", [1.0, 1.25])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("routing", ["rank 0", "rank 1", "skewed", "distinct"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_results_are_those_of_one_gpu(
    size: tuple[int, ...], routing: str, dtype: np.dtype, pool_factor: float
) -> None:
    batch = batch_of(size, routing, dtype)
    if routing.startswith("rank "):
        assert sorted(passes(batch, pool_factor)) == [1, 2]
    poison_free_memory()
    assert_right(run(batch, pool_factor=pool_factor), batch)


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("routing", ["rank 1", "distinct"])
def test_the_oracle_is_exact(routing: str, save: str) -> None:
    _, _, experts, hidden, intermediate = size = SIZES[1]
    sizes: dict[str, Any] = {"num_experts": experts, "hidden": hidden, "intermediate": intermediate}
    batch = cases.oracle(ids_of(size, routing), 0.125, **sizes, dtype=BF16)
    found = run(batch, pool_factor=1.25, save=save)
    compare.assert_results_exact(found, cases.oracle_results(batch))


@pytest.mark.parametrize("routing", ["rank 0", "distinct"])
def test_what_is_kept_changes_no_bit(routing: str) -> None:
    batch = batch_of(SIZES[0], routing)
    found = [run(batch, pool_factor=1.25, save=save) for save in ("none", "gate_up")]
    compare.assert_results_bitwise(found[1], found[0])


def test_runs_in_turn_have_the_same_bits_whatever_memory_holds() -> None:
    """Of one pass and of several, with weight gradients that are added to in memory."""
    batches = [batch_of(SIZES[1], routing) for routing in ("rank 0", "distinct", "rank 1")]
    first = [run(batch, pool_factor=1.25) for batch in batches]
    for _ in range(10):
        for batch, right in zip(batches, first, strict=True):
            poison_free_memory()
            compare.assert_results_bitwise(run(batch, pool_factor=1.25), right)


def test_a_thousand_steps_of_one_pass_and_of_several() -> None:
    """The routes of each step go to the one rank, to the other, or to both."""
    op = layer.bind(axis_name="expert", backend="cuda", pool_factor=1.0)

    def step(i: Any, x: Any, ids: Any, *rest: Any) -> Any:
        return op(x, jnp.where(i % 3 == 2, ids, ids % 2 + i % 3 * 2), *rest)

    batch = batch_of((512, 2, 4, 64, 64), "distinct")
    found, right = (layer.after_steps(step, batch, num_ranks) for num_ranks in (2, 1))
    compare.assert_bitwise(found, right, "x after 1,000 steps")


@pytest.mark.parametrize("pool_factor", [1.0, 1.25, 2.0])
def test_the_program_takes_the_bytes_that_were_planned(pool_factor: float) -> None:
    """Those of the compiled program, which no routing changes."""
    batch = batch_of((16384, 8, 128, 512, 256), "rank 0")
    op = layer.bind(axis_name="expert", backend="cuda", pool_factor=pool_factor)
    spec, mesh = PartitionSpec("expert"), layer.expert_mesh(2)
    compiled = (
        jax.jit(jax.shard_map(op, mesh=mesh, in_specs=spec, out_specs=spec))
        .lower(*map(jnp.asarray, batch[:6]))
        .compile()
    )
    analysis = compiled.memory_analysis()
    d = emulated.dims_of(batch, 2, pool_factor)
    planned = memory_plan(T=d.T, K=d.K, E=d.E, R=d.R, H=d.H, I=d.I, pool_factor=pool_factor)
    workspace = planned.workspace_bytes
    assert analysis is not None
    assert workspace <= analysis.temp_size_in_bytes <= 1.01 * workspace + 2**26
    y = np.asarray(compiled(*map(jnp.asarray, batch[:6])))
    compare.assert_bitwise(y, layer.run(batch, backend="cuda").y, "y")
