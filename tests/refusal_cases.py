"""Bad arguments of the op by name, and what each is refused with: the exception's type, and that
its message names the argument, what it was and what it may be. All calls are only traced, so a
refusal comes before any launch.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jax_megamoe import mega_moe, sharded_mega_moe
from jax_megamoe.config import MAX_SLOTS
from tests import cases, layer
from tests.cases import ROUTINGS
from tests.refusals import E, H, I, K, T, refusal, shaped, sizes, trace

NAMES = ("x", "expert_idx", "expert_weight", "w_gate", "w_up", "w_down")
IDS = ROUTINGS["distinct"](tokens=T, choices=K, experts=E)
GOOD: dict[str, Any] = dict(zip(NAMES, cases.normal(IDS, num_experts=E), strict=False))
# What is refused: changed arguments, exception, argument named, what it was, what it may be.
Refused = tuple[dict[str, Any], type[Exception], str, str, str]

ARRAY = r"a jax\.Array or a numpy\.ndarray"
FLOATS = "one of 'bfloat16', 'float32'"

SYMBOLIC: Any = jax.export.symbolic_shape("T")[0]


# Bad arguments of both entries.
BAD: dict[str, Refused] = {
    # What is no array.
    "x a list": ({"x": [[1.0] * H] * T}, TypeError, "x", "a list", ARRAY),
    "w_up None": ({"w_up": None}, TypeError, "w_up", "a NoneType", ARRAY),
    "expert_weight a float": ({"expert_weight": 1.0}, TypeError, "expert_weight", "a float", ARRAY),
    "x a NumPy scalar": ({"x": np.float32(1)}, TypeError, "x", "a float32", ARRAY),
    "w_down a string": ({"w_down": "w_down"}, TypeError, "w_down", "a str", ARRAY),
    "x masked": ({"x": np.ma.ones((T, H), np.float32)}, TypeError, "x", "a MaskedArray", ARRAY),
    "x of symbolic shape": (
        sizes(T=SYMBOLIC),
        TypeError,
        "x",
        r"symbolic shape \(T, 32\)",
        "of static shape",
    ),
    # Dtypes.
    "x float16": ({"x": shaped(T, H, dtype=np.float16)}, TypeError, "x", "float16", FLOATS),
    "x float64": ({"x": np.ones((T, H))}, TypeError, "x", "float64", FLOATS),
    "x complex": ({"x": shaped(T, H, dtype=np.complex64)}, TypeError, "x", "complex64", FLOATS),
    "x int": ({"x": shaped(T, H, dtype=np.int32)}, TypeError, "x", "int32", FLOATS),
    "x object": ({"x": np.full((T, H), None)}, TypeError, "x", "object", FLOATS),
    "x other byte order": (
        {"x": np.ones((T, H), np.dtype(np.float32).newbyteorder())},
        TypeError,
        "x",
        "of dtype .f4",
        "byte order",
    ),
    "expert_weight float16": (
        {"expert_weight": shaped(T, K, dtype=np.float16)},
        TypeError,
        "expert_weight",
        "float16",
        FLOATS,
    ),
    "w_gate float8": (
        {"w_gate": shaped(E, H, I, dtype=jnp.float8_e4m3fn)},
        TypeError,
        "w_gate",
        "float8_e4m3fn",
        FLOATS,
    ),
    "w_gate int8": (
        {"w_gate": shaped(E, H, I, dtype=np.int8)},
        TypeError,
        "w_gate",
        "int8",
        FLOATS,
    ),
    "w_up of another dtype": (
        {"w_up": shaped(E, H, I, dtype=jnp.bfloat16)},
        TypeError,
        "w_up",
        "bfloat16",
        "w_gate's dtype float32",
    ),
    "w_down of another dtype": (
        {"w_down": shaped(E, I, H, dtype=jnp.bfloat16)},
        TypeError,
        "w_down",
        "bfloat16",
        "w_gate's dtype float32",
    ),
    "ids float32": (
        {"expert_idx": shaped(T, K)},
        TypeError,
        "expert_idx",
        "float32",
        "an integer dtype",
    ),
    "ids bool": (
        {"expert_idx": shaped(T, K, dtype=bool)},
        TypeError,
        "expert_idx",
        "bool",
        "an integer dtype",
    ),
    "ids int4": (
        {"expert_idx": shaped(T, K, dtype=jnp.int4)},
        TypeError,
        "expert_idx",
        "int4",
        "an integer dtype",
    ),
    "ids PRNG keys": (
        {"expert_idx": jax.random.split(jax.random.key(0), (T, K))},
        TypeError,
        "expert_idx",
        "key<fry>",
        "an integer dtype",
    ),
    "x PRNG keys": (
        {"x": jax.random.split(jax.random.key(0), (T, H))},
        TypeError,
        "x",
        "key<fry>",
        FLOATS,
    ),
    # Shapes.
    "x a scalar": ({"x": shaped()}, ValueError, "x", r"shape \(\)", r"\[\.\.\., H\]"),
    "x one token": (
        {"x": shaped(H), "expert_idx": shaped(K, dtype=np.int32), "expert_weight": shaped(K)},
        ValueError,
        "x",
        rf"shape \({H},\)",
        "at least one leading dimension",
    ),
    "ids of other tokens": (
        {"expert_idx": shaped(T + 1, K, dtype=np.int32)},
        ValueError,
        "expert_idx",
        r"\(9, 2\)",
        r"leading dimensions \(8,\) of x",
    ),
    "ids flat": (
        {"expert_idx": shaped(T * K, dtype=np.int32)},
        ValueError,
        "expert_idx",
        r"\(16,\)",
        r"\[\.\.\., K\]",
    ),
    "ids with other leading dimensions": (
        {"expert_idx": shaped(2, T // 2, K, dtype=np.int32)},
        ValueError,
        "expert_idx",
        r"\(2, 4, 2\)",
        r"leading dimensions \(8,\) of x",
    ),
    "weights of other tokens": (
        {"expert_weight": shaped(T - 1, K)},
        ValueError,
        "expert_weight",
        r"\(7, 2\)",
        r"leading dimensions \(8,\) of x",
    ),
    "weights of other choices": (
        {"expert_weight": shaped(T, K + 1)},
        ValueError,
        "expert_weight",
        r"\(8, 3\)",
        r"shape \(8, 2\) of expert_idx",
    ),
    "w_gate one expert": (
        {"w_gate": shaped(H, I)},
        ValueError,
        "w_gate",
        r"\(32, 16\)",
        r"\[E/R, H, I\]",
    ),
    "w_gate output before input": (
        {"w_gate": shaped(E, I, H), "w_up": shaped(E, I, H), "w_down": shaped(E, H, I)},
        ValueError,
        "w_gate",
        r"\(8, 16, 32\)",
        "H = 32, the last dimension of x",
    ),
    "w_up output before input": (
        {"w_up": shaped(E, I, H)},
        ValueError,
        "w_up",
        r"\(8, 16, 32\)",
        r"w_gate's shape \(8, 32, 16\)",
    ),
    "w_down output before input": (
        {"w_down": shaped(E, H, I)},
        ValueError,
        "w_down",
        r"\(8, 32, 16\)",
        r"\[E/R, I, H\] = \(8, 16, 32\)",
    ),
    "w_up of fewer experts": (
        {"w_up": shaped(E - 1, H, I)},
        ValueError,
        "w_up",
        r"\(7, 32, 16\)",
        r"w_gate's shape \(8, 32, 16\)",
    ),
    "gate and up in one": (
        {"w_gate": shaped(E, H, 2 * I)},
        ValueError,
        "w_up",
        r"\(8, 32, 16\)",
        r"w_gate's shape \(8, 32, 32\)",
    ),
    # Sizes.
    "K = 0": (sizes(K=0), ValueError, "expert_idx", "K = 0", r"K in 1\.\.32"),
    "K = 33": (sizes(K=33), ValueError, "expert_idx", "K = 33", r"K in 1\.\.32"),
    "E = 0": (sizes(E=0), ValueError, "w_gate", "E = 0", r"E in 1\.\.512"),
    "E = 520": (sizes(E=520), ValueError, "w_gate", "E = 520", r"E in 1\.\.512"),
    "H = 0": (sizes(H=0), ValueError, "x", "H = 0", r"H in 1\.\."),
    "I = 0": (sizes(I=0), ValueError, "w_gate", "I = 0", r"I in 1\.\."),
    "too many routes": (
        sizes(T=2**27, K=16),
        ValueError,
        "x",
        f"{2**31} routes",
        f"at most {MAX_SLOTS} routes over all ranks; split the batch",
    ),
    "H not a kernel's": (
        {**sizes(H=96, I=64), "backend": "cuda"},
        ValueError,
        "x",
        "H = 96 with backend='cuda'",
        "H a multiple of 64 there; backend='reference' takes any size",
    ),
    "I not a kernel's": (
        {**sizes(H=64, I=96), "backend": "cuda"},
        ValueError,
        "w_gate",
        "I = 96 with backend='cuda'",
        "I a multiple of 64 there; backend='reference' takes any size",
    ),
    # Options.
    "precision unknown": (
        {"precision": "fp8"},
        ValueError,
        "precision",
        "'fp8'",
        "one of 'bf16', 'float32'",
    ),
    "precision a dtype": (
        {"precision": jnp.bfloat16},
        TypeError,
        "precision",
        "bfloat16",
        "one of 'bf16', 'float32'",
    ),
    "precision unhashable": (
        {"precision": ["bf16"]},
        TypeError,
        "precision",
        r"\['bf16'\] \(list\)",
        "one of 'bf16', 'float32'",
    ),
    "activation unknown": (
        {"activation": "gelu"},
        ValueError,
        "activation",
        "'gelu'",
        "one of 'swiglu', 'geglu', or a ClampedSwiGLU",
    ),
    "activation a function": (
        {"activation": jax.nn.silu},
        TypeError,
        "activation",
        "silu",
        "one of 'swiglu', 'geglu', or a ClampedSwiGLU",
    ),
    "backend unknown": (
        {"backend": "tpu"},
        ValueError,
        "backend",
        "'tpu'",
        "one of 'auto', 'cuda', 'reference'",
    ),
    "backend None": ({"backend": None}, TypeError, "backend", "None", "one of 'auto', 'cuda'"),
    "save unknown": (
        {"save": "all"},
        ValueError,
        "save",
        "'all'",
        "one of 'none', 'gate_up'",
    ),
    "save a bool": (
        {"save": True},
        TypeError,
        "save",
        r"True \(bool\)",
        "one of 'none', 'gate_up'",
    ),
    "combine_dtype unknown": (
        {"combine_dtype": "bf16"},
        ValueError,
        "combine_dtype",
        "'bf16'",
        "one of 'float32', 'bfloat16'",
    ),
    "combine_dtype a dtype": (
        {"combine_dtype": jnp.bfloat16},
        TypeError,
        "combine_dtype",
        "bfloat16",
        "one of 'float32', 'bfloat16'",
    ),
    "bfloat16 sums of float32": (
        {"combine_dtype": "bfloat16", "precision": "float32"},
        ValueError,
        "combine_dtype",
        "'bfloat16' with precision='float32'",
        "'float32' there, .* 'bfloat16' goes with precision='bf16'",
    ),
    **{
        f"pool_factor {value}": (
            {"pool_factor": value},
            error,
            "pool_factor",
            re.escape(repr(value)),
            "a finite number of at least 1, static",
        )
        for value, error in (
            (0.999, ValueError),
            (-2.0, ValueError),
            (math.nan, ValueError),
            (math.inf, ValueError),
            (10**400, ValueError),
            (True, TypeError),
            ("2", TypeError),
            (None, TypeError),
        )
    },
    "pool_factor traced": (
        {"pool_factor": shaped(dtype=np.float32)},
        TypeError,
        "pool_factor",
        "Tracer",
        "a finite number of at least 1, static",
    ),
    "float32 on the kernels": (
        {**sizes(H=64, I=64), "backend": "cuda", "precision": "float32"},
        ValueError,
        "precision",
        "'float32' with backend='cuda'",
        "one of 'bf16', 'fp8_block' there; 'float32' exists with backend='reference' only",
    ),
    "trainable_experts a number": (
        {"trainable_experts": 0},
        TypeError,
        "trainable_experts",
        r"0 \(int\)",
        "True or False, static",
    ),
    "return_counts a NumPy bool": (
        {"return_counts": np.True_},
        TypeError,
        "return_counts",
        "True",
        "True or False, static",
    ),
    "debug_checks traced": (
        {"debug_checks": shaped(dtype=bool)},
        TypeError,
        "debug_checks",
        "Tracer",
        "True or False, static",
    ),
}


def refuse(bad: str, entry: str = "mega_moe") -> str:
    """Asks one of BAD of an entry; returns the text of the refusal, or raises AssertionError."""
    change, error, argument, was, may_be = BAD[bad]
    call = {
        "mega_moe": mega_moe,
        "sharded_mega_moe": functools.partial(
            sharded_mega_moe, expert_axis="expert", mesh=layer.expert_mesh(1)
        ),
    }[entry]
    with refusal(error, argument, was, may_be) as found:
        trace(call, {**sizes(), **change})
    return str(found.value)
