"""Qwen3-MoE as a model: what its options leave as it is, who sees whom, and where it lies."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_megamoe import MegaMoEConfig
from jax_megamoe.models import qwen3_moe, qwen3_weights
from jax_megamoe.models.qwen3_layers import Place, sums_of_linear
from jax_megamoe.models.qwen3_moe import QWEN3_30B_A3B, QWEN3_235B_A22B, Qwen3Moe
from jax_megamoe.nnx import MegaMoE
from tests import qwen3_golden
from tests.golden import qwen3_tensors
from tests.modules import assert_bitwise, assert_close
from tests.qwen3_golden import make_model

TOKENS = jnp.asarray(qwen3_tensors.batch("published")[0])
VOCABULARY = qwen3_tensors.CASES["published"]["vocab_size"]
NUM_LAYERS, NUM_CHOICES = 2, 4
# float32 sums that a compiler orders in another way.
ROUNDING = 1e-5
SPLIT = {"expert_axis": "expert", "data_axes": ("data",)}


def loss(model: Qwen3Moe, tokens: jax.Array, segment_ids: jax.Array | None = None) -> Any:
    logits, aux = model(tokens, segment_ids)
    each = jnp.sin(logits).mean(-1)
    if segment_ids is not None:
        each *= (segment_ids != 0).astype(jnp.float32)
    return each.mean() + 0.1 * aux.load_balance_loss.mean(), (logits, aux)


graded = nnx.jit(nnx.value_and_grad(loss, has_aux=True))


def plain(found: Any) -> Any:
    """What `graded` returned, the gradients without the metadata of their variables."""
    return jax.device_get((found[0], nnx.to_pure_dict(found[1])))


@pytest.fixture(scope="module")
def published() -> Qwen3Moe:
    return make_model("published")


@pytest.fixture(scope="module")
def found(published: Qwen3Moe) -> Any:
    return plain(graded(published, TOKENS))


def test_a_scan_gives_the_bits_of_a_loop(found: Any) -> None:
    """Of gradients up to rounding: XLA fuses their sums otherwise in either."""
    loop = plain(graded(make_model("published", scan=False), TOKENS))
    assert_bitwise(loop[0], found[0])
    assert_close(loop[1], found[1], ROUNDING)


def test_remat_changes_memory_alone(found: Any) -> None:
    kept = plain(graded(make_model("published", remat=False), TOKENS))
    assert_bitwise(kept[0][1][0], found[0][1][0])
    assert_close(kept, found, ROUNDING)


@pytest.mark.parametrize("scan", [True, False])
def test_the_policy_decides_what_is_kept(scan: bool) -> None:
    asked = []

    def everything(primitive: Any, *args: Any, **params: Any) -> bool:
        asked.append(primitive.name)
        return True

    model = make_model("published", scan=scan, remat_policy=everything)
    nnx.eval_shape(nnx.value_and_grad(loss, has_aux=True), model, TOKENS)
    assert "dot_general" in asked


def test_runs_of_both_kinds_in_order() -> None:
    """Scanned, where `test_qwen3_golden.py` has each layer by itself."""
    model = make_model("mixed_layers")
    assert [run.attention_norm.shape[0] for run in model.runs] == [3, 1]
    tokens, is_real = qwen3_tensors.batch("mixed_layers")
    logits, aux = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens))
    expected = qwen3_golden.read(qwen3_golden.GOLDEN)[1]["mixed_layers"].arrays["logits"]
    assert_close(logits[is_real], expected[is_real], qwen3_golden.TOLERANCE)
    assert aux.load.shape == (1, 16)


@pytest.mark.parametrize("name", ["published", "other_choices"])
def test_each_parameter_has_a_gradient(name: str) -> None:
    (_, (_, aux)), gradients = graded(make_model(name), TOKENS)
    parts = nnx.to_flat_state(gradients)
    assert {path[-1] for path, _ in parts} >= {"query_norm", "router", "w_down", "embedding"}
    for path, gradient in parts:
        value = np.asarray(gradient[...])
        # Of a run the first dimension is the layer, of experts the second is the expert.
        kept = 0 if path[0] != "runs" else 2 if value.ndim == 4 else 1
        size = np.abs(value).max(axis=tuple(range(kept, value.ndim)))
        expected = np.asarray(aux.load) > 0 if kept == 2 else True
        assert np.isfinite(value).all() and ((size > 0) == expected).all(), path
    assert (np.asarray(aux.load) > 0).mean() > 0.9


def test_the_config_decides_which_parameters_there_are(published: Qwen3Moe) -> None:
    names = {path[-1] for path, _ in nnx.to_flat_state(nnx.state(make_model("other_choices")))}
    assert {"query_bias", "key_bias", "value_bias", "out_bias"} < names and "head" not in names
    names = {path[-1] for path, _ in nnx.to_flat_state(nnx.state(published))}
    assert "head" in names and "query_bias" not in names


def test_no_logit_sees_a_later_token(published: Qwen3Moe, found: Any) -> None:
    other = TOKENS.at[:, 7].set((TOKENS[:, 7] + 1) % VOCABULARY)
    logits, changed = found[0][1][0], plain(graded(published, other))[0][1][0]
    assert_bitwise(changed[:, :7], logits[:, :7])
    assert (np.abs(changed - logits)[:, 7:].max(-1) > 1e-3).all()


def packed(*rows: list[tuple[int, int]]) -> tuple[jax.Array, jax.Array]:
    """[8, 14] of rows, each of parts (row of TOKENS, how many tokens of it); row -1 is padding."""
    tokens, ids = np.zeros((8, 14), np.int32), np.zeros((8, 14), np.int32)
    for n, parts in enumerate(rows):
        start = 0
        for number, (source, length) in enumerate(parts, 1):
            if source >= 0:
                tokens[n, start : start + length] = TOKENS[source, :length]
                ids[n, start : start + length] = number
            start += length
        assert start == 14
    return jnp.asarray(tokens), jnp.asarray(ids)


def test_packed_sequences_are_those_by_themselves(published: Qwen3Moe, found: Any) -> None:
    """The first tokens of a row know nothing of the others, so they are a sequence too."""
    rows = [[(-1, 1), (0, 5), (1, 6), (-1, 2)], [(2, 4), (0, 3), (2, 7)], [(1, 14)]]
    (_, (logits, aux)), _ = plain(graded(published, *packed(*rows)))
    parts = []
    for n, row in enumerate(rows):
        start = 0
        for source, length in row:
            if source >= 0:
                expected = found[0][1][0][source, :length]
                assert_close(logits[n, start : start + length], expected, ROUNDING)
                parts.append([(source, length), (-1, 14 - length)])
            start += length
    (_, (_, alone)), _ = plain(graded(published, *packed(*parts)))
    np.testing.assert_array_equal(aux.load, alone.load)
    assert aux.load.sum() == NUM_LAYERS * NUM_CHOICES * 39


def test_positions_count_from_the_start_of_each_sequence() -> None:
    """Which no logit shows but by its rounding, since rotations see differences alone."""
    ids = jnp.asarray([[0, 0, 1, 1, 1, 3, 3, 0], [2, 2, 2, 2, 2, 2, 2, 1]])
    position = [[0, 1, 0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6, 0]]
    np.testing.assert_array_equal(Place(ids, ids).position, position)
    np.testing.assert_array_equal(Place(ids, None).position, [range(8)])


def test_an_id_that_comes_back_is_another_sequence(published: Qwen3Moe) -> None:
    tokens, ids = packed([(0, 4), (1, 4), (2, 6)])
    back = jnp.where(ids == 3, 1, ids)
    expected = plain(graded(published, tokens, ids))
    assert_bitwise(plain(graded(published, tokens, back)), expected)
    one = plain(graded(published, tokens, jnp.minimum(ids, 1)))[0][1][0]
    assert np.abs(one - expected[0][1][0])[0, 4:].max() > 0.1


def test_what_padding_holds_reaches_nothing(published: Qwen3Moe) -> None:
    tokens, ids = packed([(0, 9), (-1, 5)], [(-1, 3), (1, 11)], [(2, 14)])
    other = jnp.where(ids != 0, tokens, 7)
    expected, changed = (plain(graded(published, t, ids)) for t in (tokens, other))
    is_real = np.asarray(ids) != 0
    assert_bitwise(changed[0][1][0][is_real], expected[0][1][0][is_real])
    assert_bitwise((changed[0][0], changed[0][1][1]), (expected[0][0], expected[0][1][1]))
    assert_close(changed[1], expected[1], ROUNDING)
    assert np.isfinite(changed[0][1][0]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_and_their_gradients_are_products_in_the_dtype(dtype: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(k, (3, 5, n)) for k, n in zip(keys, (8, 16), strict=False))
    x, matrix = x.astype(dtype), jax.random.normal(keys[2], (8, 16))

    def pullback(of: Any) -> Any:
        return lambda x, matrix, dy: jax.vjp(of, x, matrix)[1](dy)

    def exact(x: Any, matrix: Any) -> Any:
        return jnp.matmul(x.astype(jnp.float32), matrix, precision="highest")

    def of_rounded(x: Any, matrix: Any) -> Any:
        return sums_of_linear(x, matrix, matrix.astype(x.dtype))

    found, right = (pullback(of)(x, matrix, dy) for of in (of_rounded, exact))
    assert [a.dtype for a in found] == [dtype, jnp.float32]
    # Sums of a few rounded products.
    tolerance = ROUNDING if dtype == jnp.float32 else 0.1
    found, right = (jax.tree.map(lambda a: a.astype(jnp.float32), g) for g in (found, right))
    assert_close(found, right, tolerance)
    program = jax.make_jaxpr(pullback(of_rounded))(x, matrix, dy)
    products = [e for e in program.eqns if e.primitive is jax.lax.dot_general_p]
    assert len(products) >= 2
    operands: list[Any] = [v.aval for e in products for v in e.invars]
    assert {aval.dtype for aval in operands} == {jnp.dtype(dtype)}


def test_logits_can_be_made_of_some_positions(published: Qwen3Moe, found: Any) -> None:
    hidden, aux = nnx.jit(lambda model: model.hidden(TOKENS))(published)
    assert_close(published.logits(hidden[:, 3:5]), found[0][1][0][:, 3:5], ROUNDING)
    assert_bitwise(jax.device_get(aux.load), found[0][1][1].load)


def test_bfloat16_is_the_dtype_of_the_layers_alone(found: Any) -> None:
    model = make_model("published", dtype=jnp.bfloat16)
    experts = model.runs[0].mlp
    assert isinstance(experts, MegaMoE) and experts.config == MegaMoEConfig()
    assert nnx.eval_shape(lambda m: m.hidden(TOKENS), model)[0].dtype == jnp.bfloat16
    (_, (logits, _)), gradients = graded(model, TOKENS)
    assert logits.dtype == jnp.float32
    leaves = jax.tree.leaves((nnx.state(model), gradients))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    # A token with two experts in a near tie may choose the other one: most do not.
    error = np.abs(np.asarray(logits) - found[0][1][0]).max(-1)
    assert np.median(error) < 0.1 and error.max() > 1e-4


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_experts_over_devices_change_nothing(axis_type: AxisType, published: Qwen3Moe) -> None:
    tokens, ids = packed([(0, 14)], [(1, 6), (2, 8)], [(2, 9), (-1, 5)], *[[(1, 14)]] * 5)
    expected = plain(graded(published, tokens, ids))
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        model = nnx.jit(lambda: Qwen3Moe(published.config, **SPLIT, rngs=nnx.Rngs(0)))()
        replicated, split = model.runs[0].attention.query, model.runs[0].mlp.w_gate
        for _ in ("as drawn", "as loaded"):
            assert replicated[...].sharding.is_fully_replicated
            assert split[...].sharding.shard_shape(split.shape) == (2, 4, *split.shape[2:])
            qwen3_weights.load_weights(model, qwen3_tensors.tensors("published"))
        rows = NamedSharding(mesh, P(("data", "expert")))
        found = plain(graded(model, *jax.device_put((tokens, ids), rows)))
    assert_bitwise(found[0][1][1].load, expected[0][1][1].load)
    assert_close(found, expected, ROUNDING)


@pytest.mark.parametrize(("config", "billions"), [(QWEN3_30B_A3B, 30.5), (QWEN3_235B_A22B, 235.1)])
def test_the_published_models_have_their_number_of_parameters(
    config: qwen3_moe.Qwen3MoeConfig, billions: float
) -> None:
    """As https://huggingface.co/Qwen counts them."""
    model = nnx.eval_shape(lambda: Qwen3Moe(config, rngs=nnx.Rngs(0)))
    assert len(model.runs) == 1
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert round(count / 1e9, 1) == billions


def test_a_published_model_with_fewer_layers() -> None:
    config = dataclasses.replace(QWEN3_30B_A3B, num_hidden_layers=2, vocab_size=1024)
    model = nnx.eval_shape(lambda: Qwen3Moe(config, rngs=nnx.Rngs(0)))
    assert model.runs[0].mlp.w_gate.shape == (2, 128, 2048, 768)
    logits, aux = nnx.eval_shape(lambda model: model(jnp.zeros((2, 8), int)), model)
    assert logits.shape == (2, 8, 1024) and aux.load.shape == (2, 128)


def test_first_values_have_the_range_of_the_config() -> None:
    config = qwen3_moe.from_hugging_face(qwen3_tensors.CASES["published"])
    config = dataclasses.replace(config, initializer_range=0.5)
    model = nnx.jit(lambda: Qwen3Moe(config, rngs=nnx.Rngs(0)))()
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = np.asarray(variable[...])
        if str(path[-1]).endswith("norm"):
            assert (value == 1).all(), path
        else:
            assert abs(value.std() - 0.5) < 0.05, path
    w_gate = np.asarray(model.runs[0].mlp.w_gate[...])
    assert not (w_gate[0] == w_gate[1]).any()
