"""What the arguments of a router may be, and the words when they are something else."""

import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe.config import MAX_CHOICES, MAX_EXPERTS, SCORED, SCORES, RouterConfig
from jax_megamoe.validation import check_array, check_choice, check_flag, check_size, refuse

# A positive float32, with all its bits.
FLOAT32_LEAST = float(np.finfo(np.float32).tiny)
FLOAT32_MOST = float(np.finfo(np.float32).max)


def check_route(
    logits: Any,
    num_choices: Any,
    config: Any,
    selection_bias: Any,
    mask: Any,
    axis_name: Any,
) -> None:
    """Judges the arguments of `route`; raises TypeError or ValueError."""
    check_array("logits", logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        refuse(TypeError, "logits", f"of dtype {logits.dtype}", "of a floating dtype")
    if logits.ndim < 1:
        refuse(ValueError, "logits", f"of shape {logits.shape}", "[..., E]")
    num_experts = logits.shape[-1]
    if not 1 <= num_experts <= MAX_EXPERTS:
        refuse(ValueError, "logits", f"of E = {num_experts}", f"of E in 1..{MAX_EXPERTS}")
    check_size("num_choices", num_choices, min(num_experts, MAX_CHOICES))
    check_router_config("config", config, num_experts, "num_choices", num_choices)
    _check_selection_bias(selection_bias, config, num_experts)
    if mask is not None:
        check_mask(mask, logits.shape[:-1])
    if axis_name is not None:
        _check_axis_name(axis_name)


def check_router_config(
    argument: str, config: Any, num_experts: int, choices_argument: str, num_choices: int
) -> None:
    """Raises TypeError or ValueError for a field that is wrong, by itself or for E or K.

    Args:
      argument, choices_argument: what the caller calls the config and K.
    """
    if not isinstance(config, RouterConfig):
        refuse(TypeError, argument, f"a {type(config).__name__}", "a RouterConfig")
    check_choice(f"{argument}.scores", config.scores, SCORES)
    check_choice(f"{argument}.scored", config.scored, SCORED)
    for name in ("renormalize", "selection_bias", "linear_bias"):
        check_flag(f"{argument}.{name}", getattr(config, name))
    scale = config.scale
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        refuse(TypeError, f"{argument}.scale", f"{scale!r} ({type(scale).__name__})", "a float")
    if not FLOAT32_LEAST <= scale <= FLOAT32_MOST:
        refuse(ValueError, f"{argument}.scale", repr(scale), "finite and above 0, as a float32")
    check_size(f"{argument}.num_groups", config.num_groups, num_experts)
    check_size(f"{argument}.num_chosen_groups", config.num_chosen_groups, config.num_groups)
    is_split = num_experts % config.num_groups == 0
    if config.num_groups > 1 and not (is_split and num_experts >= 2 * config.num_groups):
        refuse(
            ValueError,
            f"{argument}.num_groups",
            f"{config.num_groups} with E = {num_experts} experts",
            "1, or a divisor of E that leaves each group two experts or more: groups are compared"
            " by the sum of their two highest scores",
        )
    num_eligible = num_experts // config.num_groups * config.num_chosen_groups
    if num_choices > num_eligible:
        refuse(
            ValueError,
            choices_argument,
            f"{num_choices} with {argument}.num_chosen_groups = {config.num_chosen_groups}",
            f"in 1..{num_eligible}, the number of experts in that many groups",
        )


def check_mask(mask: Any, token_shape: tuple[int, ...]) -> None:
    """Raises TypeError or ValueError unless `mask` is bool of the shape of the tokens."""
    check_array("mask", mask)
    if mask.dtype != jnp.bool_:
        refuse(TypeError, "mask", f"of dtype {mask.dtype}", "of dtype bool, True for real tokens")
    if mask.shape != token_shape:
        refuse(
            ValueError, "mask", f"of shape {mask.shape}", f"of shape {token_shape}, as the tokens"
        )


def check_bias(argument: str, bias: Any, num_experts: int) -> None:
    """Raises TypeError or ValueError unless `bias` is float32 [E]."""
    check_array(argument, bias)
    if bias.dtype != jnp.float32:
        refuse(
            TypeError,
            argument,
            f"of dtype {bias.dtype}",
            "of dtype float32; a step of its update is lost in fewer bits",
        )
    if bias.shape != (num_experts,):
        refuse(ValueError, argument, f"of shape {bias.shape}", f"of shape [E] = ({num_experts},)")


def check_update(bias: Any, load: Any, speed: Any) -> None:
    """Judges the arguments of `update_selection_bias`; raises TypeError or ValueError."""
    check_array("load", load)
    if not jnp.issubdtype(load.dtype, jnp.signedinteger):
        refuse(TypeError, "load", f"of dtype {load.dtype}", "of a signed integer dtype")
    if load.ndim != 1 or load.shape[0] < 1:
        refuse(ValueError, "load", f"of shape {load.shape}", "of shape [E]; one layer at a time")
    check_bias("bias", bias, load.shape[0])
    is_number = isinstance(speed, int | float) and not isinstance(speed, bool)
    is_scalar = isinstance(speed, jax.Array) and speed.shape == () and speed.dtype == jnp.float32
    if not (is_number or is_scalar):
        was = f"of type {type(speed).__name__}"
        refuse(TypeError, "speed", was, "a float, or a float32 jax.Array of shape ()")
    if is_number and not 0 <= speed <= FLOAT32_MOST:
        refuse(ValueError, "speed", repr(speed), "finite and at least 0, as a float32")


def warn_if_weights_are_constant(
    argument: str, num_choices: int, config_argument: str, config: RouterConfig
) -> None:
    """Warns, where the package was called, of a single choice with the same weight for any logits.

    Args:
      argument, config_argument: what the caller calls K and the config.
    """
    if num_choices > 1:
        return
    if config.renormalize:
        cause, remedy = "renormalize = True", "renormalize=False"
    elif (config.scores, config.scored) == ("softmax", "chosen"):
        cause, remedy = "scored = 'chosen' and a softmax", "scored='all' or scores='sigmoid'"
    else:
        return
    warnings.warn(
        f"{argument} = 1 with {cause} in {config_argument} makes every expert weight 1 before the"
        f" scale: the router gets no gradient through the experts. Pass {remedy}.",
        skip_file_prefixes=(os.path.dirname(__file__),),
    )


def _check_selection_bias(bias: Any, config: RouterConfig, num_experts: int) -> None:
    if config.selection_bias:
        if bias is None:
            refuse(
                ValueError,
                "selection_bias",
                "None with config.selection_bias = True",
                f"float32 of shape [E] = ({num_experts},), zeros at first",
            )
        check_bias("selection_bias", bias, num_experts)
    elif bias is not None:
        refuse(
            ValueError,
            "selection_bias",
            f"a {type(bias).__name__} with config.selection_bias = False",
            "None, or given with a config of selection_bias=True",
        )


def _check_axis_name(axis_name: Any) -> None:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        may_be = "the name of a mesh axis, a tuple of such names, or None"
        refuse(TypeError, "axis_name", repr(axis_name), may_be)
    if len(set(names)) != len(names):
        refuse(ValueError, "axis_name", repr(axis_name), "each axis once")
    try:
        jax.lax.axis_size(names)
    except NameError:
        refuse(
            ValueError,
            "axis_name",
            f"{axis_name!r}, which is not bound here",
            "axes of the enclosing jax.shard_map; on global arrays under jit None is over all"
            " tokens already",
        )
