"""What `tests/golden/make_router_golden.py` writes, and how `route` is held to it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import RouterConfig, presets, route

MAKER = Path(__file__).parent / "golden" / "make_router_golden.py"
GOLDEN = MAKER.with_name("router.npz")
CASES = (
    "qwen3_moe",
    "qwen3_moe_raw",
    "mixtral",
    "deepseek_v3",
    "deepseek_v3_negative",
    "deepseek_v3_raw",
    "deepseek_v3_one_group",
    "gpt_oss",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One router of transformers: the fields of its config, and its arrays by name."""

    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]


def read(path: Path) -> tuple[dict[str, str], dict[str, Case]]:
    """The versions that made a file, and its cases by name."""
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        arrays = {key: file[key] for key in file if key != "about"}
    cases = {}
    for name, fields in about["configs"].items():
        own = {k.removeprefix(f"{name}/"): a for k, a in arrays.items() if k.startswith(f"{name}/")}
        cases[name] = Case(fields, own)
    return about["versions"], cases


def from_hugging_face(fields: dict[str, Any]) -> RouterConfig:
    """The config that docs/routing.md gives for the fields of a Hugging Face config."""
    match fields["model_type"]:
        case "qwen3_moe":
            return dataclasses.replace(presets.QWEN3_MOE, renormalize=fields["norm_topk_prob"])
        case "mixtral":
            return presets.MIXTRAL
        case "deepseek_v3":
            return dataclasses.replace(
                presets.DEEPSEEK_V3,
                renormalize=fields["norm_topk_prob"],
                scale=fields["routed_scaling_factor"],
                num_groups=fields["n_group"],
                num_chosen_groups=fields["topk_group"],
            )
        case "gpt_oss":
            return presets.GPT_OSS
        case other:
            raise ValueError(other)


def check(case: Case) -> None:
    """Asserts that `route` chooses the same experts, and gives the same weights and losses."""
    config, num_choices = from_hugging_face(case.fields), case.fields["num_experts_per_tok"]
    given = {key: jnp.asarray(value) for key, value in case.arrays.items()}
    logits = jnp.matmul(given["x"], given["weight"].T, precision=jax.lax.Precision.HIGHEST)
    assert config.linear_bias == ("bias" in given)
    if config.linear_bias:
        logits += given["bias"][None]
    selection_bias = given.get("selection_bias")

    routing = jax.jit(lambda x: route(x, num_choices, config, selection_bias=selection_bias))(
        logits
    )
    expert_idx, expert_weight = case.arrays["expert_idx"], case.arrays["expert_weight"]
    found_idx, found_weight = np.asarray(routing.expert_idx), np.asarray(routing.expert_weight)
    if case.fields["model_type"] == "deepseek_v3":  # its top-k is not sorted
        expert_idx, expert_weight = by_id(expert_idx, expert_weight)
        found_idx, found_weight = by_id(found_idx, found_weight)
    np.testing.assert_array_equal(found_idx, expert_idx)
    np.testing.assert_allclose(found_weight, expert_weight, rtol=0, atol=1e-6)
    if "load_balance_loss" in given:
        check_losses(logits, num_choices, config, case)


def check_losses(logits: jax.Array, num_choices: int, config: RouterConfig, case: Case) -> None:
    """With all tokens, and with the last third masked."""
    mask = jnp.arange(len(logits)) < len(logits) * 2 // 3
    for name, tokens in (("load_balance_loss", None), ("masked_load_balance_loss", mask)):
        loss = route(logits, num_choices, config, mask=tokens).load_balance_loss
        np.testing.assert_allclose(loss, case.arrays[name], rtol=1e-6)


def by_id(expert_idx: np.ndarray, expert_weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both [T, K], each token's choices in the order of their ids."""
    order = np.argsort(expert_idx, axis=-1)
    return (
        np.take_along_axis(expert_idx, order, axis=-1),
        np.take_along_axis(expert_weight, order, axis=-1),
    )
