"""The fused backward on one GPU: exact, as precise as an unfused path, and the same every time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import _ffi
from jax_megamoe.config import Dims
from tests import cases, compare, layer
from tests.backward import (
    NAMES,
    assert_same,
    assert_whole_trace,
    errors_by_expert,
    gradients,
    launched,
    operands,
    sums_that_need_float32,
    unfused_bf16,
    with_gate,
)
from tests.cases import BF16, F32, ROUTINGS, Batch, Results
from tests.forward import SIZES, dims_of, poison_free_memory, random_batch

pytestmark = pytest.mark.gpu


def shares(found: list[np.ndarray], tokens: Any, experts: Any) -> list[np.ndarray]:
    """What gradients say of some tokens and some experts."""
    return [a[tokens] for a in found[:2]] + [a[experts] for a in found[2:]]


def assert_exact(found: Any, right: Results) -> None:
    for name, a in zip(NAMES, found, strict=True):
        compare.assert_exact(a, getattr(right, name), name)


@pytest.mark.parametrize("weight_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_oracle_is_exact(size: tuple[int, ...], routing: str, weight_dtype: np.dtype) -> None:
    batch = cases.oracle_of(size, routing)
    found = launched(*operands(batch, weight_dtype), dims=dims_of(batch))
    assert [a.dtype for a in found] == [BF16, F32, *[weight_dtype] * 3]
    assert_exact(found, cases.oracle_results(batch))


# One expert with m rows: no tile full, one, one more row, and the same of half tiles.
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257])
def test_every_number_of_rows(rows: int) -> None:
    size = (300, 1, 4, 192, 128)
    ids = np.full((300, 1), -1, np.int32)
    ids[:rows] = 2
    batch = cases.oracle_of(size, ids)
    assert_exact(gradients(batch), cases.oracle_results(batch))


def test_experts_without_rows_get_zero() -> None:
    """Every set of busy experts, after a call that leaves the buffers dirty."""
    size = (256, 1, 8, 64, 64)
    dirty = random_batch(size, "distinct")
    for busy in range(256):
        chosen = [e for e in range(8) if busy >> e & 1]
        ids = np.resize(np.array(chosen or [-1], np.int32), (256, 1))
        batch = cases.oracle_of(size, ids)
        gradients(dirty)
        assert_exact(gradients(batch), cases.oracle_results(batch))


@pytest.mark.parametrize("weights", [[1, 1], [1, 0], [0, 0]])
def test_a_route_of_weight_zero_has_its_gradient(weights: list[int]) -> None:
    ids = np.tile(np.array([0, 3], np.int32), (5, 1))
    batch = cases.oracle_of((5, 2, 4, 64, 64), ids, np.tile(np.array(weights, np.float64), (5, 1)))
    found = gradients(batch)
    np.testing.assert_array_equal(found[1], np.tile(np.array([1, 4], np.float32), (5, 1)))
    assert_exact(found, cases.oracle_results(batch))


@pytest.mark.parametrize("of", ["dx", "dW"])
def test_sums_are_float32(of: str) -> None:
    batch = sums_that_need_float32()[of]
    found = launched(*operands(batch, F32), dims=dims_of(batch))
    assert_exact(found, cases.oracle_results(batch))


@functools.lru_cache(maxsize=1)
def one_expert_a_token(gate: int) -> tuple[Batch, Results, np.ndarray]:
    """A batch, its right values, and each expert's errors of the unfused path."""
    batch = with_gate(random_batch((4096, 1, 16, 512, 256), "distinct"), gate)
    right, expert = cases.dense(batch), batch.expert_idx[:, 0]
    found = unfused_bf16(*jax.device_put(tuple(batch)))
    return batch, right, errors_by_expert(found, right, expert)


@functools.lru_cache(maxsize=1)
def many_choices() -> tuple[Batch, Results]:
    """A batch and its right values."""
    batch = random_batch(SIZES[5], "distinct")
    return batch, cases.dense(batch)


@pytest.mark.parametrize("gate", [0, 4, -4, -6])
def test_error_of_every_expert_is_that_of_an_unfused_path(gate: int) -> None:
    """One expert a token, so that a token's error is its expert's.

    gate: the mean of the gates. silu' of negative ones is small, but as precise as of others.
    """
    batch, right, theirs = one_expert_a_token(gate)
    ours = errors_by_expert(gradients(batch), right, batch.expert_idx[:, 0])
    worst = np.unravel_index(np.argmax(ours / theirs), ours.shape)
    assert ours[worst] <= 1.05 * theirs[worst], (
        f"{NAMES[worst[0]]} of expert {worst[1]}: {ours[worst]} against {theirs[worst]}"
    )


