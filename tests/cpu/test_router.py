"""The router against its definition in float64: choices, weights, gradients, ties, padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import RouterConfig, mega_moe, route
from jax_megamoe.router import limit_to_groups
from tests import cases
from tests.remat import ROUTING_POLICIES
from tests.routers import CONFIGS, E, bias_of, route_float64

RAW = RouterConfig(renormalize=False)


def random_logits(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_defined(routing, expected, rtol=2e-6):
    """Every field, up to the rounding of float32."""
    np.testing.assert_array_equal(routing.expert_idx, expected.expert_idx)
    np.testing.assert_array_equal(routing.load, expected.load)
    for name in ("expert_weight", "load_balance_loss", "sequence_balance_loss", "z_loss"):
        found, right = getattr(routing, name), getattr(expected, name)
        np.testing.assert_allclose(found, right, rtol=rtol, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_matches_the_definition(name, masked):
    config, bias = CONFIGS[name], bias_of(CONFIGS[name])
    logits = 2 * random_logits((3, 17, E), seed=len(name))
    mask = np.random.default_rng(1).random((3, 17)) < 0.6 if masked else None
    routing = jax.jit(lambda x, b, m: route(x, 3, config, selection_bias=b, mask=m))(
        logits, bias, mask
    )
    assert_defined(routing, route_float64(logits, 3, config, bias, mask))
    dtypes = [a.dtype for a in routing]
    assert dtypes == [jnp.int32, *[jnp.float32] * 4, jnp.int32]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "num_choices"), [(8, 2), (128, 8), (5, 5), (7, 1)])
def test_matches_the_definition_at_other_sizes(num_experts, num_choices, renormalize):
    config = RouterConfig(renormalize=renormalize and num_choices > 1)
    logits = random_logits((9, num_experts), seed=num_experts)
    assert_defined(route(logits, num_choices, config), route_float64(logits, num_choices, config))


def test_configs_differ_in_what_they_choose():
    """Else a fault of one of them could hide behind another's."""
    logits = 2 * random_logits((64, E))
    chosen = {
        name: np.asarray(route(logits, 3, config, selection_bias=bias_of(config)).expert_idx)
        for name, config in CONFIGS.items()
    }
    plain = chosen.pop("softmax")
    for name, idx in chosen.items():
        moves = CONFIGS[name].selection_bias or CONFIGS[name].num_groups > 1
        assert np.any(idx != plain) == moves, name
    assert np.any(chosen["chosen_bias_groups"] != chosen["deepseek"])


@pytest.mark.parametrize("name", CONFIGS)
def test_under_vmap_and_for_one_token(name):
    config, bias = CONFIGS[name], bias_of(CONFIGS[name])
    logits = random_logits((4, 6, E))
    each = [route(x, 3, config, selection_bias=bias) for x in logits]
    stacked = jax.tree.map(lambda *a: np.stack(a), *each)
    mapped = jax.vmap(lambda x: route(x, 3, config, selection_bias=bias))(logits)
    assert_defined(mapped, stacked, rtol=1e-6)
    alone = route(logits[0, 0], 3, config, selection_bias=bias, mask=jnp.array(True))
    row = route(logits[0, :1], 3, config, selection_bias=bias)
    assert_defined(alone, row._replace(expert_idx=row.expert_idx[0], expert_weight=row[1][0]))


