"""The plan kernel equals its NumPy twin bitwise, and proves the rules of a plan on its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import _ffi
from jax_megamoe.config import (
    Dims,
    MegaMoEConfig,
)
from jax_megamoe.plan import (
    Plan,
    Step,
    backward_steps,
    forward_steps,
    make_plan,
)
from jax_megamoe.plan_check import check_plan
from tests.plan_cases import case_of_passes, random_case

pytestmark = pytest.mark.gpu

NUM_ROUTINGS = 200
GARBAGE = 0x7B7B7B7B


@functools.partial(jax.jit, static_argnames=("dims", "rank", "steps", "pass_idx"))
def jitted_plan(
    expert_idx: jax.Array, *, dims: Dims, rank: int, steps: tuple[Step, ...], pass_idx: int
) -> Plan:
    return _ffi.plan(expert_idx, dims, rank, steps, pass_idx)


def dirty_memory(num_bytes: int) -> None:
    """Leaves freed device memory full of garbage, for the next call's results and scratch."""
    jnp.full(max(num_bytes // 4, 1), GARBAGE, jnp.int32).block_until_ready().delete()


def kernel_plan(
    idx: np.ndarray, dims: Dims, rank: int, steps: tuple[Step, ...], pass_idx: int = 0
) -> Plan:
    how = {"dims": dims, "rank": rank, "steps": steps, "pass_idx": pass_idx}
    plan = jitted_plan(jnp.asarray(idx), **how)
    return Plan(*(np.asarray(a) for a in plan))


@pytest.mark.parametrize("seed", range(NUM_ROUTINGS))
def test_kernel_equals_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng, max_tokens=3000)
    want = case.plan()
    dirty_memory(4 * sum(a.nbytes for a in want))
    got = kernel_plan(case.expert_idx, case.dims, case.rank, case.steps)
    for name, g, w in zip(Plan._fields, got, want, strict=True):
        np.testing.assert_array_equal(g, w, err_msg=f"{name}, rank {case.rank} of {case.dims}")


@pytest.mark.parametrize("seed", range(40))
def test_every_pass_equals_that_of_the_twin(seed: int) -> None:
    """Behind those before it; one that the routing does not need leaves the arrays as they are."""
    case, _ = case_of_passes(np.random.default_rng(seed))
    for p in range(min(case.dims.max_passes, 5)):
        want = case.plan(p)
        dirty_memory(4 * sum(a.nbytes for a in want))
        got = kernel_plan(case.expert_idx, case.dims, case.rank, case.steps, p)
        for name, g, w in zip(Plan._fields, got, want, strict=True):
            np.testing.assert_array_equal(g, w, err_msg=f"{name}, pass {p} of {case.dims}")


@pytest.mark.parametrize("backward", [False, True])
def test_passes_equal_the_twin_at_a_large_shape(backward: bool) -> None:
    """All routes of eight ranks go to one."""
    dims = Dims(T=16384, K=8, E=128, R=8, H=2048, I=768, pool_factor=1.25)
    steps = backward_steps(dims) if backward else forward_steps(dims)
    ids = np.random.default_rng(0).integers(48, 64, (8, dims.T, dims.K)).astype(np.int32)
    for p in (0, 3, dims.max_passes - 1):
        got = kernel_plan(ids, dims, 3, steps, p)
        for name, g, w in zip(Plan._fields, got, make_plan(ids, dims, 3, steps, p), strict=True):
            np.testing.assert_array_equal(g, w, err_msg=f"{name}, pass {p}")
        check_plan(got, ids, dims, 3, steps, p)


# The benchmark's shape, and one with more waves in the backward than a block has threads.
@pytest.mark.parametrize(("hidden", "intermediate"), [(2048, 768), (8192, 3072)])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("one_expert", [False, True])
def test_kernel_equals_twin_at_large_shapes(
    hidden: int, intermediate: int, backward: bool, one_expert: bool
) -> None:
    dims = Dims(T=16384, K=8, E=128, R=1, H=hidden, I=intermediate)
    steps = backward_steps(dims) if backward else forward_steps(dims)
    scores = np.random.default_rng(0).random((1, dims.T, dims.E), np.float32)
    idx = np.argpartition(scores, dims.K, axis=-1)[..., : dims.K].astype(np.int32)
    idx = np.full_like(idx, 77) if one_expert else idx
    got = kernel_plan(idx, dims, 0, steps)
    for name, g, w in zip(Plan._fields, got, make_plan(idx, dims, 0, steps), strict=True):
        np.testing.assert_array_equal(g, w, err_msg=name)
    check_plan(got, idx, dims, 0, steps)


def test_repeated_calls_are_bitwise_equal_and_leave_nothing_behind() -> None:
    """Two routings in turn: neither sees anything of the other."""
    dims = Dims(T=3000, K=8, E=64, R=2, H=512, I=256)
    steps = forward_steps(dims)
    rng = np.random.default_rng(1)
    busy = rng.integers(-1, dims.E, (2, dims.T, dims.K)).astype(np.int32)
    routings = [busy, np.full_like(busy, -1)]
    want = [make_plan(idx, dims, 1, steps) for idx in routings]
    for i in range(20):
        got = kernel_plan(routings[i % 2], dims, 1, steps)
        for name, g, w in zip(Plan._fields, got, want[i % 2], strict=True):
            np.testing.assert_array_equal(g, w, err_msg=f"{name}, call {i}")


def test_plan_runs_inside_a_larger_jit() -> None:
    dims = Dims(T=500, K=2, E=16, R=1, H=256, I=128)
    steps = forward_steps(dims)

    @jax.jit
    def rows_per_expert(idx: jax.Array) -> jax.Array:
        return _ffi.plan(jnp.flip(idx, axis=1), dims, 0, steps).counts.sum(axis=0)

    idx = np.random.default_rng(2).integers(0, dims.E, (1, dims.T, dims.K)).astype(np.int32)
    want = np.bincount(idx.reshape(-1), minlength=dims.E)
    np.testing.assert_array_equal(np.asarray(rows_per_expert(jnp.asarray(idx))), want)


def test_a_group_that_does_not_fit_is_refused_before_any_launch() -> None:
    """Two ranks on one device, for both passes."""
    dims = Dims(T=16, K=2, E=4, R=2, H=256, I=128)
    x = jnp.zeros((dims.T, dims.H), jnp.bfloat16)
    idx = jnp.zeros((dims.T, dims.K), jnp.int32)
    weight = jnp.zeros((dims.T, dims.K), jnp.float32)
    wide = jnp.zeros((dims.experts_per_rank, dims.H, dims.I), jnp.bfloat16)
    narrow = jnp.zeros((dims.experts_per_rank, dims.I, dims.H), jnp.bfloat16)
    static = {"dims": dims, "config": MegaMoEConfig(), "axis_name": None}
    operands = (x, idx, weight, wide, wide, narrow)
    for call, arrays in ((_ffi.forward_call, operands), (_ffi.backward_call, (x, *operands))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*groups has 1 dev"):
            jax.block_until_ready(jax.jit(functools.partial(call, **static))(*arrays))
    assert int(jnp.sum(idx + 1)) == dims.T * dims.K