def test_error_with_many_choices() -> None:
    """Every token and expert against float64, where sums have several terms."""
    batch, right = many_choices()
    found = gradients(batch)
    results = Results(np.zeros_like(right.y), *found)
    compare.assert_within(results, right._replace(y=np.zeros_like(right.y)), 1.5e-2)


@pytest.mark.parametrize("weight_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fused_equals_its_parts_and_itself(
    size: tuple[int, ...], routing: str, weight_dtype: np.dtype
) -> None:
    batch = random_batch(size, routing)
    arrays, dims = operands(batch, weight_dtype), dims_of(batch)
    once = launched(*arrays, dims=dims, launches=_ffi.BACKWARD_UNFUSED)
    for _ in range(20):
        assert_same(launched(*arrays, dims=dims), once)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_float32_gradients_are_the_sums_themselves(size: tuple[int, ...]) -> None:
    """Rounded, they are the bf16 ones; and they do not stand on bf16's grid."""
    batch = random_batch(size, "duplicates")
    dx, dw, *rounded = launched(*operands(batch), dims=dims_of(batch))
    dx_float, dw_float, *sums = launched(*operands(batch, F32), dims=dims_of(batch))
    assert_same((dx_float, dw_float), (dx, dw))
    for name, a, b in zip(NAMES[2:], sums, rounded, strict=True):
        compare.assert_bitwise(np.asarray(a).astype(BF16), b, name)
        assert np.any(np.asarray(a) != np.asarray(b).astype(np.float32)), name


def test_frozen_experts_change_nothing_else() -> None:
    batch = random_batch(SIZES[5], "invalid")
    assert_same(gradients(batch, trainable=False), gradients(batch)[:2])


def test_a_trace_records_every_item_and_changes_nothing() -> None:
    batch = random_batch(SIZES[5], "distinct")
    *found, records = gradients(batch, trace=True)
    assert_same(found, gradients(batch))
    assert_whole_trace(records, batch)


def test_poisoned_memory_reaches_nothing() -> None:
    batch = random_batch(SIZES[5], "invalid")
    clean = gradients(batch)
    for _ in range(3):
        poison_free_memory()
        assert_same(gradients(batch), clean)


def test_nan_stays_with_its_token_and_its_experts() -> None:
    batch = random_batch(SIZES[3], "distinct")
    clean = gradients(batch)
    for name in ("x", "dy"):
        poisoned = getattr(batch, name).copy()
        poisoned[0] = np.nan
        found = gradients(batch._replace(**{name: poisoned}))
        others = np.setdiff1d(np.arange(batch.num_experts), batch.expert_idx[0])
        rest = slice(1, None)
        assert_same(shares(found, rest, others), shares(clean, rest, others))
        of_token_and_experts = shares(found, slice(1), batch.expert_idx[0])
        assert all(np.isnan(a.astype(np.float32)).all() for a in of_token_and_experts[:2])
        for a in of_token_and_experts[2:]:
            assert np.isnan(a.astype(np.float32)).any(axis=(1, 2)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_of_one_expert_reach_no_other(value: float) -> None:
    """Nor do they come back through pads: an expert's gradients depend on its rows alone."""
    batch = random_batch(SIZES[3], "distinct")
    clean = gradients(batch)
    w_down = batch.w_down.copy()
    w_down[2, :, 0] = value
    found = gradients(batch._replace(w_down=w_down))
    others = np.arange(batch.num_experts) != 2
    away = ~(batch.expert_idx == 2).any(axis=1)
    assert_same(shares(found, away, others), shares(clean, away, others))
    # dWd = (w h)^T dy does not read Wd at all.
    compare.assert_bitwise(found[4], clean[4], "dw_down")
    assert_same(gradients(batch), clean)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_the_gradient_of_the_op(dtype: np.dtype) -> None:
    """`jax.vjp` of mega_moe gives the call's gradients in the dtypes of the arguments."""
    batch = random_batch(SIZES[3], "distinct")
    dx, dw, *weights = gradients(batch)
    cast = Batch(*(a if a.dtype == np.int32 else a.astype(dtype) for a in batch))
    found = layer.run(cast, backend="cuda")
    assert all(a.dtype == dtype for a in found)
    compare.assert_bitwise(np.asarray(found.dx).astype(BF16), dx, "dx")
    compare.assert_bitwise(found.dw, dw.astype(dtype), "dw")
    for name, a in zip(NAMES[2:], weights, strict=True):
        compare.assert_bitwise(np.asarray(getattr(found, name)).astype(BF16), a, name)


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "dots_saveable"])
def test_inside_scan_and_remat(policy: str) -> None:
    """Gradients of a stack of residual layers, of which all layers are the same."""
    batch = random_batch(SIZES[3], "distinct")
    x, ids, w, *weights, dy = map(jnp.asarray, batch)
    op = layer.bind(backend="cuda")

    def stack(block: Any, scanned: bool) -> Any:
        def run(x: Any, w: Any, *weights: Any) -> Any:
            if scanned:
                body = lambda x, _: (block(x, ids, w, *weights), None)  # noqa: E731
                return jax.lax.scan(body, x, length=3)[0]
            for _ in range(3):
                x = block(x, ids, w, *weights)
            return x

        return jax.jit(lambda *primals: jax.vjp(run, *primals)[1](dy))

    def block(*arrays: Any) -> Any:
        return arrays[0] + op(*arrays)

    saved = jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, policy))
    for scanned in (False, True):
        want = stack(block, scanned)(x, w, *weights)
        assert_same(stack(saved, scanned)(x, w, *weights), want)


