"""Refusals of precision="fp8_block" and of quantised weights, as in test_validation.py."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_megamoe import (
    ClampedSwiGLU,
    QuantizedExperts,
    QuantizedMatrix,
    mega_moe,
    quantize_expert_weights,
    sharded_mega_moe,
)
from tests import layer
from tests.refusals import E, refusal, shaped, sizes, trace

H, I = 128, 256
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
ARRAY = r"a jax\.Array or a numpy\.ndarray"
SHARDED = functools.partial(sharded_mega_moe, expert_axis="expert", mesh=layer.expert_mesh(1))
ENTRIES = pytest.mark.parametrize(
    "entry", [mega_moe, SHARDED], ids=["mega_moe", "sharded_mega_moe"]
)


def matrix_of(rows: int, cols: int, experts: int = E) -> QuantizedMatrix:
    """As shapes that are only traced."""
    return QuantizedMatrix(
        shaped(experts, rows, cols, dtype=E4M3),  # type: ignore[arg-type]
        shaped(experts, cols, rows, dtype=E4M3),  # type: ignore[arg-type]
        shaped(experts, rows // 128, cols // 128),  # type: ignore[arg-type]
    )


def quantized_of(H: int = H, I: int = I, experts: int = E) -> QuantizedExperts:
    return QuantizedExperts(
        matrix_of(H, I, experts), matrix_of(H, I, experts), matrix_of(I, H, experts)
    )


def with_array(matrix: str, field: str, value: Any) -> QuantizedExperts:
    quantized = quantized_of()
    changed = getattr(quantized, matrix)._replace(**{field: value})
    return quantized._replace(**{matrix: changed})


def call(entry: Any, quantized: Any, **change: Any) -> None:
    """Traces a good call but for what is changed."""
    arguments = {**sizes(H=H, I=I), "precision": "fp8_block", **change}
    leaves, structure = jax.tree.flatten(quantized)
    names = [f"leaf {i}" for i in range(len(leaves))]

    def run(**given: Any) -> Any:
        of_leaves = [given.pop(name) for name in names]
        return entry(**given, quantized_experts=jax.tree.unflatten(structure, of_leaves))

    trace(run, {**arguments, **dict(zip(names, leaves, strict=True))})


OTHER_SIZES = {"H": quantized_of(H=256), "I": quantized_of(I=128), "E": quantized_of(experts=4)}
# (quantised weights, changed arguments, exception, argument named, was, may be).
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str, str, str]] = {
    **{
        f"with precision {precision}": (
            quantized_of(),
            {"precision": precision},
            ValueError,
            "quantized_experts",
            f"given with precision='{precision}'",
            "left out there; it goes with precision='fp8_block'",
        )
        for precision in ("bf16", "float32")
    },
    **{
        f"{letter} = {size} with backend {backend}": (
            None,
            {**sizes(**{"H": H, "I": I, letter: size}), "backend": backend},
            ValueError,
            argument,
            f"of {letter} = {size} with precision='fp8_block'",
            f"of {letter} a multiple of 128 there; precision='bf16' takes any size",
        )
        for argument, letter, size in (("x", "H", 64), ("x", "H", 200), ("w_gate", "I", 192))
        for backend in ("auto", "cuda", "reference")
    },
    "H = 64, quantised by the caller": (
        quantized_of(),
        sizes(H=64, I=I),
        ValueError,
        "x",
        "of H = 64 with precision='fp8_block'",
        "a multiple of 128",
    ),
    "a tuple": (
        tuple(quantized_of()),
        {},
        TypeError,
        "quantized_experts",
        "a tuple",
        "a QuantizedExperts, which quantize_expert_weights makes, or None",
    ),
    "weights": (
        shaped(E, H, I, dtype=E4M3),
        {},
        TypeError,
        "quantized_experts",
        "a .*Tracer",
        "a QuantizedExperts",
    ),
    "a matrix that is a tuple": (
        quantized_of()._replace(w_up=tuple(matrix_of(H, I))),
        {},
        TypeError,
        r"quantized_experts\.w_up",
        "a tuple",
        "a QuantizedMatrix",
    ),
    "a matrix left out": (
        quantized_of()._replace(w_down=None),
        {},
        TypeError,
        r"quantized_experts\.w_down",
        "a NoneType",
        "a QuantizedMatrix",
    ),
    **{
        f"no {field}": (
            with_array("w_gate", field, None),
            {},
            TypeError,
            rf"quantized_experts\.w_gate\.{field}",
            "a NoneType",
            ARRAY,
        )
        for field in QuantizedMatrix._fields
    },
    **{
        f"{field} of {np.dtype(dtype)}": (
            with_array(
                "w_down", field, shaped(*getattr(matrix_of(I, H), field).shape, dtype=dtype)
            ),
            {},
            TypeError,
            rf"quantized_experts\.w_down\.{field}",
            f"of dtype {np.dtype(dtype)}",
            f"of dtype {right}",
        )
        for field, dtype, right in (
            ("natural", E5M2, "float8_e4m3fn"),
            ("transposed", E5M2, "float8_e4m3fn"),
            ("natural", jnp.bfloat16, "float8_e4m3fn"),
            ("transposed", np.uint8, "float8_e4m3fn"),
            ("scales", jnp.bfloat16, "float32"),
            ("scales", ml_dtypes.float8_e8m0fnu, "float32"),
        )
    },
    **{
        f"{field} of another shape": (
            with_array("w_gate", field, shaped(*shape, dtype=dtype)),
            {},
            ValueError,
            rf"quantized_experts\.w_gate\.{field}",
            re.escape(f"of shape {shape}"),
            re.escape(may_be),
        )
        for field, shape, dtype, may_be in (
            ("natural", (E, I, H), E4M3, f"[E/R, M, N] = {(E, H, I)}"),
            ("transposed", (E, H, I), E4M3, f"[E/R, N, M] = {(E, I, H)}"),
            ("scales", (E, 2, 1), np.float32, f"[E/R, M/128, N/128] = {(E, 1, 2)}"),
            ("scales", (E, H, I // 128), np.float32, f"[E/R, M/128, N/128] = {(E, 1, 2)}"),
        )
    },
    **{
        f"made for another {letter}": (
            quantized,
            {},
            ValueError,
            r"quantized_experts\.w_gate\.natural",
            "of shape",
            re.escape(f"[E/R, M, N] = {(E, H, I)}"),
        )
        for letter, quantized in OTHER_SIZES.items()
    },
    **{
        f"on the kernels with {what}": (
            quantized_of(),
            {"backend": "cuda", **change},
            ValueError,
            "precision",
            f"'fp8_block' with backend='cuda' and {what}",
            "'bf16' there; the kernels of 'fp8_block' take 'swiglu' and no biases, "
            "backend='reference' takes all",
        )
        for what, change in {
            "activation 'geglu'": {"activation": "geglu"},
            r"activation ClampedSwiGLU\(alpha=1.702, limit=7.0\)": {"activation": ClampedSwiGLU()},
            "biases": {
                "b_gate": shaped(E, I),
                "b_up": shaped(E, I),
                "b_down": shaped(E, H),
            },
        }.items()
    },
}


@ENTRIES
@pytest.mark.parametrize("bad", BAD)
def test_refuses(bad: str, entry: Any) -> None:
    quantized, change, error, argument, was, may_be = BAD[bad]
    with refusal(error, argument, was, may_be):
        call(entry, quantized, **change)


def test_experts_on_several_gpus_are_taken() -> None:
    entry = functools.partial(SHARDED, mesh=layer.expert_mesh(2))
    for backend in ("auto", "cuda"):
        call(entry, quantized_of(), backend=backend)


@ENTRIES
def test_good_arguments_of_these_tests_are_taken(entry: Any) -> None:
    """The cases above fail for the one thing they change."""
    for quantized in (quantized_of(), None):
        call(entry, quantized)
        call(entry, quantized, backend="cuda")
        call(entry, quantized, save="gate_up", combine_dtype="bfloat16")
    call(entry, None, precision="bf16")


def test_codes_that_are_sharded_over_explicit_axes_are_refused_by_the_op() -> None:
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Explicit,))
    arrays = {n: jnp.zeros(a.shape, a.dtype) for n, a in sizes(H=H, I=I).items()}
    quantized = quantize_expert_weights(*(arrays[n] for n in ("w_gate", "w_up", "w_down")))
    spec = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("expert"))
    moved = quantized.w_up._replace(scales=jax.device_put(quantized.w_up.scales, spec))
    op = layer.bind(precision="fp8_block", quantized_experts=quantized._replace(w_up=moved))
    name = r"quantized_experts\.w_up\.scales"
    with jax.set_mesh(mesh), refusal(ValueError, name, "sharded as", "use sharded_mega_moe"):
        op(**arrays)


def test_codes_on_another_explicit_mesh_are_refused() -> None:
    arrays = {n: jnp.zeros(a.shape, a.dtype) for n, a in sizes(H=H, I=I).items()}
    quantized = quantize_expert_weights(*(arrays[n] for n in ("w_gate", "w_up", "w_down")))
    explicit = {"axis_types": (jax.sharding.AxisType.Explicit,)}
    other, mesh = (jax.make_mesh((2,), (axis,), **explicit) for axis in ("other", "expert"))
    spec = jax.NamedSharding(other, jax.sharding.PartitionSpec("other"))
    moved = quantized.w_down._replace(natural=jax.device_put(quantized.w_down.natural, spec))
    given = {"precision": "fp8_block", "quantized_experts": quantized._replace(w_down=moved)}
    name = r"quantized_experts\.w_down\.natural"
    with (
        jax.set_mesh(mesh),
        refusal(ValueError, name, r"sharded as P.*'other'.* over the mesh", "jax.device_put"),
    ):
        sharded_mega_moe(**arrays, **given, expert_axis="expert")  # type: ignore[arg-type]


def weights(**change: Any) -> dict[str, Any]:
    whole = sizes(H=H, I=I)
    return {name: whole[name] for name in ("w_gate", "w_up", "w_down")} | change


@pytest.mark.parametrize(
    ("change", "error", "argument", "was", "may_be"),
    [
        ({"w_up": [0.0]}, TypeError, "w_up", "a list", ARRAY),
        (
            {"w_gate": shaped(E, H, I, dtype=np.float16)},
            TypeError,
            "w_gate",
            "float16",
            "one of 'bfloat16', 'float32'",
        ),
        (
            {"w_down": shaped(E, I, H, dtype=jnp.bfloat16)},
            TypeError,
            "w_down",
            "bfloat16",
            "of w_gate's dtype float32",
        ),
        ({"w_gate": shaped(H, I)}, ValueError, "w_gate", "of shape", r"\[E/R, H, I\]"),
        ({"w_up": shaped(E, I, H)}, ValueError, "w_up", "of shape", "of w_gate's shape"),
        ({"w_down": shaped(E, H, I)}, ValueError, "w_down", "of shape", r"\[E/R, I, H\] = "),
        (
            {**weights(), **{n: sizes(H=64, I=I)[n] for n in ("w_gate", "w_up", "w_down")}},
            ValueError,
            "w_gate",
            "of H = 64",
            "a multiple of 128",
        ),
        (
            {**weights(), **{n: sizes(H=H, I=100)[n] for n in ("w_gate", "w_up", "w_down")}},
            ValueError,
            "w_gate",
            "of I = 100",
            "a multiple of 128",
        ),
    ],
)
def test_the_quantiser_refuses(
    change: dict[str, Any], error: type[Exception], argument: str, was: str, may_be: str
) -> None:
    with refusal(error, argument, was, may_be):
        trace(quantize_expert_weights, weights(**change))


def test_the_quantiser_takes_what_these_tests_change() -> None:
    trace(quantize_expert_weights, weights())
