"""What a call with precision="fp8_block" and its quantised weights may be, and the words when they
are something else.
"""

from typing import Any

import jax.numpy as jnp

from jax_megamoe.config import FP8_GROUP, MegaMoEConfig, lacking_in_fp8
from jax_megamoe.quantization import E4M3, QuantizedExperts, QuantizedMatrix
from jax_megamoe.validation import (
    check_array,
    check_groups,
    check_same_mesh,
    check_whole,
    refuse,
)

_NAME = "quantized_experts"


def check_fp8_kernels(config: MegaMoEConfig, *, expert_bias: bool = False) -> None:
    """Raises ValueError for what the kernels of "fp8_block" do not have, asked for by name."""
    if config.backend != "cuda" or config.precision != "fp8_block":
        return
    for what in lacking_in_fp8(activation=config.activation, expert_bias=expert_bias):
        refuse(
            ValueError,
            "precision",
            f"'fp8_block' with backend='cuda' and {what}",
            "'bf16' there; the kernels of 'fp8_block' take 'swiglu' and no biases, "
            "backend='reference' takes all",
        )


def check_quantized(
    quantized: Any, w_gate: Any, config: MegaMoEConfig, *, mesh: Any = None
) -> None:
    """Judges the quantised weights of a call, and whether its sizes can be quantised.

    Args:
      quantized: of the caller; None: the call quantises for itself.
      w_gate: [E/R, H, I], judged already.
      mesh: of the sharded entry; None: the arrays are what one device holds.

    Raises:
      TypeError: another type than `QuantizedExperts`, or an array of another dtype or none.
      ValueError: given with another precision, H or I that are no multiples of 128, or a shape,
        mesh or layout that does not fit.
    """
    if config.precision != "fp8_block":
        if quantized is not None:
            refuse(
                ValueError,
                _NAME,
                f"given with precision={config.precision!r}",
                "left out there; it goes with precision='fp8_block'",
            )
        return
    num_experts, H, I = w_gate.shape
    check_groups("x", H=H)
    check_groups("w_gate", I=I)
    if quantized is None:
        return
    if not isinstance(quantized, QuantizedExperts):
        may_be = "a QuantizedExperts, which quantize_expert_weights makes, or None"
        refuse(TypeError, _NAME, f"a {type(quantized).__name__}", may_be)
    sizes = {"w_gate": (num_experts, H, I), "w_up": (num_experts, H, I)}
    sizes["w_down"] = (num_experts, I, H)
    arrays: dict[str, Any] = {}
    for name, shape in sizes.items():
        arrays |= _checked_matrix(f"{_NAME}.{name}", getattr(quantized, name), shape)
    if mesh is None:
        check_whole(arrays)
    else:
        check_same_mesh(mesh, arrays)


def _checked_matrix(name: str, matrix: Any, shape: tuple[int, int, int]) -> dict[str, Any]:
    """The arrays of a matrix of the weights' `shape`, by their names."""
    if not isinstance(matrix, QuantizedMatrix):
        refuse(TypeError, name, f"a {type(matrix).__name__}", "a QuantizedMatrix")
    num_experts, rows, cols = shape
    blocks = (num_experts, rows // FP8_GROUP, cols // FP8_GROUP)
    wanted = {
        "natural": ("[E/R, M, N]", shape, E4M3),
        "transposed": ("[E/R, N, M]", (num_experts, cols, rows), E4M3),
        "scales": (f"[E/R, M/{FP8_GROUP}, N/{FP8_GROUP}]", blocks, jnp.float32),
    }
    arrays = {f"{name}.{field}": getattr(matrix, field) for field in wanted}
    for (argument, value), (letters, shape, dtype) in zip(
        arrays.items(), wanted.values(), strict=True
    ):
        check_array(argument, value)
        if value.dtype != (right := jnp.dtype(dtype)):
            refuse(TypeError, argument, f"of dtype {value.dtype}", f"of dtype {right}")
        if value.shape != shape:
            refuse(ValueError, argument, f"of shape {value.shape}", f"{letters} = {shape}")
    return arrays
