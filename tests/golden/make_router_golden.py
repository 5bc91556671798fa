"""What the routers of `transformers` decide on random weights, as a file for the tests.

    python tests/golden/make_router_golden.py [--out PATH]

Needs torch and transformers, CPU builds suffice, and nothing of this project: any Python that has
them will do. The file holds, for each case, the fields of its Hugging Face config, x, the router's
parameters, and what the router made of them. `tests/router_golden.py` reads it.
"""

# pyright: reportMissingImports=false

import argparse
import json
import pathlib
import platform
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

PATH = pathlib.Path(__file__).with_name("router.npz")
NUM_TOKENS, HIDDEN = 48, 16
# Neighbours in the order of choice lie further apart than float32 sums differ between libraries.
LEAST_GAP = 1e-5

ROUTERS = {
    "qwen3_moe": qwen3_moe.Qwen3MoeTopKRouter,
    "mixtral": mixtral.MixtralTopKRouter,
    "deepseek_v3": deepseek_v3.DeepseekV3TopkRouter,
    "gpt_oss": gpt_oss.GptOssTopKRouter,
}
QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
DEEPSEEK_V3 = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
# Name -> model type, fields of its config, and the range of the selection bias.
CASES: dict[str, tuple[str, dict[str, Any], tuple[float, float] | None]] = {
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE, None),
    "qwen3_moe_raw": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": False}, None),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, None),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_V3, (-0.5, 0.5)),
    "deepseek_v3_negative": ("deepseek_v3", DEEPSEEK_V3, (-3.0, -2.0)),
    "deepseek_v3_raw": ("deepseek_v3", {**DEEPSEEK_V3, "norm_topk_prob": False}, (-0.1, 0.1)),
    "deepseek_v3_one_group": (
        "deepseek_v3",
        {**DEEPSEEK_V3, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        (-0.5, 0.5),
    ),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 32, "num_experts_per_tok": 4}, None),
}


def versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def run(name: str) -> dict[str, np.ndarray]:
    """The arrays of one case.

    Returns:
      x [T, H], weight [E, H], bias and selection_bias [E] where the router has them, expert_idx
      [T, K] and expert_weight [T, K], as the router orders them; load_balance_loss [] and, with the
      last third of the tokens masked, masked_load_balance_loss [], where the model has that loss.
    """
    model_type, fields, bias_range = CASES[name]
    config = transformers.AutoConfig.for_model(model_type, hidden_size=HIDDEN, **fields)
    rng = np.random.default_rng(list(CASES).index(name))
    router = ROUTERS[model_type](config).float()
    with torch.no_grad():
        router.weight.copy_(draw(rng, *router.weight.shape) * HIDDEN**-0.5)
        arrays = {"weight": router.weight}
        if hasattr(router, "bias"):
            router.bias.copy_(draw(rng, *router.bias.shape))
            arrays["bias"] = router.bias
        if bias_range:
            bias = torch.from_numpy(rng.uniform(*bias_range, config.num_local_experts))
            router.e_score_correction_bias.copy_(bias.float())
            arrays["selection_bias"] = router.e_score_correction_bias
        x = draw(rng, 2 * NUM_TOKENS, HIDDEN)
        x = x[is_clear(router, x, config)][:NUM_TOKENS]
        logits, expert_weight, expert_idx = router(x)
        arrays |= {"x": x, "expert_idx": expert_idx.int(), "expert_weight": expert_weight}
        if model_type != "deepseek_v3":
            arrays |= balance_losses(logits, config)
    assert len(x) == NUM_TOKENS
    return {key: value.detach().numpy() for key, value in arrays.items()}


def draw(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def is_clear(router: torch.nn.Module, x: torch.Tensor, config: Any) -> torch.Tensor:
    """bool [T]: no two experts, nor groups, of a token rank so close that rounding decides."""
    ranking = router(x)[0]
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        ranking = ranking.sigmoid() + bias
    clear = least_gap(ranking) > LEAST_GAP
    if getattr(config, "n_group", 1) > 1:
        two_highest = ranking.reshape(len(x), config.n_group, -1).topk(2, dim=-1)[0]
        clear &= least_gap(two_highest.sum(-1)) > LEAST_GAP
    return clear


def least_gap(ranking: torch.Tensor) -> torch.Tensor:
    return ranking.sort(dim=-1)[0].diff(dim=-1).min(dim=-1)[0]


def balance_losses(logits: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    def loss(mask: torch.Tensor | None) -> torch.Tensor:
        num_experts, num_choices = logits.shape[-1], config.num_experts_per_tok
        value = qwen3_moe.load_balancing_loss_func((logits,), num_experts, num_choices, mask)
        assert isinstance(value, torch.Tensor)
        return value

    mask = (torch.arange(len(logits)) < len(logits) * 2 // 3)[None]
    return {"load_balance_loss": loss(None), "masked_load_balance_loss": loss(mask)}


def make() -> dict[str, np.ndarray]:
    """All of the file: "case/array" of each, and `about`, JSON of versions and configs."""
    configs = {name: {"model_type": kind, **fields} for name, (kind, fields, _) in CASES.items()}
    about = json.dumps({"versions": versions(), "configs": configs})
    arrays = {f"{name}/{key}": value for name in CASES for key, value in run(name).items()}
    return {"about": np.array(about), **arrays}


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes what the routers of transformers decide.")
    parser.add_argument("--out", type=pathlib.Path, default=PATH, help="(beside this script)")
    path = parser.parse_args().out
    made = make()
    with path.open("wb") as file:
        np.savez_compressed(file, **made)  # pyright: ignore[reportArgumentType]
    print(f"{path.name}: {path.stat().st_size} bytes, {versions()}")


if __name__ == "__main__":
    main()