@pytest.mark.parametrize(
    ("config", "right"),
    [(RouterConfig(), 1.2689414), (RAW, 1.0593262), (CONFIGS["softmax_chosen"], 1.2689414)],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_20_order_of_softmax_choice_and_renormalisation(config, right, dtype):
    """QwenLM/Qwen3 #687, huggingface/transformers #41151: another order, another model."""
    routing = route(jnp.array([[2, 1, 0, 0]], dtype), 2, config)
    y = np.sum(np.asarray(routing.expert_weight) * (np.asarray(routing.expert_idx) + 1))
    np.testing.assert_allclose(y, right, rtol=1e-6)
    assert routing.expert_weight.dtype == jnp.float32


def logit(probability):
    p = np.asarray(probability, np.float64)
    return np.log(p / (1 - p)).astype(np.float32)


def test_27_other_groups_do_not_beat_negative_scores():
    """huggingface/transformers #45440: 0 in the place of experts that may not be chosen."""
    config = RouterConfig(scores="sigmoid", renormalize=False, num_groups=2, selection_bias=True)
    logits = jnp.asarray(logit([[0.1, 0.2, 0.3, 0.4]]))
    bias = jnp.array([-0.5, -0.5, -0.9, -0.9], jnp.float32)  # sums of groups: -0.7, -1.1
    routing = route(logits, 2, config, selection_bias=bias)
    np.testing.assert_array_equal(routing.expert_idx, [[1, 0]])
    np.testing.assert_allclose(routing.expert_weight, [[0.2, 0.1]], rtol=1e-6)
    ranking = jnp.array([[-0.4, -0.3, 0.3, 0.4]])  # the report's; its group 0 is given
    limited = limit_to_groups(ranking, jnp.array([[1.0, 1.0, 0.0, 0.0]]), config)
    np.testing.assert_array_equal(limited, np.array([[-0.4, -0.3, -np.inf, -np.inf]], np.float32))


def test_experts_that_are_ruled_out_still_beat_other_groups():
    """A logit of -inf, or a bias of -inf, ranks last in its group and before all others."""
    config = RouterConfig(scores="sigmoid", renormalize=False, num_groups=2)
    logits = jnp.array([[-jnp.inf, 3.0, -jnp.inf, -9.0, -9.0, -9.0, -9.0, -9.0]])
    np.testing.assert_array_equal(route(logits, 4, config).expert_idx, [[1, 3, 0, 2]])
    biased = dataclasses.replace(config, selection_bias=True)
    bias = jnp.where(jnp.isinf(logits[0]), -jnp.inf, 0.0)
    idx = route(jnp.zeros((1, 8)).at[0, :4].set(3.0), 4, biased, selection_bias=bias).expert_idx
    np.testing.assert_array_equal(idx, [[1, 3, 0, 2]])


def test_28_the_scale_is_applied_once():
    """vllm-project/vllm PR #45037: a scaled shared expert, or routed experts scaled twice."""
    config = RouterConfig(scores="sigmoid", scale=2.5)
    logits = jnp.zeros((1, 8)).at[0, jnp.array([1, 3])].set(4.0)
    routing = route(logits, 2, config)
    np.testing.assert_array_equal(routing.expert_idx, [[1, 3]])
    batch = cases.oracle(np.asarray(routing.expert_idx), 0.5, num_experts=8)
    experts = (batch.w_gate, batch.w_up, batch.w_down)
    y = mega_moe(batch.x, routing.expert_idx, routing.expert_weight, *experts)
    shared_output = 1.0  # of an expert beside the routed ones, whose sum is (2 + 4) / 2
    np.testing.assert_array_equal(np.asarray(y) + shared_output, 8.5)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
def test_a_sigmoid_of_nan_is_chosen_whatever_its_sign(biased, groups, bits):
    """Alone it would be left out, or not, by how the sigmoid is computed: the sign says nothing."""
    config = RouterConfig(
        scores="sigmoid",
        num_groups=groups,
        renormalize=False,
        selection_bias=biased,
    )
    logits = np.array([[3, 2, 1, 0, -1, -2, -3, 0]], np.float32).repeat(2, axis=0)
    right = np.stack([logits[0, :2]] * 2)
    logits[0, 7:] = np.array([bits], np.uint32).view(np.float32)
    bias = jnp.zeros(8) if biased else None
    routing = route(jnp.asarray(logits), 2, config, selection_bias=bias)
    np.testing.assert_array_equal(routing.expert_idx, [[7, 0 if groups == 1 else 4], [0, 1]])
    assert np.isnan(routing.expert_weight[0, 0]) and np.isfinite(routing.expert_weight[0, 1])
    np.testing.assert_array_equal(routing.expert_weight[1], jax.nn.sigmoid(right[1]))


@pytest.mark.parametrize("name", ["softmax_bias", "sigmoid", "deepseek"])
def test_weights_that_vanish_are_no_nan(name):
    """All scores of a token below float32: its weights are 0, its gradients finite."""
    config, bias = CONFIGS[name], bias_of(CONFIGS[name])
    logits = jnp.full((1, E), -200.0)
    if config.scores == "softmax":
        logits = logits.at[0, int(np.argmin(np.asarray(bias)))].set(
            0.0
        )  # all but one, which is not chosen

    def weights(x):
        r = route(x, 3, config, selection_bias=bias)
        return jnp.sum(r.expert_weight * jnp.arange(3.0)[None]) + r.load_balance_loss, r

    gradient, routing = jax.grad(weights, has_aux=True)(logits)
    np.testing.assert_array_equal(routing.expert_weight, 0.0)
    assert np.isfinite(gradient).all() and np.isfinite(routing.load_balance_loss)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3e38])
