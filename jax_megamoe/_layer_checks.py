"""What the arguments of a Flax layer may be, and the words when they are something else."""

from typing import Any

import jax

from jax_megamoe._layer import Layer
from jax_megamoe._quantized_checks import check_fp8_kernels
from jax_megamoe._router_checks import check_router_config, warn_if_weights_are_constant
from jax_megamoe.config import INT32_MAX, MAX_CHOICES, MAX_EXPERTS
from jax_megamoe.validation import (
    check_axis_names,
    check_config,
    check_flag,
    check_float_dtype,
    check_groups,
    check_mesh,
    check_size,
    check_split,
    refuse,
)


def check_layer(layer: Layer, kernel_init: Any) -> None:
    """Judges the arguments of a module, before anything is drawn.

    Raises:
      TypeError, ValueError: as the modules say.

    Warns:
      UserWarning: K = 1 with weights that are the same for any logits.
    """
    _check_sizes(layer)
    choices = ("num_experts_per_token", layer.num_experts_per_token)
    check_router_config("router_config", layer.router_config, layer.num_experts, *choices)
    _check_shared(layer)
    check_config(layer.config)
    if layer.config.precision == "fp8_block":
        check_groups("hidden_size", H=layer.hidden_size)
        check_groups("intermediate_size", I=layer.intermediate_size)
    check_flag("expert_bias", layer.expert_bias)
    check_fp8_kernels(layer.config, expert_bias=layer.expert_bias)
    if layer.config.return_counts:
        refuse(
            ValueError,
            "config.return_counts",
            "True",
            "False; the second result of the layer always holds the load of each expert",
        )
    if layer.dtype is not None:
        check_float_dtype("dtype", layer.dtype)
    check_float_dtype("param_dtype", layer.param_dtype)
    if not callable(kernel_init):
        was = f"a {type(kernel_init).__name__}"
        refuse(TypeError, "kernel_init", was, "an initializer, called with (key, shape, dtype)")
    _check_axes(layer)
    warn_if_weights_are_constant(*choices, "router_config", layer.router_config)


def _check_sizes(layer: Layer) -> None:
    check_size("hidden_size", layer.hidden_size, INT32_MAX)
    check_size("intermediate_size", layer.intermediate_size, INT32_MAX)
    check_size("num_experts", layer.num_experts, MAX_EXPERTS)
    most = min(layer.num_experts, MAX_CHOICES)
    check_size("num_experts_per_token", layer.num_experts_per_token, most)


def _check_shared(layer: Layer) -> None:
    size = layer.shared_intermediate_size
    check_size("shared_intermediate_size", size, INT32_MAX, least=0)
    check_flag("shared_gate", layer.shared_gate)
    if layer.shared_gate and not size:
        refuse(
            ValueError,
            "shared_gate",
            "True with shared_intermediate_size = 0",
            "False there, since no shared expert is left to be gated",
        )


def _check_axes(layer: Layer) -> None:
    if layer.expert_axis is None:
        if layer.data_axes:
            refuse(
                ValueError,
                "data_axes",
                f"{layer.data_axes} without an expert_axis",
                "given beside an expert_axis, which may be a mesh axis of size 1",
            )
        return
    check_axis_names(layer.expert_axis, layer.data_axes)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        check_mesh(mesh, layer.expert_axis, layer.data_axes)
        check_split("num_experts", layer.num_experts, mesh, layer.expert_axis)
