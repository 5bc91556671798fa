"""The router against what the routers of transformers made of random weights, from a file."""

import dataclasses

import numpy as np
import pytest

from tests import router_golden

VERSIONS, GOLDEN = router_golden.read(router_golden.GOLDEN)


def test_the_file_says_what_made_it() -> None:
    assert set(VERSIONS) == {"torch", "transformers", "numpy", "python"}
    assert tuple(GOLDEN) == router_golden.CASES


@pytest.mark.parametrize("name", router_golden.CASES)
def test_routes_as_transformers_does(name: str) -> None:
    router_golden.check(GOLDEN[name])


def test_cases_reach_what_they_are_for() -> None:
    """Groups and biases change the choice, and biased scores fall below 0."""
    arrays = GOLDEN["deepseek_v3_negative"].arrays
    scores = 1 / (1 + np.exp(-arrays["x"] @ arrays["weight"].T))
    biased = scores + arrays["selection_bias"][None]
    assert biased.max() < 0
    chosen, _ = router_golden.by_id(arrays["expert_idx"], arrays["expert_weight"])
    for ranking in (scores, biased):
        ungrouped = np.sort(np.argsort(-ranking, axis=-1)[:, : chosen.shape[1]], axis=-1)
        assert np.any(chosen != ungrouped, axis=-1).mean() > 0.5


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3_moe", "norm_topk_prob", False),
        ("qwen3_moe_raw", "norm_topk_prob", True),
        ("mixtral", "num_experts_per_tok", 3),
        ("deepseek_v3", "n_group", 4),
        ("deepseek_v3", "topk_group", 5),
        ("deepseek_v3", "routed_scaling_factor", 1.0),
        ("deepseek_v3_raw", "norm_topk_prob", True),
    ],
)
def test_another_router_is_told_apart(name: str, field: str, value: float) -> None:
    case = GOLDEN[name]
    other = dataclasses.replace(case, fields={**case.fields, field: value})
    with pytest.raises(AssertionError):
        router_golden.check(other)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_another_bias_is_told_apart(name: str) -> None:
    case = GOLDEN[name]
    bias = "bias" if name == "gpt_oss" else "selection_bias"
    other = dataclasses.replace(case, arrays={**case.arrays, bias: 0 * case.arrays[bias]})
    with pytest.raises(AssertionError):
        router_golden.check(other)
