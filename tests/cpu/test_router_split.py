"""The router on tokens that a mesh splits: the choices of one device, and no token is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_megamoe import RouterConfig, route

GROUPS = RouterConfig(scores="sigmoid", num_groups=4, num_chosen_groups=2)
# Ties, both zeros, both signs of NaN, what is no normal number.
LOGITS = np.random.default_rng(0).choice(
    np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, -np.nan, 3, 1e-45], np.float32), (4, 64, 16)
)
SPLIT = P(("data", "expert"))


@pytest.mark.parametrize("config", [RouterConfig(), GROUPS], ids=["all", "groups"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_each_device_chooses_for_its_own_tokens(axis_type: AxisType, config: RouterConfig) -> None:
    def choose(logits: jax.Array) -> jax.Array:
        return route(logits, 5, config).expert_idx

    expected = np.asarray(jax.jit(choose)(LOGITS))
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        logits = jax.device_put(LOGITS, NamedSharding(mesh, SPLIT))
        compiled = jax.jit(choose).lower(logits).compile()
        np.testing.assert_array_equal(compiled(logits), expected)
    text = compiled.as_text()
    assert text and "all-gather" not in text


def test_tokens_of_a_rank_are_chosen_for_as_elsewhere() -> None:
    """Inside of a shard_map, with axes left that XLA may split over, and without."""

    def choose(logits: jax.Array) -> jax.Array:
        return route(logits, 5).expert_idx

    expected = np.asarray(choose(jnp.asarray(LOGITS)))
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        for axes in ({"data"}, {"data", "expert"}):
            spec = P(tuple(sorted(axes)))
            run = jax.shard_map(choose, in_specs=spec, out_specs=spec, axis_names=axes)
            np.testing.assert_array_equal(jax.jit(run)(LOGITS), expected)
