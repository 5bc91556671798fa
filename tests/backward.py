"""The CUDA backward as the GPU tests call it: compiled functions and an unfused layer beside it."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import _ffi
from jax_megamoe.config import (
    TILE_ROWS,
    WAIT_DEADLINE_S,
    ClampedSwiGLU,
    Dims,
    MegaMoEConfig,
)
from jax_megamoe.plan import backward_steps, make_plan
from tests import cases, compare
from tests.cases import BF16, Batch, Results
from tests.forward import dims_of
from tests.gated import Biases

NAMES = Results._fields[1:]
# Of the waits inside a kernel; a process whose kernels may wait in vain has a shorter one.
DEADLINE_S = float(os.environ.get("JAX_MEGAMOE_DEADLINE_S", WAIT_DEADLINE_S))


@functools.partial(
    jax.jit,
    static_argnames=("dims", "activation", "launches", "trainable", "trace", "deadline_s"),
)
def launched(
    *arrays: Any,
    dims: Dims,
    activation: str | ClampedSwiGLU = "swiglu",
    gate_up: Any = None,
    launches: tuple[int, ...] = _ffi.BACKWARD_FUSED,
    trainable: bool = True,
    trace: bool = False,
    deadline_s: float = DEADLINE_S,
) -> Any:
    """The gradients, dw in float32, of dy, x, expert_idx, expert_weight, the weights and perhaps
    biases.

    gate_up: what `keeping` kept; None: g and u are computed again.
    """
    return _ffi.backward_call(
        *arrays,
        dims=dims,
        config=MegaMoEConfig(backend="cuda", activation=activation, trainable_experts=trainable),
        axis_name=None,
        gate_up=gate_up,
        launches=launches,
        deadline_s=deadline_s,
        trace=trace,
    )


@functools.partial(jax.jit, static_argnames=("dims", "activation", "launches"))
def keeping(
    *arrays: Any,
    dims: Dims,
    activation: str | ClampedSwiGLU = "swiglu",
    launches: tuple[int, ...] = _ffi.FUSED,
) -> Any:
    """y, counts and what save="gate_up" keeps, of x, expert_idx, expert_weight, the weights and
    perhaps biases."""
    config = MegaMoEConfig(backend="cuda", activation=activation, save="gate_up")
    how = {"config": config, "axis_name": None, "keep_gate_up": True, "launches": launches}
    return _ffi.forward_call(*arrays, dims=dims, **how)


def kept_gradients(*arrays: Any, dims: Dims, **options: Any) -> Any:
    """As `launched`, of g and u that the forward keeps."""
    _, _, gate_up = keeping(*arrays[1:], dims=dims)
    return launched(*arrays, gate_up=gate_up, dims=dims, **options)


def operands(batch: Batch, weight_dtype: Any = None) -> list[Any]:
    """The batch's arrays in the order of the backward call; the weights in `weight_dtype`.

    They are cast where they are and only copied: neither compiles a program.
    """
    x, ids, w, *weights, dy = batch
    weights = [a.astype(weight_dtype or a.dtype) for a in weights]
    return jax.device_put([dy, x, ids, w, *weights])


def gradients(batch: Batch, **options: Any) -> list[np.ndarray]:
    """What `launched` returns for the batch, as NumPy arrays."""
    return [np.asarray(a) for a in launched(*operands(batch), dims=dims_of(batch), **options)]


def assert_same(found: Any, want: Any) -> None:
    """The same bits in every gradient."""
    names = (*NAMES, "trace")
    for name, a, b in zip(names, found, want, strict=False):
        compare.assert_bitwise(a, b, name)
    assert len(found) == len(want)


def assert_whole_trace(records: Any, batch: Batch) -> None:
    """That of a backward with weight gradients: every item of every step, and rows and sums."""
    dims, steps = dims_of(batch), backward_steps(dims_of(batch))
    num_tiles = make_plan(batch.expert_idx[None], dims, 0, steps).expert_start[-1] // TILE_ROWS
    count, *_ = records[0]
    start, end, _, kind = records.view(np.uint32)[1 : 1 + count].T
    assert count < records.shape[0] and (end - start < 10**9).all()
    parts = (32, 64, 128, 256)  # see cuda/shared/part.h
    for step, part in zip(steps, parts, strict=True):
        tiles = num_tiles if step.tiles_m is None else dims.E * step.tiles_m
        assert (kind == part).sum() == tiles * step.tiles_n, step.name
    waits = {16 | part for part in parts}
    assert {1, 8, *parts} <= set(kind.tolist()) <= {1, 8, *parts} | waits


@jax.jit
def bits(gradients: Any) -> list[jax.Array]:
    """The gradients as unsigned integers, so that equal means equal bits."""
    unsigned = {2: jnp.uint16, 4: jnp.uint32}
    return [jax.lax.bitcast_convert_type(a, unsigned[a.dtype.itemsize]) for a in gradients]


@jax.jit
def num_that_differ(found: list[jax.Array], want: list[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(a != b, dtype=jnp.int32) for a, b in zip(found, want, strict=True)]


def num_values_that_differ(found: Any, want: Any) -> int:
    """Of all gradients together, judged where the arrays are."""
    return sum(int(n) for n in num_that_differ(bits(found), bits(want)))


def with_gate(batch: Batch, gate: int) -> Batch:
    """The batch with `gate` added to every pre-activation of the gate, roughly."""
    x, w_gate = batch.x.copy(), batch.w_gate.copy()
    x[:, 0] = 1
    w_gate[:, 0] = gate
    return batch._replace(x=x, w_gate=w_gate)


def sums_that_need_float32() -> dict[str, Batch]:
    """Oracle batches, exact with sums in float32, whose running sums in bf16 lose terms.

    dx: one token with w = 1 and then 2^-8 six times, all routes of one expert. dW: 200 rows of each
    of three experts, with w = 255/256; the sum of three blocks of 64 rows has ten digits.
    """
    weights = np.array([[1, *[2**-8] * 6, 0]])
    rows = np.resize(np.array([0, 1, 3], np.int32), (600, 1))
    how: dict[str, Any] = {"num_experts": 4, "hidden": 64, "intermediate": 64, "dtype": BF16}
    return {
        "dx": cases.oracle(np.zeros((1, 8), np.int32), weights, **how),
        "dW": cases.oracle(rows, 255 / 256, **how),
    }


def unfused_bf16(*arrays: Any) -> Any:
    """The five gradients of the layer as a few bf16 products and a float32 sum over the choices."""
    return unfused_bf16_of("swiglu", *arrays)


@functools.partial(jax.jit, static_argnums=0)
def unfused_bf16_of(activation: str | ClampedSwiGLU, *arrays: Any) -> Any:
    """The same of any activation, of the arrays of `biased` or without biases."""
    x, ids, w, *experts, dy = arrays

    def layer(x: Any, w: Any, *experts: Any) -> Any:
        w_gate, w_up, w_down, *biases = experts
        y = jnp.zeros(x.shape, jnp.float32)
        for e in range(w_gate.shape[0]):
            added = [b[e].astype(x.dtype)[None] for b in biases] or [0] * 3
            g, u = x @ w_gate[e] + added[0], x @ w_up[e] + added[1]
            o = (_unfused_unit(activation, g, u) @ w_down[e] + added[2]).astype(jnp.float32)
            y += jnp.sum(jnp.where(ids == e, w, 0), axis=1, keepdims=True) * o
        return y.astype(x.dtype)

    _, pull = jax.vjp(layer, x, w.astype(jnp.float32), *experts)
    return pull(dy)


def _unfused_unit(activation: str | ClampedSwiGLU, g: Any, u: Any) -> Any:
    if not isinstance(activation, str):
        g = jnp.where(g > activation.limit, activation.limit, g)
        u = jnp.where(abs(u) > activation.limit, jnp.sign(u) * activation.limit, u)
        return g * jax.nn.sigmoid(activation.alpha * g) * (u + 1)
    return {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}[activation](g) * u


def bias_errors_by_expert(found: Any, right: Biases) -> np.ndarray:
    """float64 [3, E]: the relative error of the gradient of each bias of each expert."""
    errors = []
    for a, b in zip(found, right, strict=True):
        a = np.asarray(a).astype(np.float64)
        errors.append(np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1))
    return np.array(errors)


def errors_by_expert(found: Any, right: Results, expert: np.ndarray) -> np.ndarray:
    """float64 [5, E]: the relative error of each gradient's share of each expert.

    Args:
      found: the five gradients. expert: [T], the one expert of each token.
    """
    num_experts = right.dw_gate.shape[0]
    errors = np.zeros((len(NAMES), num_experts))
    for i, (name, a) in enumerate(zip(NAMES, found, strict=True)):
        b = getattr(right, name)
        a = np.asarray(a).astype(np.float64)
        for e in range(num_experts):
            mine = expert == e if name in ("dx", "dw") else e
            norm = np.linalg.norm(b[mine])
            assert norm > 1e-2, f"{name} of expert {e} is next to nothing"
            errors[i, e] = np.linalg.norm(a[mine] - b[mine]) / norm
    return errors
