"""The backward at every size: exact by the oracle, and fused equal to its parts bitwise."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import _ffi
from jax_megamoe.config import Dims
from tests import device_oracle
from tests.backward import kept_gradients, launched, num_values_that_differ
from tests.cases import BF16, F32, ROUTINGS
from tests.forward import one_rank
from tests.sizes import LARGE, MODELS, large_case

pytestmark = pytest.mark.gpu


def dims_for(ids: np.ndarray, *, experts: int, hidden: int, intermediate: int) -> Dims:
    return one_rank(T=ids.shape[0], K=ids.shape[1], E=experts, H=hidden, I=intermediate)


def check_oracle(
    ids: np.ndarray,
    *,
    run: Callable[..., Any] = launched,
    weight_dtype: np.dtype = BF16,
    experts: int,
    hidden: int,
    intermediate: int,
) -> None:
    """run: `launched`, or of what the forward keeps."""
    sizes = {"experts": experts, "hidden": hidden, "intermediate": intermediate}
    *tokens, w_gate, w_up, w_down = device_oracle.operands(ids, **sizes)
    weights = [w.astype(weight_dtype) for w in (w_gate, w_up, w_down)]
    dy = device_oracle.cotangent(ids.shape[0], hidden)
    found = run(dy, *tokens, *weights, dims=dims_for(ids, **sizes))
    assert device_oracle.gradients_wrong(found, ids, experts=experts) == {}


def check(ids: np.ndarray, *, experts: int, hidden: int, intermediate: int) -> None:
    """The oracle exactly; on irregular tokens and weights the fused kernel equals its parts."""
    check_oracle(ids, experts=experts, hidden=hidden, intermediate=intermediate)
    sizes = {"experts": experts, "hidden": hidden, "intermediate": intermediate}
    dims = dims_for(ids, **sizes)
    arrays = device_oracle.irregular(*device_oracle.operands(ids, **sizes))
    dy = jnp.flip(arrays[0], axis=0)
    unfused = launched(dy, *arrays, dims=dims, launches=_ffi.BACKWARD_UNFUSED)
    has_routes = bool(((ids >= 0) & (ids < experts)).any())
    assert all(bool(jnp.any(a != 0)) == has_routes for a in unfused)
    for _ in range(2):
        assert num_values_that_differ(launched(dy, *arrays, dims=dims), unfused) == 0


@pytest.mark.parametrize("choices", [1, 2, 7, 8, 9, 17, 32])
def test_choices(choices: int) -> None:
    ids = ROUTINGS["duplicates"](tokens=301, choices=choices, experts=40)
    check(ids, experts=40, hidden=128, intermediate=64)


@pytest.mark.parametrize("experts", [1, 2, 7, 100, 255, 257, 512])
def test_experts(experts: int) -> None:
    ids = ROUTINGS["distinct"](tokens=700, choices=min(experts, 8), experts=experts)
    check(ids, experts=experts, hidden=128, intermediate=64)


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("tokens", [1, 127, 4097])
def test_tokens(tokens: int, routing: str) -> None:
    ids = ROUTINGS[routing](tokens=tokens, choices=4, experts=32)
    check(ids, experts=32, hidden=128, intermediate=64)


# One expert's share of them all is too many rows for exact sums.
@pytest.mark.parametrize("routing", ["distinct", "invalid"])
@pytest.mark.parametrize("tokens", [65_537, 140_000])
def test_most_tokens(tokens: int, routing: str) -> None:
    ids = ROUTINGS[routing](tokens=tokens, choices=8, experts=64)
    check(ids, experts=64, hidden=256, intermediate=128)


@pytest.mark.parametrize(("hidden", "intermediate"), MODELS)
def test_sizes_of_known_models(hidden: int, intermediate: int) -> None:
    ids = ROUTINGS["distinct"](tokens=333, choices=2, experts=8)
    check(ids, experts=8, hidden=hidden, intermediate=intermediate)


def test_float32_gradients_of_a_known_model() -> None:
    ids = ROUTINGS["skewed"](tokens=1000, choices=8, experts=16)
    check_oracle(ids, weight_dtype=F32, experts=16, hidden=2048, intermediate=768)


@pytest.mark.parametrize("name", LARGE)
def test_offsets_beyond_32_bits(name: str) -> None:
    dims, ids = large_case(name)
    check_oracle(ids, experts=dims.E, hidden=dims.H, intermediate=dims.I)


@pytest.mark.parametrize("name", ["pool", "intermediates"])
def test_offsets_beyond_32_bits_of_what_is_kept(name: str) -> None:
    """g and u, which are rows of 2I columns."""
    dims, ids = large_case(name)
    check_oracle(ids, run=kept_gradients, experts=dims.E, hidden=dims.H, intermediate=dims.I)
