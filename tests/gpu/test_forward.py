"""The fused forward on one GPU: exact, as precise as an unfused path, and the same every time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import _ffi, mega_moe
from jax_megamoe.config import Dims, MegaMoEConfig
from tests import cases, compare
from tests.backward import with_gate
from tests.cases import BF16, F32, ROUTINGS, Batch
from tests.forward import (
    SIZES,
    dims_of,
    forward,
    kinds_of_whole_trace,
    launched,
    operands,
    poison_free_memory,
    random_batch,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_oracle_is_exact(size: tuple[int, ...], routing: str) -> None:
    batch = cases.oracle_of(size, routing)
    y, counts = forward(*operands(batch))
    compare.assert_exact(y, cases.oracle_results(batch).y, "y")
    np.testing.assert_array_equal(counts, cases.counts(batch))


def unfused_bf16(batch: Batch) -> np.ndarray:
    """The layer as a few bf16 products and a float32 sum over the choices."""
    x, ids, w, w_gate, w_up, w_down = operands(batch)
    y = jnp.zeros(x.shape, jnp.float32)
    for e in range(batch.num_experts):
        h = jax.nn.silu(x @ w_gate[e]) * (x @ w_up[e])
        o = (h @ w_down[e]).astype(jnp.float32)
        chosen = jnp.where(ids == e, w.astype(jnp.float32), 0)
        y += jnp.sum(chosen, axis=1, keepdims=True) * o
    return np.asarray(y.astype(x.dtype), np.float64)


@pytest.mark.parametrize("gate", [0, 4, -4, -6])
def test_error_of_every_expert_is_that_of_an_unfused_path(gate: int) -> None:
    """One expert a token, so that a token's error is its expert's.

    gate: the mean of the gates. silu of negative ones is small, but as precise as of others.
    """
    batch = with_gate(random_batch((4096, 1, 16, 512, 256), "distinct"), gate)
    right = cases.dense(batch).y
    found = np.asarray(forward(*operands(batch))[0], np.float64)
    unfused = unfused_bf16(batch)
    for e in range(batch.num_experts):
        rows = batch.expert_idx[:, 0] == e
        norm = np.linalg.norm(right[rows])
        assert norm > 0.1
        ours = np.linalg.norm(found[rows] - right[rows]) / norm
        theirs = np.linalg.norm(unfused[rows] - right[rows]) / norm
        assert ours <= 1.05 * theirs, f"expert {e}: {ours} against {theirs}"


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fused_equals_its_parts_and_itself(size: tuple[int, ...], routing: str) -> None:
    batch = random_batch(size, routing)
    dims = dims_of(batch)
    once, _ = launched(*operands(batch), dims=dims, launches=_ffi.UNFUSED)
    for _ in range(20):
        again, _ = launched(*operands(batch), dims=dims, launches=_ffi.FUSED)
        compare.assert_bitwise(again, once, "y")


def test_a_trace_records_every_item_and_changes_nothing() -> None:
    batch = random_batch(SIZES[5], "distinct")
    dims, config = dims_of(batch), MegaMoEConfig(backend="cuda")
    options = {"dims": dims, "config": config, "axis_name": None}
    want, _ = jax.jit(functools.partial(_ffi.forward_call, **options))(*operands(batch))
    traced = jax.jit(functools.partial(_ffi.forward_call, **options, trace=True))
    y, _, records = traced(*operands(batch))
    compare.assert_bitwise(y, want, "y")
    kind = kinds_of_whole_trace(records, batch)
    assert {1, 2, 4, 8} <= set(kind.tolist()) <= {1, 2, 4, 8, 16 | 2, 16 | 4}


def test_poisoned_memory_reaches_nothing() -> None:
    batch = random_batch(SIZES[5], "invalid")
    clean, _ = forward(*operands(batch))
    for _ in range(3):
        poison_free_memory()
        poisoned, _ = forward(*operands(batch))
        compare.assert_bitwise(poisoned, clean, "y")


def test_nan_stays_with_its_token() -> None:
    batch = random_batch(SIZES[3], "distinct")
    clean = np.asarray(forward(*operands(batch))[0], np.float32)
    x = batch.x.copy()
    x[0] = np.nan
    y = np.asarray(forward(*operands(batch._replace(x=x)))[0], np.float32)
    assert np.isnan(y[0]).all()
    np.testing.assert_array_equal(y[1:], clean[1:])


@pytest.mark.parametrize("x_dtype", [BF16, F32])
@pytest.mark.parametrize("weight_dtype", [BF16, F32])
def test_dtypes_are_cast_inside(x_dtype: np.dtype, weight_dtype: np.dtype) -> None:
    batch = random_batch(SIZES[3], "distinct")
    want, _ = forward(*operands(batch))
    x, ids, w, *weights = operands(batch)
    y, _ = forward(x.astype(x_dtype), ids, w, *(a.astype(weight_dtype) for a in weights))
    assert y.dtype == x_dtype
    compare.assert_bitwise(y.astype(BF16), want, "y")


def test_inside_scan_remat_and_donation() -> None:
    batch = random_batch(SIZES[3], "distinct")
    x, *rest = operands(batch)

    def layer(x: Any, _: Any) -> Any:
        return x + jax.checkpoint(functools.partial(mega_moe, backend="cuda"))(x, *rest), None

    want = x
    for _ in range(3):
        want = layer(want, None)[0]
    stack = jax.jit(lambda x: jax.lax.scan(layer, x, length=3)[0], donate_argnums=0)
    compare.assert_bitwise(stack(x + 0), want, "y")


def test_two_sizes_in_one_program() -> None:
    small, large = random_batch(SIZES[2], "distinct"), random_batch(SIZES[6], "distinct")
    want = [forward(*operands(b))[0] for b in (small, large, small)]
    both = jax.jit(lambda *a: [forward(*a[:6])[0], forward(*a[6:])[0], forward(*a[:6])[0]])
    for found, right in zip(both(*operands(small), *operands(large)), want, strict=True):
        compare.assert_bitwise(found, right, "y")


def test_several_ranks_without_an_axis_are_refused_before_any_launch() -> None:
    dims = Dims(T=16, K=2, E=8, R=2, H=64, I=64)
    batch = random_batch((16, 2, 4, 64, 64), "distinct")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*groups has 1 dev"):
        jax.block_until_ready(launched(*operands(batch), dims=dims, launches=_ffi.FUSED))
