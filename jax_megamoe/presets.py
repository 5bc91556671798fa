"""Of published models: the routers, as configs for `route` and the modules, and an activation.

What routers leave to the caller: K; and, with `dataclasses.replace`, what checkpoints of one
architecture differ in. `docs/routing.md` has the fields of Hugging Face configs beside each.
"""

from jax_megamoe.config import ClampedSwiGLU, RouterConfig

# Softmax over all experts, the K highest, weights divided by their sum: `norm_topk_prob` of the
# published checkpoints is true, though it defaults to false in transformers.
QWEN3_MOE = RouterConfig(scores="softmax", scored="all", renormalize=True)

# The same for any router without jitter noise, which transformers adds to x in training where
# `router_jitter_noise` is not 0.
MIXTRAL = RouterConfig(scores="softmax", scored="all", renormalize=True)

# arXiv 2412.19437, section 2.1.2: sigmoid scores, 4 of 8 groups, the choice by score + bias, and
# weights from the unbiased scores.
DEEPSEEK_V3 = RouterConfig(
    scores="sigmoid",
    scored="all",
    renormalize=True,
    scale=2.5,
    num_groups=8,
    num_chosen_groups=4,
    selection_bias=True,
)

# The K highest logits of a linear map with a bias, and a softmax over these alone.
GPT_OSS = RouterConfig(scores="softmax", scored="chosen", renormalize=False, linear_bias=True)

# Of its experts, which have biases too: `MegaMoEConfig(activation=GPT_OSS_ACTIVATION)`, and
# `expert_bias=True` of the modules. The limit is `swiglu_limit` of its configs.
GPT_OSS_ACTIVATION = ClampedSwiGLU(alpha=1.702, limit=7.0)
