"""Every size, every routing: exact by the oracle, and fused equal to its parts bitwise."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import _ffi, mega_moe, memory_plan
from tests import cases, compare, device_oracle
from tests.cases import BF16, ROUTINGS
from tests.forward import forward, launched, num_rows_that_differ, one_rank, operands
from tests.sizes import LARGE, MODELS, large_case

pytestmark = pytest.mark.gpu


def check_oracle(ids: np.ndarray, *, experts: int, hidden: int, intermediate: int) -> list[Any]:
    """Returns its operands."""
    arrays = device_oracle.operands(ids, experts=experts, hidden=hidden, intermediate=intermediate)
    y, counts = forward(*arrays)
    assert device_oracle.rows_wrong(y, ids, experts=experts) == []
    valid = ids[(ids >= 0) & (ids < experts)]
    np.testing.assert_array_equal(counts, np.bincount(valid, minlength=experts))
    return arrays


def check(ids: np.ndarray, *, experts: int, hidden: int, intermediate: int) -> None:
    """The oracle exactly; on irregular tokens and weights the fused kernel equals its parts."""
    arrays = check_oracle(ids, experts=experts, hidden=hidden, intermediate=intermediate)
    dims = one_rank(T=ids.shape[0], K=ids.shape[1], E=experts, H=hidden, I=intermediate)
    arrays = device_oracle.irregular(*arrays)
    unfused, _ = launched(*arrays, dims=dims, launches=_ffi.UNFUSED)
    has_routes = bool(((ids >= 0) & (ids < experts)).any())
    assert bool(jnp.any(unfused != 0)) == has_routes
    for _ in range(2):
        fused, _ = launched(*arrays, dims=dims, launches=_ffi.FUSED)
        assert int(num_rows_that_differ(fused, unfused)) == 0


@pytest.mark.parametrize("choices", [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32])
def test_choices(choices: int) -> None:
    ids = ROUTINGS["duplicates"](tokens=301, choices=choices, experts=40)
    check(ids, experts=40, hidden=128, intermediate=64)


@pytest.mark.parametrize(
    "experts", [1, 2, 3, 6, 7, 31, 100, 129, 255, 256, 257, 384, 500, 511, 512]
)
def test_experts(experts: int) -> None:
    ids = ROUTINGS["distinct"](tokens=700, choices=min(experts, 8), experts=experts)
    check(ids, experts=experts, hidden=128, intermediate=64)


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 1023, 4097, 16383, 65537])
def test_tokens(tokens: int, routing: str) -> None:
    ids = ROUTINGS[routing](tokens=tokens, choices=4, experts=32)
    check(ids, experts=32, hidden=128, intermediate=64)


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("tokens", [139_999, 140_000])
def test_most_tokens(tokens: int, routing: str) -> None:
    ids = ROUTINGS[routing](tokens=tokens, choices=8, experts=64)
    check(ids, experts=64, hidden=256, intermediate=128)


def test_no_token() -> None:
    arrays = device_oracle.operands(
        np.zeros((0, 2), np.int32), experts=4, hidden=64, intermediate=64
    )
    y, counts = forward(*arrays)
    assert y.shape == (0, 64) and y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(counts, np.zeros(4))


@pytest.mark.parametrize("name", LARGE)
def test_offsets_beyond_32_bits(name: str) -> None:
    dims, ids = large_case(name)
    check_oracle(ids, experts=dims.E, hidden=dims.H, intermediate=dims.I)


@pytest.mark.parametrize("choices", [1, 2, 8])
@pytest.mark.parametrize(("hidden", "intermediate"), MODELS)
def test_sizes_of_known_models(hidden: int, intermediate: int, choices: int) -> None:
    ids = ROUTINGS["distinct"](tokens=333, choices=choices, experts=8)
    check(ids, experts=8, hidden=hidden, intermediate=intermediate)


@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (200, 130), (64, 100)])
def test_other_sizes_are_refused_by_name(hidden: int, intermediate: int) -> None:
    ids = ROUTINGS["distinct"](tokens=20, choices=2, experts=8)
    arrays = device_oracle.operands(ids, experts=8, hidden=hidden, intermediate=intermediate)
    with pytest.raises(ValueError, match="a multiple of 64"):
        forward(*arrays)


def test_every_number_of_rows_of_one_expert() -> None:
    """1 to 130 rows, the other experts without any."""
    arrays = device_oracle.operands(
        np.zeros((130, 1), np.int32), experts=4, hidden=128, intermediate=64
    )
    for rows in range(1, 131):
        ids = np.where(np.arange(130) < rows, 2, -1)[:, None].astype(np.int32)
        arrays[1] = jnp.asarray(ids)
        y, counts = forward(*arrays)
        assert device_oracle.rows_wrong(y, ids, experts=4) == [], f"{rows} rows"
        np.testing.assert_array_equal(counts, [0, 0, rows, 0])


def test_every_set_of_empty_experts() -> None:
    """All 256 sets of experts with rows, after a call that gave rows to all of them."""
    tokens = 200
    ids = (np.arange(tokens) % 8)[:, None].astype(np.int32)
    arrays = device_oracle.operands(ids, experts=8, hidden=128, intermediate=64)
    forward(*arrays)
    for members in range(256):
        busy = np.flatnonzero([members >> e & 1 for e in range(8)])
        chosen = busy[np.arange(tokens) % busy.size] if busy.size else np.full(tokens, -1)
        ids = chosen[:, None].astype(np.int32)
        arrays[1] = jnp.asarray(ids)
        y, counts = forward(*arrays)
        assert device_oracle.rows_wrong(y, ids, experts=8) == [], f"experts {busy}"
        np.testing.assert_array_equal(counts, np.bincount(ids[ids >= 0], minlength=8))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_few_tokens_of_many_choices(tokens: int) -> None:
    ids = ROUTINGS["distinct"](tokens=tokens, choices=8, experts=32)
    check(ids, experts=32, hidden=64, intermediate=64)


def oracle_y(ids: np.ndarray, weight: Any, experts: int = 8) -> np.ndarray:
    """Column 0 of y of an oracle batch, and that all columns equal it."""
    batch = cases.oracle(ids, weight, num_experts=experts, hidden=64, intermediate=64, dtype=BF16)
    y = np.asarray(forward(*operands(batch))[0], np.float32)
    np.testing.assert_array_equal(y, np.tile(y[:, :1], 64))
    return y[:, 0]


def test_ids_out_of_range_are_no_routes() -> None:
    wide, narrow = 2**31 - 1, -(2**31)
    ids = np.array([[0, 3], [-1, 3], [8, 2], [-1, -1], [wide, 1], [narrow, 1]], np.int32)
    np.testing.assert_array_equal(oracle_y(ids, 0.5), [2.5, 2, 1.5, 0, 1, 1])


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint16, np.uint32])
def test_ids_of_any_integer_dtype(dtype: Any) -> None:
    ids = np.array([[0, 3], [7, 3], [5, 2]]).astype(dtype)
    np.testing.assert_array_equal(oracle_y(ids, 0.5), [2.5, 6, 4.5])


def test_a_wide_id_does_not_wrap_into_range() -> None:
    with jax.enable_x64(True):
        ids = jnp.asarray(np.array([[2**32 + 3, 1]], np.int64))
        assert ids.dtype == jnp.int64
        batch = cases.oracle(
            np.zeros((1, 2), np.int32), 0.5, num_experts=8, hidden=64, intermediate=64, dtype=BF16
        )
        x, _, *rest = operands(batch)
        y = jax.jit(functools.partial(mega_moe, backend="cuda"))(x, ids, *rest)
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.full((1, 64), 1.0))


def test_a_weight_of_zero_is_a_route_and_adds_nothing() -> None:
    ids = np.array([[0, 1], [3, 2]], np.int32)
    weight = np.array([[1, 0], [0, 1]], np.float32)
    np.testing.assert_array_equal(oracle_y(ids, weight), [1, 3])


def test_the_sum_over_choices_is_float32() -> None:
    """1 + 6 / 256: a running sum in bf16 stays at 1."""
    batch = cases.oracle(
        np.arange(8, dtype=np.int32)[None],
        np.array([[1, *[2**-8] * 6, 0]]),
        num_experts=8,
        hidden=64,
        intermediate=64,
        dtype=BF16,
    )
    batch.w_down[:, 0, :] = 1 / 32
    y, _ = forward(*operands(batch))
    compare.assert_exact(y, np.full((1, 64), 1.0234375), "y")


def test_the_report_covers_the_largest_case() -> None:
    """What the largest sizes here ask for is what JAX's allocator sees, and it is free again."""
    dims, ids = large_case("pool")
    sizes = {"experts": dims.E, "hidden": dims.H, "intermediate": dims.I}
    compiled = forward.lower(*device_oracle.operands(ids, **sizes)).compile()
    analysis = compiled.memory_analysis()
    workspace = memory_plan(T=dims.T, K=dims.K, E=dims.E, H=dims.H, I=dims.I).workspace_bytes
    assert analysis is not None
    assert workspace <= analysis.temp_size_in_bytes <= 1.01 * workspace + 2**26
