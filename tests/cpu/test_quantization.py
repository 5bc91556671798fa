"""The quantiser bit by bit, against one in NumPy that knows its definition alone."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe import QuantizedExperts, quantize_expert_weights
from jax_megamoe.quantization import NUM_ARRAYS, dequantize, from_arrays
from jax_megamoe.quantization import quantize_rows as quantize_rows_of
from jax_megamoe.quantization import rounded_rows as rounded_rows_of
from tests import fp8
from tests.cases import BF16, F32

GROUP = fp8.GROUP
F32_MAX = np.finfo(F32).max
INF = np.float32(np.inf)

quantize_rows = jax.jit(quantize_rows_of)
rounded_rows = jax.jit(rounded_rows_of)
quantize_experts = jax.jit(quantize_expert_weights)


def assert_same_bits(found: Any, right: np.ndarray) -> None:
    """But for the sign of NaN, which has two codes."""
    found = np.asarray(found)
    assert found.dtype == right.dtype and found.shape == right.shape
    kind = {1: np.uint8, 4: np.uint32}[found.itemsize]
    same = found.view(kind) == right.view(kind)
    same |= np.isnan(found.astype(F32)) & np.isnan(right.astype(F32))
    worst = np.argwhere(~same)[:3]
    assert same.all(), [(tuple(i), found[tuple(i)], right[tuple(i)]) for i in worst]


def assert_rows(rows: np.ndarray) -> None:
    codes, scales = quantize_rows(jnp.asarray(rows))
    right_codes, right_scales = fp8.quantized_rows(rows.astype(F32))
    assert_same_bits(scales, right_scales)
    assert_same_bits(codes, right_codes)
    with np.errstate(over="ignore"):
        assert_same_bits(rounded_rows(jnp.asarray(rows)), fp8.rounded_rows(rows).astype(F32))


def with_largest(largest: Any, rest: Any = 0.0) -> np.ndarray:
    """Groups [N, 128] whose largest magnitudes are given; `rest` fills up to 127 other places."""
    largest = np.asarray(largest, F32).reshape(-1, 1)
    rows = np.zeros((len(largest), GROUP), F32)
    rows[:, 1 : 1 + np.size(rest)] = rest
    rows[:, :1] = largest
    return rows


def around(values: np.ndarray) -> np.ndarray:
    """float32 values, and the next ones below and above."""
    values = values.astype(F32)
    return np.concatenate([values, np.nextafter(values, -INF), np.nextafter(values, INF)])


CODES = np.arange(0x7F, dtype=np.uint8).view(fp8.E4M3).astype(np.float64)


def test_the_twin_knows_e4m3() -> None:
    assert CODES[-1] == 448 and CODES[1] == 2.0**-9 and np.all(np.diff(CODES) > 0)


def test_every_scale_begins_and_ends_where_it_should() -> None:
    """The largest magnitude at, below and above 448 times each power of two."""
    limits = 448 * fp8.SCALES
    limits = around(limits[limits < F32_MAX])
    rows = with_largest(np.concatenate([limits, -limits, [F32_MAX]]))
    assert_rows(rows)
    scales = np.asarray(quantize_rows(jnp.asarray(rows))[1])
    assert set(np.unique(scales)) == set(fp8.SCALES.astype(F32))


@pytest.mark.parametrize("exponent", [0, -117, 100])
@pytest.mark.parametrize("sign", [1, -1])
def test_every_code_and_every_tie(sign: int, exponent: int) -> None:
    """All codes, and the middles between neighbours with the next values around them."""
    values = np.concatenate([CODES[:-1], around((CODES[1:] + CODES[:-1]) / 2)])
    values = np.resize(values, (-(-len(values) // 127), 127))
    rows = with_largest(np.full(len(values), 448.0))
    rows[:, 1:] = sign * values
    rows = (rows * 2.0**exponent).astype(F32)
    assert_rows(rows)
    codes, scales = quantize_rows(jnp.asarray(rows))
    assert np.all(np.asarray(scales) == 2.0**exponent)
    assert set(np.unique(np.abs(np.asarray(codes, F32)))) == set(CODES.astype(F32))


ANY_BITS = hnp.arrays(np.uint32, (4, 2 * GROUP), elements=st.integers(0, 2**32 - 1))
PROPERTY = hypothesis.settings(max_examples=60, derandomize=True, database=None, deadline=None)


@PROPERTY
@hypothesis.given(bits=ANY_BITS, mask=st.integers(0, 2**32 - 1))
def test_any_bits(bits: np.ndarray, mask: int) -> None:
    """The mask clears the same bits everywhere: exponents then lie nearer to each other."""
    assert_rows((bits & np.uint32(mask)).view(F32))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("exponent", [-140, -126, -120, -100, 0, 60, 120])
def test_normal_values_of_any_size(exponent: int, dtype: np.dtype) -> None:
    rng = np.random.default_rng(exponent % 97)
    rows = np.ldexp(rng.standard_normal((16, 3 * GROUP)), exponent).astype(dtype)
    assert_rows(rows)


def test_a_group_of_zeros_has_the_scale_one() -> None:
    subnormal = np.nextafter(np.float32(fp8.LEAST_NORMAL), np.float32(0))
    rows = with_largest([0.0, -0.0, subnormal, -subnormal, fp8.LEAST_NORMAL], [-0.0, subnormal])
    assert_rows(rows)
    codes, scales = (np.asarray(a) for a in quantize_rows(jnp.asarray(rows)))
    np.testing.assert_array_equal(scales[:, 0], [1, 1, 1, 1, 2.0**-117])
    assert not np.any(codes[:4].astype(F32)) and codes[4, 0] == 2.0**-9
    np.testing.assert_array_equal(np.signbit(codes[:, :2]), np.signbit(rows[:, :2]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_with_nan_or_infinity_is_nan_and_no_other(bad: float) -> None:
    rows = np.random.default_rng(0).standard_normal((3, 3 * GROUP)).astype(F32)
    clean_codes, clean_scales = (np.asarray(a) for a in quantize_rows(jnp.asarray(rows)))
    rows[1, GROUP + 5] = bad
    assert_rows(rows)
    codes, scales = (np.asarray(a) for a in quantize_rows(jnp.asarray(rows)))
    poisoned = np.zeros(rows.shape, bool)
    poisoned[1, GROUP : 2 * GROUP] = True
    np.testing.assert_array_equal(np.isnan(codes.astype(F32)), poisoned)
    assert scales[1, 1] == 1
    assert_same_bits(np.where(poisoned, 0, codes), np.where(poisoned, 0, clean_codes))
    assert np.sum(scales != clean_scales) <= 1


def test_what_rounds_up_to_a_power_of_two_that_float32_lacks_has_a_code() -> None:
    rows = with_largest(around(np.array([1.9375 * 2.0**127])))
    assert_rows(rows)
    codes, scales = (np.asarray(a) for a in quantize_rows(jnp.asarray(rows)))
    assert np.all(scales == 2.0**120)
    np.testing.assert_array_equal(codes[:, 0].astype(F32), [256, 240, 256])
    np.testing.assert_array_equal(
        np.isinf(rounded_rows(jnp.asarray(rows)))[:, 0], [True, False, True]
    )


@PROPERTY
@hypothesis.given(bits=ANY_BITS)
def test_what_a_code_stands_for_is_a_normal_number_of_bf16(bits: np.ndarray) -> None:
    found = np.asarray(rounded_rows(jnp.asarray(bits.view(F32))))
    finite = found[np.isfinite(found)]
    np.testing.assert_array_equal(finite.astype(BF16).astype(F32), finite)
    assert np.all((finite == 0) | (np.abs(finite) >= fp8.LEAST_NORMAL))


def draw_weights(dtype: np.dtype, *, seed: int = 0) -> list[np.ndarray]:
    """Two experts of H = 256, I = 384, whose blocks have different sizes."""
    rng = np.random.default_rng(seed)
    shapes = [(2, 256, 384)] * 2 + [(2, 384, 256)]
    weights = [rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape) for shape in shapes]
    for w in weights:
        w[:, :GROUP] *= 3e-4
        w[1, :, GROUP : 2 * GROUP] *= 7e3
        w[0, GROUP : 2 * GROUP, GROUP : 2 * GROUP] = 0
    return [w.astype(dtype) for w in weights]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_weights(dtype: np.dtype) -> None:
    """Rounded once, from the dtype of the weights; both orders hold the same codes."""
    weights = draw_weights(dtype)
    found = quantize_experts(*weights)
    for matrix, w in zip(found, weights, strict=True):
        for e in range(len(w)):
            codes, scales = fp8.quantized_blocks(w[e].astype(F32))
            assert_same_bits(matrix.natural[e], codes)
            assert_same_bits(matrix.transposed[e], np.ascontiguousarray(codes.T))
            assert_same_bits(matrix.scales[e], scales)
            np.testing.assert_array_equal(dequantize(matrix)[e], fp8.rounded_blocks(w[e]))
        assert len(np.unique(np.asarray(matrix.scales))) > 3


def test_weights_are_not_rounded_to_bf16_first() -> None:
    """The middle of two codes, and a little more than bf16 tells apart."""
    w = np.zeros((1, GROUP, GROUP), F32)
    w[0, 0, :2] = 448.0, 17 + 2.0**-10
    (matrix, *_) = quantize_experts(w, w, w)
    assert matrix.natural[0, 0, 1] == 18
    (matrix, *_) = quantize_experts(*[w.astype(BF16)] * 3)
    assert matrix.natural[0, 0, 1] == 16


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_weight_spoils_its_block_alone(bad: float) -> None:
    clean = quantize_experts(*draw_weights(F32))
    weights = draw_weights(F32)
    weights[1][1, 200, 300] = bad
    found = quantize_experts(*weights)
    block = np.zeros((2, 256, 384), bool)
    block[1, GROUP : 2 * GROUP, 2 * GROUP :] = True
    np.testing.assert_array_equal(np.isnan(dequantize(found.w_up)), block)
    np.testing.assert_array_equal(
        np.where(block, 0, dequantize(found.w_up)), np.where(block, 0, dequantize(clean.w_up))
    )
    assert_same_bits(found.w_down.natural, np.asarray(clean.w_down.natural))


def test_without_jit_and_of_numpy_the_same() -> None:
    weights = draw_weights(F32)
    for a, b in zip(
        jax.tree.leaves(quantize_expert_weights(*weights)),
        jax.tree.leaves(quantize_experts(*map(jnp.asarray, weights))),
        strict=True,
    ):
        assert_same_bits(a, np.asarray(b))


def test_a_stack_of_layers_by_vmap() -> None:
    layers = zip(draw_weights(F32), draw_weights(F32, seed=1), strict=True)
    found = jax.vmap(quantize_expert_weights)(*(jnp.stack(of_layers) for of_layers in layers))
    for i, seed in enumerate((0, 1)):
        alone = quantize_experts(*draw_weights(F32, seed=seed))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
            assert_same_bits(a[i], np.asarray(b))


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize(
    ("of_gate", "of_down", "left_of_gate", "left_of_down"),
    [
        # H = 256 and I = 384 have 2 and 3 blocks: 4 devices cut both, 2 cut I alone.
        (P("e", "four"), P("e", None, "four"), P("e"), P("e")),
        (P("e", None, "four"), P("e", "four"), P("e"), P("e")),
        (P("e", "two"), P("e", None, "two"), P("e", "two"), P("e", None, "two")),
        (P(None, "two", "e"), P("e", "two"), P(None, "two"), P("e")),
        (P(None, ("e", "two")), P(None, None, ("e", "two")), P(), P()),
    ],
)
def test_explicit_axes_may_split_any_dimension(
    of_gate: Any, of_down: Any, left_of_gate: Any, left_of_down: Any, jitted: bool
) -> None:
    """The codes lie as the weights, but along dimensions whose blocks the split would cut."""
    weights = draw_weights(F32)
    names = ("e", "four" if "four" in str(of_gate) else "two")
    mesh = jax.make_mesh(
        (2, 4 if "four" in names else 2), names, axis_types=(AxisType.Explicit,) * 2
    )
    specs = (of_gate, of_gate, of_down)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(w, s) for w, s in zip(weights, specs, strict=True)]
        found = (quantize_experts if jitted else quantize_expert_weights)(*placed)
    for a, b in zip(
        jax.tree.leaves(found), jax.tree.leaves(quantize_experts(*weights)), strict=True
    ):
        assert_same_bits(a, np.asarray(b))
    left = (left_of_gate, left_of_gate, left_of_down)
    for matrix, spec in zip(found, left, strict=True):
        for a in (matrix.natural, matrix.scales):
            assert a.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 3), a.sharding


def test_the_pytree_is_its_arrays() -> None:
    found = quantize_experts(*draw_weights(F32))
    leaves = jax.tree.leaves(found)
    assert len(leaves) == NUM_ARRAYS and isinstance(found, QuantizedExperts)
    assert all(a is b for a, b in zip(jax.tree.leaves(from_arrays(leaves)), leaves, strict=True))
    shapes = [(str(a.dtype), a.shape) for a in leaves[:3]]
    assert shapes == [
        ("float8_e4m3fn", (2, 256, 384)),
        ("float8_e4m3fn", (2, 384, 256)),
        ("float32", (2, 2, 3)),
    ]


def test_no_gradient_passes() -> None:
    def through(*weights: Any) -> Any:
        return sum(jnp.sum(dequantize(matrix)) for matrix in quantize_expert_weights(*weights))

    gradients = jax.grad(through, argnums=(0, 1, 2))(*map(jnp.asarray, draw_weights(F32)))
    assert not any(np.any(g) for g in gradients)