def test_ties_go_to_the_lowest_id(value):
    logits = jnp.full((4, 9), value, jnp.float32).at[1, 4].set(-value)  # 0.0 and -0.0 tie too
    expected = np.tile(np.arange(3), (4, 1))
    if value != 0:
        expected[1] = [4, 0, 1] if value < 0 else [0, 1, 2]
    np.testing.assert_array_equal(jax.jit(lambda x: route(x, 3).expert_idx)(logits), expected)


@pytest.mark.parametrize("bias", [0.0, -0.0, -7.5])
def test_ties_of_biased_scores_and_groups_go_to_the_lowest_id(bias):
    config = CONFIGS["deepseek"]
    bias = jnp.full((E,), bias, jnp.float32).at[jnp.array([4, 5])].add(1.0)
    routing = jax.jit(lambda x, b: route(x, 4, config, selection_bias=b))(jnp.zeros((2, E)), bias)
    np.testing.assert_array_equal(routing.expert_idx, [[4, 5, 0, 1]] * 2)


def test_logits_that_the_softmax_rounds_together_keep_their_order():
    logits = jnp.array([[-200.0, -199.0, 0.0]], jnp.float32)  # both probabilities round to 0
    np.testing.assert_array_equal(route(logits, 2).expert_idx, [[2, 1]])


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_against_float64_differences(name):
    config, bias = CONFIGS[name], bias_of(CONFIGS[name])
    logits = np.asarray(2 * random_logits((2, 3, E), seed=3))
    mask = jnp.array([[True, True, False], [True, True, True]])
    cotangent = np.asarray(random_logits((2, 3, 3), seed=4))

    def total(r):
        losses = 0.3 * r.load_balance_loss + 0.2 * r.sequence_balance_loss + 0.1 * r.z_loss
        return (r.expert_weight * cotangent).sum() + losses

    def loss(x, b):
        return total(route(x, 3, config, selection_bias=b, mask=mask))

    def loss_float64(x):
        return total(route_float64(x, 3, config, bias, mask))

    step = 1e-6
    expected = np.zeros_like(logits, np.float64)
    for index in np.ndindex(*logits.shape):
        delta = np.zeros(logits.shape)
        delta[index] = step
        expected[index] = (loss_float64(logits + delta) - loss_float64(logits - delta)) / (2 * step)
    argnums = (0, 1) if config.selection_bias else (0,)
    gradients = jax.jit(jax.grad(loss, argnums))(logits, bias)
    np.testing.assert_allclose(gradients[0], expected, atol=2e-6)
    np.testing.assert_array_equal(gradients[0][0, 2], 0.0)
    for of_bias in gradients[1:]:
        np.testing.assert_array_equal(of_bias, 0.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_reaches_nothing(name):
    config, bias = CONFIGS[name], bias_of(CONFIGS[name])
    logits = random_logits((10, E))
    mask = jnp.arange(10) < 7
    dirty = np.where(np.asarray(mask)[:, None], logits, np.nan)

    def loss(x, m):
        r = route(x, 2, config, selection_bias=bias, mask=m)
        losses = r.load_balance_loss + r.sequence_balance_loss + r.z_loss
        return jnp.sum(r.expert_weight**2) + losses, r

    (_, padded), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.array(dirty), mask)
    (_, short), short_gradient = jax.value_and_grad(loss, has_aux=True)(logits[:7], None)
    np.testing.assert_array_equal(padded.expert_idx[7:], -1)
    np.testing.assert_array_equal(padded.expert_weight[7:], 0.0)
    np.testing.assert_array_equal(padded.expert_idx[:7], short.expert_idx)
    np.testing.assert_array_equal(padded.load, short.load)
    for found, expected in zip(padded[2:5], short[2:5], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(gradient[7:], 0.0)
    np.testing.assert_allclose(gradient[:7], short_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(0,), (4,), (0, 3), (3, 0), (2, 3)])
