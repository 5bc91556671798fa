"""The op inside what users build around it; gradients must come out bit for bit the same."""

import functools
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import cases, compare, layer, process
from tests.cases import BF16, F32, ROUTINGS

T, K, E = 32, 4, 16
IDS = ROUTINGS["invalid"](tokens=T, choices=K, experts=E)
BATCH = cases.normal(IDS, num_experts=E)
X, _, W, *WEIGHTS, DY = map(jnp.asarray, BATCH)
FLOATS = (X, W, *WEIGHTS)

float32 = layer.bind(precision="float32")


def op(x: Any, w: Any, *weights: Any) -> Any:
    return float32(x, IDS, w, *weights)


def loss(x: Any, w: Any, *weights: Any) -> Any:
    return jnp.sum(op(x, w, *weights) * DY)


@functools.cache
def right() -> cases.Results:
    return layer.run(BATCH, precision="float32")


def assert_right(gradients: Any, y: Any = None) -> None:
    y = right().y if y is None else y
    compare.assert_results_bitwise(cases.Results(y, *gradients), right())


grad = functools.partial(jax.grad, argnums=tuple(range(5)))


def test_value_and_grad_with_aux() -> None:
    def with_aux(*args: Any) -> Any:
        y = op(*args)
        return jnp.sum(y * DY), y

    f = jax.jit(jax.value_and_grad(with_aux, argnums=tuple(range(5)), has_aux=True))
    (_, y), gradients = f(*FLOATS)
    assert_right(gradients, y)


def test_inside_a_custom_vjp_of_the_user() -> None:
    @jax.custom_vjp
    def scaled(*args: Any) -> Any:
        return op(*args)

    def forward(*args: Any) -> Any:
        return jax.vjp(op, *args)

    scaled.defvjp(forward, lambda pull, dy: pull(2 * dy))
    gradients = jax.jit(grad(lambda *args: jnp.sum(scaled(*args) * DY)))(*FLOATS)
    assert_right(jax.tree.map(lambda g: g / 2, gradients))


def test_outside_jit() -> None:
    assert_right(grad(loss)(*FLOATS), op(*FLOATS))


def test_nested_jit() -> None:
    inner = jax.jit(op)
    outer = jax.jit(lambda *args: jnp.sum(jax.jit(inner)(*args) * DY))
    assert_right(jax.jit(grad(outer))(*FLOATS))


POLICIES = jax.checkpoint_policies


def nonlinear(*args: Any) -> Any:
    """Its derivative needs y, so that a recomputed y is used."""
    return jnp.tanh(op(*args))


@functools.cache
def gradients_of_nonlinear() -> Any:
    return jax.jit(grad(lambda *args: jnp.sum(nonlinear(*args) * DY)))(*FLOATS)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        POLICIES.nothing_saveable,
        POLICIES.everything_saveable,
        POLICIES.dots_saveable,
        POLICIES.save_only_these_names("moe"),
    ],
)
def test_remat(policy: Any) -> None:
    remat = jax.checkpoint(nonlinear, policy=policy)
    found = jax.jit(grad(lambda *args: jnp.sum(remat(*args) * DY)))(*FLOATS)
    for a, b in zip(found, gradients_of_nonlinear(), strict=True):
        compare.assert_bitwise(a, b)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers_equals_a_loop(remat: bool) -> None:
    stack = [jnp.stack([w, 0.5 * w, -w]) for w in WEIGHTS]

    def block(x: Any, weights: Any) -> Any:
        return x + op(x, W, *weights), None

    body = jax.checkpoint(block) if remat else block

    def scanned(x: Any, stack: Any) -> Any:
        return jnp.sum(jax.lax.scan(body, x, stack)[0] * DY)

    def looped(x: Any, stack: Any) -> Any:
        for i in range(3):
            x, _ = block(x, [w[i] for w in stack])
        return jnp.sum(x * DY)

    found, other = (jax.jit(jax.grad(f, argnums=(0, 1)))(X, stack) for f in (scanned, looped))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(other), strict=True):
        compare.assert_bitwise(a, b)


def test_cond_and_while_loop() -> None:
    def branch(flag: Any, *args: Any) -> Any:
        return jax.lax.cond(flag, op, lambda x, *_: x, *args)

    f = jax.jit(branch)
    compare.assert_bitwise(f(True, *FLOATS), right().y)
    compare.assert_bitwise(f(False, *FLOATS), BATCH.x)
    repeated = jax.jit(lambda x: jax.lax.fori_loop(0, 1, lambda i, x: op(x, *FLOATS[1:]), x))
    compare.assert_bitwise(repeated(X), right().y)


