"""What the arguments of `Qwen3Moe` may be, and the words when they are something else.

All of them raise TypeError or ValueError.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jax_megamoe.models.qwen3_config import Qwen3MoeConfig
from jax_megamoe.models.qwen3_layers import ATTENTIONS
from jax_megamoe.validation import check_array, check_choice, check_flag, check_float_dtype, refuse


def check_config(config: Any) -> None:
    if not isinstance(config, Qwen3MoeConfig):
        refuse(TypeError, "config", f"a {type(config).__name__}", "a Qwen3MoeConfig")


def check_computation(dtype: Any, attention: Any) -> None:
    check_float_dtype("dtype", dtype)
    check_choice("attention", attention, ATTENTIONS)
    if attention == "cudnn" and jnp.dtype(dtype) == jnp.float32:
        refuse(ValueError, "attention", "'cudnn' with float32", "'xla', or dtype bfloat16")


def check_scan(scan: Any, remat: Any, remat_policy: Any) -> None:
    check_flag("scan", scan)
    check_flag("remat", remat)
    if remat_policy is not None and not remat:
        refuse(ValueError, "remat_policy", "given with remat=False", "None there")


def check_rngs(rngs: Any) -> None:
    if not isinstance(rngs, nnx.Rngs):
        refuse(TypeError, "rngs", f"a {type(rngs).__name__}", "a flax.nnx.Rngs")


def check_tokens(tokens: Any, segment_ids: Any) -> None:
    for name, value in (("tokens", tokens), ("segment_ids", segment_ids)):
        if name == "segment_ids" and value is None:
            continue
        check_array(name, value)
        if not jnp.issubdtype(value.dtype, jnp.integer):
            refuse(TypeError, name, f"of dtype {value.dtype}", "of an integer dtype")
    if tokens.ndim != 2 or not tokens.size:
        refuse(ValueError, "tokens", f"of shape {tokens.shape}", "[B, S] with B and S at least 1")
    if segment_ids is not None and segment_ids.shape != tokens.shape:
        shape = f"of shape {tokens.shape}, as the tokens"
        refuse(ValueError, "segment_ids", f"of shape {segment_ids.shape}", shape)
