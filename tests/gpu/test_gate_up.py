"""save="gate_up" on one GPU: the same bits as save="none", and all of what is kept is written."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import _ffi
from jax_megamoe._call_arrays import gate_up_array
from jax_megamoe.ops import GATE_UP_NAME
from tests import cases, compare, layer
from tests.backward import (
    NAMES,
    assert_same,
    keeping,
    kept_gradients,
    launched,
    operands,
)
from tests.cases import BF16, F32, ROUTINGS, Batch
from tests.forward import SIZES, dims_of, forward, poison_free_memory, random_batch

pytestmark = pytest.mark.gpu

POLICIES = jax.checkpoint_policies


def num_routes(batch: Batch) -> int:
    ids = batch.expert_idx
    return int(np.count_nonzero((ids >= 0) & (ids < batch.num_experts)))


def assert_all_written(gate_up: Any, batch: Batch) -> None:
    """g and u of each route, of which none is 0 in a random batch, and 0 elsewhere."""
    values = np.asarray(gate_up).astype(F32)
    kept = gate_up_array(dims_of(batch))
    assert (gate_up.shape, gate_up.dtype) == (kept.shape, kept.dtype)
    assert np.isfinite(values).all()
    assert np.count_nonzero(values) == num_routes(batch) * gate_up.shape[1]


@pytest.mark.parametrize("weight_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_oracle_is_exact(size: tuple[int, ...], routing: str, weight_dtype: np.dtype) -> None:
    batch = cases.oracle_of(size, routing)
    right = cases.oracle_results(batch)
    found = kept_gradients(*operands(batch, weight_dtype), dims=dims_of(batch))
    assert [a.dtype for a in found] == [BF16, F32, *[weight_dtype] * 3]
    for name, a in zip(NAMES, found, strict=True):
        compare.assert_exact(a, getattr(right, name), name)


@pytest.mark.parametrize("weight_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_bit_is_that_of_computing_again(
    size: tuple[int, ...], routing: str, weight_dtype: np.dtype
) -> None:
    """Of y, of what is kept and of the gradients, fused and not, and every time."""
    batch = random_batch(size, routing)
    arrays, dims = operands(batch, weight_dtype), dims_of(batch)
    y, _ = forward(*arrays[1:])
    want = launched(*arrays, dims=dims)
    y_unfused, _, kept = keeping(*arrays[1:], dims=dims, launches=_ffi.UNFUSED)
    compare.assert_bitwise(y_unfused, y, "y")
    assert_all_written(kept, batch)
    unfused = launched(*arrays, gate_up=kept, dims=dims, launches=_ffi.BACKWARD_UNFUSED)
    assert_same(unfused, want)
    for _ in range(20):
        found_y, _, gate_up = keeping(*arrays[1:], dims=dims)
        compare.assert_bitwise(found_y, y, "y")
        compare.assert_bitwise(gate_up, kept, "gate_up")
        assert_same(launched(*arrays, gate_up=gate_up, dims=dims), want)


# One expert with m rows: no tile full, one, one more row, and the same of half tiles.
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 192, 193, 257])
def test_every_number_of_rows(rows: int) -> None:
    ids = np.full((300, 1), -1, np.int32)
    ids[:rows] = 2
    batch = random_batch((300, 1, 4, 192, 192), "nothing")._replace(expert_idx=ids)
    arrays, dims = operands(batch), dims_of(batch)
    _, _, gate_up = keeping(*arrays[1:], dims=dims)
    assert_all_written(gate_up, batch)
    assert_same(launched(*arrays, gate_up=gate_up, dims=dims), launched(*arrays, dims=dims))


def test_poisoned_memory_reaches_nothing() -> None:
    batch = random_batch(SIZES[5], "invalid")
    arrays, dims = operands(batch), dims_of(batch)
    want = launched(*arrays, dims=dims)
    for _ in range(3):
        poison_free_memory()
        _, _, gate_up = keeping(*arrays[1:], dims=dims)
        assert_all_written(gate_up, batch)
        poison_free_memory()
        assert_same(launched(*arrays, gate_up=gate_up, dims=dims), want)


def test_nan_stays_with_its_token() -> None:
    """A NaN of an earlier item is in no pad of a later one."""
    batch = random_batch(SIZES[3], "distinct")
    arrays, dims = operands(batch), dims_of(batch)
    _, _, clean = keeping(*arrays[1:], dims=dims)
    x = batch.x.copy()
    x[0] = np.nan
    _, _, gate_up = keeping(*operands(batch._replace(x=x))[1:], dims=dims)
    is_nan = np.isnan(np.asarray(gate_up).astype(F32))
    assert is_nan.sum() == batch.expert_idx.shape[1] * gate_up.shape[1]
    np.testing.assert_array_equal(np.asarray(gate_up)[~is_nan], np.asarray(clean)[~is_nan])


def test_frozen_experts_change_nothing_else() -> None:
    batch = random_batch(SIZES[5], "invalid")
    arrays, dims = operands(batch), dims_of(batch)
    found = kept_gradients(*arrays, dims=dims, trainable=False)
    assert_same(found, launched(*arrays, dims=dims)[:2])


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_the_gradient_of_the_op(backend: str, dtype: np.dtype) -> None:
    batch = random_batch(SIZES[3], "distinct")
    cast = Batch(*(a if a.dtype == np.int32 else a.astype(dtype) for a in batch))
    found = layer.run(cast, backend=backend, save="gate_up")
    compare.assert_results_bitwise(found, layer.run(cast, backend="cuda"))


@pytest.mark.parametrize("compiled", [True, False])
def test_debug_nans_finds_none(compiled: bool) -> None:
    """It looks at what is kept, too, where that leaves a program; and a call may be one itself."""
    batch = random_batch(SIZES[3], "invalid")
    x, ids, *rest, dy = map(jnp.asarray, batch)
    op = layer.bind(backend="cuda", save="gate_up")
    right = layer.run(batch, backend="cuda")
    poison_free_memory()

    def layer_of(x: Any, *rest: Any) -> Any:
        return op(x, ids, *rest)

    with jax.debug_nans(True):
        y, pull = jax.vjp(jax.jit(layer_of) if compiled else layer_of, x, *rest)
        found = (y, *pull(dy))
    for name, a in zip(right._fields, found, strict=True):
        compare.assert_bitwise(a, getattr(right, name), name)


@pytest.mark.parametrize(
    "policy",
    [
        POLICIES.nothing_saveable,
        POLICIES.everything_saveable,
        POLICIES.dots_saveable,
        POLICIES.save_only_these_names(GATE_UP_NAME),
    ],
    ids=["nothing", "everything", "dots", "its name"],
)
@pytest.mark.parametrize("scanned", [False, True])
def test_inside_scan_and_remat(policy: Any, scanned: bool) -> None:
    """Gradients of a stack of residual layers, of which all layers are the same."""
    x, ids, w, *weights, dy = map(jnp.asarray, random_batch(SIZES[3], "distinct"))

    def gradients(save: str, remat: bool) -> Any:
        op = layer.bind(backend="cuda", save=save)

        def block(x: Any, w: Any, *weights: Any) -> Any:
            return x + op(x, ids, w, *weights)

        body = jax.checkpoint(block, policy=policy) if remat else block

        def run(x: Any, *rest: Any) -> Any:
            if scanned:
                return jax.lax.scan(lambda x, _: (body(x, *rest), None), x, length=3)[0]
            for _ in range(3):
                x = body(x, *rest)
            return x

        return jax.jit(lambda *primals: jax.vjp(run, *primals)[1](dy))(x, w, *weights)

    want = gradients("none", remat=False)
    assert_same(gradients("gate_up", remat=True), want)


def test_what_is_kept_of_another_size_is_refused() -> None:
    batch = random_batch(SIZES[3], "distinct")
    arrays, dims = operands(batch), dims_of(batch)
    _, _, gate_up = keeping(*arrays[1:], dims=dims)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*operand gate_up is"):
        jax.block_until_ready(launched(*arrays, gate_up=gate_up[1:], dims=dims))