def test_without_a_token_everything_is_zero(shape):
    mask = jnp.zeros(shape, bool)

    def losses(x):
        r = route(x, 2, mask=mask)
        return r.load_balance_loss + r.sequence_balance_loss + r.z_loss

    values, gradient = jax.value_and_grad(losses)(jnp.ones((*shape, 5)))
    assert values == 0.0
    np.testing.assert_array_equal(gradient, 0.0)
    routing = route(jnp.ones((*shape, 5)), 2, mask=mask)
    np.testing.assert_array_equal(routing.load, 0)
    assert not np.isnan(np.array(route(jnp.ones((*shape, 5)), 2)[2:5])).any()


DEEPSEEK = RouterConfig(
    scores="sigmoid", scale=2.5, num_groups=4, num_chosen_groups=2, selection_bias=True
)


@pytest.mark.parametrize("config", [RouterConfig(), DEEPSEEK], ids=["softmax", "deepseek"])
@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_17_30_recomputed_ties_route_the_same(policy, config):
    """NVIDIA-NeMo/Automodel PR #2635: a recomputed router that breaks ties otherwise; and
    NVIDIA/Megatron-LM #1330: choices counted again when they are recomputed.

    Two identical router columns and repeated rows of x, T = 256, E = 8, K = 2.
    """
    bias = jnp.linspace(0, 0.01, 8).at[3].set(0.01 * 2 / 7) if config.selection_bias else None
    rng = np.random.default_rng(0)
    gate = rng.normal(size=(32, 8)).astype(np.float32)
    gate[:, 3] = gate[:, 2]
    x = np.repeat(rng.normal(size=(64, 32)), 4, axis=0).astype(np.float32)
    tables = jnp.asarray(rng.normal(size=(8, 32)), jnp.float32)

    def layer(gate, x):
        r = route(x @ gate, 2, config, selection_bias=bias)
        scale = jnp.sum(tables[r.expert_idx] * r.expert_weight[..., None], axis=-2)
        return x * jnp.tanh(scale), r

    def loss(layer):
        def f(gate, x):
            y, r = layer(gate, x)
            return jnp.sum(jnp.sin(y)) + r.load_balance_loss + r.z_loss, (r.expert_idx, r.load)

        return jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))

    plain = loss(layer)(gate, x)
    remat = loss(jax.checkpoint(layer, policy=policy))(gate, x)
    jax.tree.map(np.testing.assert_array_equal, plain, remat)
    (_, (ids, load)), _ = remat
    assert np.any(np.asarray(ids) == 2)
    ids, load = np.asarray(ids), np.asarray(load)
    np.testing.assert_array_equal(load, np.bincount(ids.ravel(), minlength=8))
    with_3 = (ids == 3).any(-1)
    np.testing.assert_array_equal((ids == 2).any(-1) | ~with_3, True)  # 3 never without 2
