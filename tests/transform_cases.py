"""The op inside what JAX does to programs: the bits of a plain gradient, and the kernels that were
asked for, no more.

Each case makes a program of the gradients of an op, and one without JAX's transformation.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe.config import SAVES
from tests import compare, layer
from tests.cases import ROUTINGS, normal
from tests.lowering import COLLECTIVES, count, lower_for_cuda

T, K, E, H, I = 48, 4, 16, 128, 128
LAYERS = 3
POLICIES = jax.checkpoint_policies
# Of float32, whose sums XLA does not keep in more digits than they have.
IDS = ROUTINGS["invalid"](tokens=T, choices=K, experts=E)
BATCH = normal(IDS, num_experts=E, hidden=H, intermediate=I)
# x, expert_weight, w_gate, w_up, w_down.
FLOATS = (BATCH.x, *BATCH[2:6])
Op = Callable[..., Any]
Gradient = jax.stages.Wrapped  # of FLOATS: the gradients, in their order

argnums = tuple(range(len(FLOATS)))


def _loss(op: Op, *floats: Any) -> Any:
    return jnp.sum(jnp.square(op(*floats)) * BATCH.dy)


def _plain(op: Op) -> Gradient:
    return jax.jit(jax.grad(functools.partial(_loss, op), argnums))


def _value_and_grad_with_aux(op: Op) -> Gradient:
    def with_aux(*floats: Any) -> Any:
        y = op(*floats)
        return _loss(lambda *_: y), y

    run = jax.value_and_grad(with_aux, argnums, has_aux=True)
    return jax.jit(lambda *floats: run(*floats)[1])


def _nested_jit(op: Op) -> Gradient:
    return jax.jit(lambda *floats: _plain(jax.jit(op))(*floats))


def _vjp_of_the_user(op: Op) -> Gradient:
    @jax.custom_vjp
    def doubled(*floats: Any) -> Any:
        return op(*floats)

    def pull_back(pull: Any, dy: Any) -> Any:
        return pull(2 * dy)

    doubled.defvjp(lambda *floats: jax.vjp(op, *floats), pull_back)
    gradient = jax.grad(functools.partial(_loss, doubled), argnums)
    return jax.jit(lambda *floats: jax.tree.map(lambda g: g / 2, gradient(*floats)))


def _block(wrap: Callable[[Op], Op]) -> Callable[[Op], Gradient]:
    """The derivative of the block needs y, and that of the loss what the block returns."""
    return lambda op: _plain(wrap(lambda *floats: jnp.square(op(*floats))))


def _remat(policy: Any) -> Callable[[Op], Gradient]:
    return _block(functools.partial(jax.checkpoint, policy=policy))


def _cond(op: Op) -> Gradient:
    def branch(*floats: Any) -> Any:
        # Not known while compiling.
        return jax.lax.cond(floats[0][0, 0] < 1e30, op, lambda x, *_: x, *floats)

    return _plain(branch)


def _loop(op: Op) -> Gradient:
    def once(*floats: Any) -> Any:
        return jax.lax.fori_loop(0, 1, lambda _, x: op(x, *floats[1:]), floats[0])

    return _plain(once)


def _donation(op: Op) -> Gradient:
    """x is given away, and its gradient takes its place."""
    return jax.jit(jax.grad(functools.partial(_loss, op), argnums), donate_argnums=0)


def _stack(scanned: bool, body: Callable[[Op], Op]) -> Callable[[Op], Gradient]:
    """Of residual layers, all the same; pulls dy back: XLA rounds nothing between them."""

    def make(op: Op) -> Gradient:
        block = body(lambda x, *rest: x + op(x, *rest))

        def run(x: Any, *rest: Any) -> Any:
            if scanned:
                return jax.lax.scan(lambda x, _: (block(x, *rest), None), x, length=LAYERS)[0]
            return functools.reduce(lambda x, _: block(x, *rest), range(LAYERS), x)

        return jax.jit(lambda *floats: jax.vjp(run, *floats)[1](jnp.asarray(BATCH.dy)))

    return make


class Case(NamedTuple):
    """program: of an op, whose gradients are those of `right`. forward: the calls of the forward in
    a program for CUDA, with each of SAVES; the body of a loop counts once. Of the backward: 1."""

    program: Callable[[Op], Gradient]
    forward: tuple[int, int] = (1, 1)
    right: Callable[[Op], Gradient] = _plain


_as_it_is = lambda block: block  # noqa: E731
_blocks, _looped = _block(_as_it_is), _stack(False, _as_it_is)
CASES = {
    "jit": Case(_plain),
    "value_and_grad with aux": Case(_value_and_grad_with_aux),
    "nested jit": Case(_nested_jit),
    "a custom_vjp of the user": Case(_vjp_of_the_user),
    "remat, nothing saved": Case(_remat(POLICIES.nothing_saveable), (2, 2), _blocks),
    "remat, everything saved": Case(_remat(POLICIES.everything_saveable), right=_blocks),
    "remat, dots saved": Case(_remat(POLICIES.dots_saveable), (2, 2), _blocks),
    "cond": Case(_cond),
    "fori_loop": Case(_loop),
    "donation": Case(_donation),
    "scan": Case(_stack(True, _as_it_is), right=_looped),
    # y is used as it is: what is computed again, if it is to be kept, are g and u.
    "scan of remat": Case(_stack(True, jax.checkpoint), forward=(1, 2), right=_looped),
}


def _op(**options: Any) -> Op:
    bound = layer.bind(**options)
    return lambda x, *rest: bound(x, jnp.asarray(IDS), *rest)


def judge_lowered(name: str, save: str, precision: str = "bf16") -> None:
    """Raises AssertionError unless the program for CUDA has the calls that it should."""
    case = CASES[name]
    program = case.program(_op(backend="cuda", save=save, precision=precision))
    text = lower_for_cuda(program, *FLOATS)
    found = count(text)
    kernels = "_fp8" if precision == "fp8_block" else ""
    calls = {"forward": case.forward[SAVES.index(save)], "backward": 1}
    right = {f"{name}{kernels}": number for name, number in calls.items()}
    assert found == right, f"{name} with {save}: {found}"
    assert not any(collective in text for collective in COLLECTIVES)
    assert "has_side_effect" not in text, name


def judge_bits(name: str, **options: Any) -> None:
    """Raises AssertionError unless the gradients have the bits of those without the case."""
    case, op = CASES[name], _op(**options)
    right = case.right(op)(*FLOATS)
    # Copies: the host's memory cannot be given away.
    found = case.program(op)(*(jnp.array(a, copy=True) for a in FLOATS))
    for i, (a, b) in enumerate(zip(found, right, strict=True)):
        assert np.any(b), f"gradient {i} is nothing"
        compare.assert_bitwise(a, b, f"gradient {i} of {name}")


def checks(backend: str, precision: str = "bf16") -> dict[str, Callable[[], None]]:
    """Every case with each `save`, by its name."""

    def judge(name: str, save: str) -> None:
        judge_lowered(name, save, precision)
        judge_bits(name, backend=backend, save=save, precision=precision)

    return {
        f"{name}, save={save}": functools.partial(judge, name, save)
        for name in CASES
        for save in SAVES
    }