@pytest.mark.parametrize("policy", ["vjp twice", "twice in one program"])
def test_calls_do_not_disturb_each_other(policy: str) -> None:
    small, large = random_batch(SIZES[2], "distinct"), random_batch(SIZES[6], "distinct")
    want = [gradients(b) for b in (small, large)]
    if policy == "vjp twice":
        pulls = [pull_of(b) for b in (small, large)]
        found = [pull(jnp.asarray(b.dy)) for pull, b in zip(pulls, (small, large), strict=True)]
        for (dx, *_), (right, *_) in zip(found, want, strict=True):
            compare.assert_bitwise(dx, right, "dx")
        return
    both = jax.jit(
        lambda a, b: (
            launched(*a, dims=dims_of(small)),
            launched(*b, dims=dims_of(large)),
            launched(*a, dims=dims_of(small)),
        )
    )
    found = both(operands(small), operands(large))
    for gradient, right in zip(found, (want[0], want[1], want[0]), strict=True):
        assert_same(gradient, right)


def pull_of(batch: Batch) -> Any:
    x, ids, *rest, _ = map(jnp.asarray, batch)
    op = layer.bind(backend="cuda")
    return jax.vjp(lambda x, *rest: op(x, ids, *rest), x, *rest)[1]


# One part without the one before it: its input never comes.
@pytest.mark.parametrize(
    ("part", "phase"),
    [(32, "dispatch"), (64, "dgrad_down"), (128, "dgrad_down"), (8, "dgrad_gate_up")],
)
def test_a_wait_gives_up_and_names_its_phase(part: int, phase: str) -> None:
    batch = random_batch((2048, 8, 16, 512, 512), "distinct")
    expected = gradients(batch)
    gradients(batch, launches=(part,), deadline_s=0.2)
    message = rf"ABORTED.*gave up waiting for rank 0 after \d+ ms: phase {phase}, .*block \d+"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        gradients(batch)
    assert_same(gradients(batch), expected)


@pytest.mark.parametrize("deadline_us", [1, 50, 200, 800])
def test_a_wait_gives_up_in_the_middle(deadline_us: int) -> None:
    """Waits that are no fault last longer: some blocks stop while others multiply and sum."""
    # A kernel of milliseconds: the sums wait for most of that.
    batch = random_batch((32768, 8, 32, 1024, 512), "distinct")
    arrays, dims = operands(batch), dims_of(batch)
    expected = gradients(batch)
    faults = 0
    for _ in range(30):
        try:
            jax.block_until_ready(launched(*arrays, dims=dims, deadline_s=deadline_us * 1e-6))
        except jax.errors.JaxRuntimeError as error:  # of the call before
            assert "gave up waiting" in str(error)
            faults += 1
    assert faults > 0
    try:
        gradients(batch)
    except jax.errors.JaxRuntimeError as error:
        assert "gave up waiting" in str(error)
    assert_same(gradients(batch), expected)


@pytest.mark.parametrize("save", ["none", "gate_up"])
def test_auto_is_the_kernels(save: str) -> None:
    batch = random_batch(SIZES[3], "distinct")
    auto = layer.compiled(save=save)
    text = auto.trace(*batch).lower().as_text()
    for name in ("forward", "backward"):
        assert text.count(f"@jax_megamoe_{name}") == 1
    compare.assert_results_bitwise(auto(*batch), layer.run(batch, backend="cuda"))


def test_several_ranks_without_an_axis_are_refused_before_any_launch() -> None:
    dims = Dims(T=16, K=2, E=8, R=2, H=64, I=64)
    batch = random_batch((16, 2, 4, 64, 64), "distinct")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT.*groups has 1 dev"):
        jax.block_until_ready(launched(*operands(batch), dims=dims))
