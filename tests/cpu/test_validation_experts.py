"""Refusals of activations and of the experts' biases, as in test_validation.py."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import ClampedSwiGLU, mega_moe, sharded_mega_moe
from tests import layer
from tests.refusals import E, H, I, refusal, shaped, sizes, trace, with_fields

BIASES = ("b_gate", "b_up", "b_down")


def biases_of(H: int = H, I: int = I) -> dict[str, Any]:
    """The biases, as shapes that are only traced."""
    return dict(zip(BIASES, (shaped(E, I), shaped(E, I), shaped(E, H)), strict=True))


ARRAY = r"a jax\.Array or a numpy\.ndarray"
SHARDED = functools.partial(sharded_mega_moe, expert_axis="expert", mesh=layer.expert_mesh(1))

# Bad arguments of both entries: (changed arguments, exception, argument named, was, may be).
BAD: dict[str, tuple[dict[str, Any], type[Exception], str, str, str]] = {
    **{
        f"activation {field} {value!r}": (
            {"activation": with_fields(ClampedSwiGLU(), **{field: value})},
            error,
            rf"activation\.{field}",
            re.escape(repr(value)),
            f"a Python number from {least} to 3.39e.38, static",
        )
        for field, least, values in (
            ("alpha", "-3.39e.38", (math.nan, -math.inf, 3.4e38, 1e39, True, "1", None)),
            (
                "limit",
                "1.18e-38",
                (math.nan, math.inf, 0.0, -7.0, 1e-40, 3.4e38, 10**400, False, [7.0]),
            ),
        )
        for value in values
        for error in [ValueError if type(value) in (int, float) else TypeError]
    },
    "activation.limit traced": (
        {"activation": with_fields(ClampedSwiGLU(), limit=jnp.float32(7))},
        TypeError,
        r"activation\.limit",
        "Array",
        "a Python number from",
    ),
    # Biases.
    **{
        f"{name} left out": (
            {**biases_of(), name: None},
            ValueError,
            name,
            "left out beside b_",
            "left out with all three only",
        )
        for name in BIASES
    },
    "b_up alone": ({"b_up": shaped(E, I)}, ValueError, "b_gate", "beside b_up", "all three"),
    "b_down a list": ({**biases_of(), "b_down": [0.0]}, TypeError, "b_down", "a list", ARRAY),
    "b_gate float16": (
        {**biases_of(), "b_gate": shaped(E, I, dtype=np.float16)},
        TypeError,
        "b_gate",
        "float16",
        "one of 'bfloat16', 'float32'",
    ),
    "b_down of another dtype": (
        {**biases_of(), "b_down": shaped(E, H, dtype=jnp.bfloat16)},
        TypeError,
        "b_down",
        "bfloat16",
        "of b_gate's dtype float32",
    ),
    **{
        f"{name} of shape {shape}": (
            {**biases_of(), name: shaped(*shape)},
            ValueError,
            name,
            re.escape(f"of shape {shape}"),
            re.escape(may_be),
        )
        for name, shape, may_be in (
            ("b_gate", (I,), f"[E/R, I] = {(E, I)}"),
            ("b_gate", (E, 2 * I), f"[E/R, I] = {(E, I)}"),
            ("b_up", (E, 1, I), f"[E/R, I] = {(E, I)}"),
            ("b_down", (E, I), f"[E/R, H] = {(E, H)}"),
            ("b_down", (E // 2, H), f"[E/R, H] = {(E, H)}"),
        )
    },
}


@pytest.mark.parametrize("entry", [mega_moe, SHARDED], ids=["mega_moe", "sharded_mega_moe"])
@pytest.mark.parametrize("bad", BAD)
def test_refuses(bad: str, entry: Any) -> None:
    change, error, argument, was, may_be = BAD[bad]
    with refusal(error, argument, was, may_be):
        trace(entry, {**sizes(), **change})


@pytest.mark.parametrize("entry", [mega_moe, SHARDED], ids=["mega_moe", "sharded_mega_moe"])
def test_good_arguments_of_these_tests_are_taken(entry: Any) -> None:
    """The cases above fail for the one thing they change."""
    bf16 = {name: shaped(*b.shape, dtype=jnp.bfloat16) for name, b in biases_of().items()}
    given: list[dict[str, Any]] = [{}, biases_of(), bf16, dict.fromkeys(BIASES)]
    for biases in given:
        for activation in ("swiglu", "geglu", ClampedSwiGLU(alpha=-1.0, limit=1.0)):
            trace(entry, {**sizes(), **biases, "activation": activation})


def test_a_bias_that_is_sharded_over_explicit_axes_is_refused_by_the_op() -> None:
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Explicit,))
    arrays = {n: jnp.zeros(a.shape, a.dtype) for n, a in {**sizes(), **biases_of()}.items()}
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))
    arrays["b_up"] = jax.device_put(arrays["b_up"], sharding)
    with jax.set_mesh(mesh), refusal(ValueError, "b_up", "sharded as", "use sharded_mega_moe"):
        layer.bind()(**arrays)