def test_ahead_of_time_compilation() -> None:
    compiled = jax.jit(grad(loss)).lower(*FLOATS).compile()
    assert_right(compiled(*FLOATS))


def test_leading_dimensions() -> None:
    """[2, 4, 4, H] is the same as [32, H]."""
    shape = (2, 4, 4, -1)
    batch = BATCH._replace(
        x=BATCH.x.reshape(shape),
        expert_idx=IDS.reshape(shape),
        expert_weight=BATCH.expert_weight.reshape(shape),
        dy=BATCH.dy.reshape(shape),
    )
    found = layer.run(batch, precision="float32")
    assert found.y.shape == found.dx.shape == (2, 4, 4, 32) and found.dw.shape == (2, 4, 4, 4)
    flat = {name: getattr(found, name).reshape(T, -1) for name in ("y", "dx", "dw")}
    compare.assert_results_bitwise(found._replace(**flat), right())


def test_two_configurations_in_one_program() -> None:
    def both(*args: Any) -> Any:
        return op(*args), layer.bind(precision="bf16")(args[0], IDS, *args[1:])

    first, second = jax.jit(both)(*FLOATS)
    compare.assert_bitwise(first, right().y)
    compare.assert_bitwise(second, layer.run(BATCH, precision="bf16").y)
    assert np.any(first != second)


def test_two_threads_at_once() -> None:
    """Each traces, compiles and runs its own function."""
    found: dict[int, Any] = {}

    def work(thread: int) -> None:
        found[thread] = jax.jit(lambda *args: grad(loss)(*args))(*FLOATS)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_right(found[0])
    assert_right(found[1])


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_frozen_experts_change_no_other_gradient(num_ranks: int | None) -> None:
    found = layer.run(BATCH, num_ranks, precision="float32", trainable_experts=False)
    zeros = (np.zeros_like(g) for g in right()[3:])
    compare.assert_results_bitwise(found, cases.Results(*right()[:3], *zeros))


@pytest.mark.parametrize("weights", [BF16, F32], ids=["bf16_weights", "float32_weights"])
@pytest.mark.parametrize("router", [BF16, F32], ids=["bf16_router", "float32_router"])
@pytest.mark.parametrize("tokens", [BF16, F32], ids=["bf16_x", "float32_x"])
def test_dtypes(tokens: np.dtype, router: np.dtype, weights: np.dtype) -> None:
    """Every result has its argument's dtype and is that of float32 arguments, rounded once."""
    exact = layer.run(BATCH, precision="bf16")
    batch = cases.Batch(
        x=BATCH.x.astype(tokens),
        expert_idx=IDS,
        expert_weight=BATCH.expert_weight.astype(router),
        w_gate=BATCH.w_gate.astype(weights),
        w_up=BATCH.w_up.astype(weights),
        w_down=BATCH.w_down.astype(weights),
        dy=BATCH.dy.astype(tokens),
    )
    found = layer.run(batch, precision="bf16")
    compare.assert_results_exact(found, exact)
    dtypes = [np.asarray(g).dtype for g in found]
    assert dtypes == [tokens, tokens, router, weights, weights, weights]


CACHED = """
import sys
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
import numpy as np
from tests import cases, layer
ids = cases.ROUTINGS["distinct"](tokens=32, choices=4, experts=16)
found = layer.run(cases.normal(ids, num_experts=16), 2, precision="float32")
np.savez(sys.argv[2], *found)
for name in ("hits", "misses"):
    print(name, events.count(f"/jax/compilation_cache/cache_{name}"))
"""


def test_the_persistent_compilation_cache_is_hit(tmp_path: Path) -> None:
    """A second process compiles nothing anew and computes the same bits."""
    printed, results = [], []
    for name in ("first", "second"):
        path = tmp_path / f"{name}.npz"
        found = process.run_python(CACHED, str(tmp_path / "cache"), str(path))
        assert found.returncode == 0, found.stderr
        printed.append(dict(line.split() for line in found.stdout.splitlines()))
        results.append(np.load(path))
    assert printed[0]["hits"] == "0" and printed[0]["misses"] != "0"
    assert printed[1] == {"hits": printed[0]["misses"], "misses": "0"}
    for name in results[0]:
        compare.assert_bitwise(results[1][name], results[0][name], name)
