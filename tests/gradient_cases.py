"""What gradients must be on every backend: each check is a function of the op's static options.

Right values are the oracle's, or those of the same backend without what the check is about, bit for
bit. H and I are multiples of 64, as the kernels ask. The number in a check's name is that of a kind
of fault seen in a system like this one, and the docstring names the public report.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import route
from tests import cases, compare, layer
from tests.cases import BF16, F32, ROUTINGS, Batch, Results

H, I = 64, 64
T, K, E = 48, 4, 16
IDS = ROUTINGS["invalid"](tokens=T, choices=K, experts=E)


def oracle(ids: np.ndarray, weight: Any, *, experts: int, **dtypes: Any) -> Batch:
    return cases.oracle(ids, weight, num_experts=experts, hidden=H, intermediate=I, **dtypes)


def normal(ids: np.ndarray = IDS, *, experts: int = E, **how: Any) -> Batch:
    return cases.normal(ids, num_experts=experts, hidden=H, intermediate=I, **how)


def assert_oracle(found: Results, batch: Batch) -> None:
    compare.assert_results_exact(found, cases.oracle_results(batch))


def scan_layer(batch: Batch, all_ids: np.ndarray, **options: Any) -> Iterator[Results]:
    """One program that runs a batch under each of all_ids [N, T, K]: iterates over Results."""
    run = layer.results_and_pullback(layer.bind(**options))
    step = jax.jit(lambda ids, *rest: jax.lax.map(lambda i: run(rest[0], i, *rest[1:]), ids))
    stacked = map(np.asarray, step(all_ids, batch.x, *batch[2:]))
    return (Results(*leaves) for leaves in zip(*stacked, strict=True))


def of_floats(ids: np.ndarray, **options: Any) -> Callable[..., Any]:
    """The op as a function of what it is differentiable in."""
    op = layer.bind(**options)
    return lambda x, w, *weights: op(x, ids, w, *weights)


def floats(batch: Batch) -> tuple[tuple[Any, ...], Any]:
    """x, expert_weight and the three weights; and dy."""
    x, _, w, *weights, dy = map(jnp.asarray, batch)
    return (x, w, *weights), dy


def experts_without_tokens_02(**options: Any) -> None:
    """meta-pytorch/MSLK PR #158: all 256 patterns of busy and idle experts, E = 8, K = 1."""
    num_tokens = 16
    all_ids = np.full((256, num_tokens, 1), -1, np.int32)
    for pattern in range(1, 256):
        busy = np.flatnonzero([pattern >> e & 1 for e in range(8)])
        all_ids[pattern, :, 0] = np.resize(busy, num_tokens)
    batch = oracle(all_ids[255], 0.5, experts=8, dtype=BF16)
    for ids, found in zip(all_ids, scan_layer(batch, all_ids, **options), strict=True):
        assert_oracle(found, batch._replace(expert_idx=ids))
        idle = np.setdiff1d(np.arange(8), ids)
        for gradient in found[3:]:
            assert not np.any(gradient[idle])


def residuals_without_nan_03(**options: Any) -> None:
    """AI-Hypercomputer/maxtext PR #3699: residuals across a jit boundary, under jax_debug_nans.

    No expert has a multiple of 8 rows, so every one has rows that nobody routed anything to.
    """
    ids = ROUTINGS["distinct"](tokens=50, choices=3, experts=8, seed=1)
    counts = np.bincount(ids.ravel(), minlength=8)
    assert np.all(counts % 8), counts
    exact = oracle(ids, 0.5, experts=8)
    for batch in (exact, normal(ids, experts=8)):
        arguments, dy = floats(batch)
        with jax.debug_nans(True):
            y, pull = jax.vjp(jax.jit(of_floats(ids, **options)), *arguments)
            found = Results(y, *pull(dy))
        compare.assert_results_bitwise(found, layer.run(batch, **options))
    assert_oracle(layer.run(exact, **options), exact)


def idle_experts_beside_04(**options: Any) -> None:
    """NVIDIA/TransformerEngine #3484: E = 2 against E = 4 with experts 1 and 3 idle."""
    ids = ROUTINGS["duplicates"](tokens=200, choices=1, experts=2)
    two = normal(ids, experts=2)
    names = ("w_gate", "w_up", "w_down")
    spread = {name: np.repeat(getattr(two, name), 2, axis=0) for name in names}
    four = two._replace(expert_idx=2 * ids, **spread)
    found_two, found_four = (layer.run(b, **options) for b in (two, four))
    shared = Results(*found_four[:3], *(a[::2] for a in found_four[3:]))
    compare.assert_results_bitwise(found_two, shared)
    for gradient in found_four[3:]:
        assert not np.any(gradient[1::2])


def ids_out_of_range_05(**options: Any) -> None:
    """vllm-project/vllm PR #50845: an id that is no expert has no gradient and gives none."""
    wrong = [[0, 3], [-1, 3], [8, 2], [-1, -1], [2**31 - 1, 1], [-(2**31), 1]]
    batch = oracle(np.array(wrong, np.int32), 0.5, experts=8)
    found = layer.run(batch, **options)
    assert not np.any(found.dw[(batch.expert_idx < 0) | (batch.expert_idx >= 8)])
    assert_oracle(found, batch)


def nothing_to_do_07(**options: Any) -> None:
    """vllm-project/vllm #43547: no route at all, and no token at all."""
    for num_tokens in (32, 0):
        batch = oracle(np.full((num_tokens, 2), -1, np.int32), 0.5, experts=8)
        found = layer.run(batch, **options)
        assert not any(np.any(a) for a in found)
        assert_oracle(found, batch)


def router_weights_13(**options: Any) -> None:
    """deepspeedai/DeepSpeed PR #8213: each slot has its own gradient, also one of weight 0."""
    for dtype in (BF16, F32):
        for ids, weights, right in (
            ([0, 3], [0.5, 0.5], [1, 4]),
            ([0, 1], [1.0, 0.0], [1, 2]),
            ([2, 2], [0.0, 0.0], [3, 3]),
        ):
            batch = oracle(np.array([ids] * 2, np.int32), weights, experts=4, dtype=dtype)
            found = layer.run(batch, **options)
            compare.assert_exact(found.dw, [right] * 2)
            assert found.dw.dtype == dtype


def zero_weights(**options: Any) -> None:
    """dw does not depend on w: the same bits where half of the weights are 0."""
    batch = normal()
    zero = np.random.default_rng(1).random(batch.expert_weight.shape) < 0.5
    with_zeros = batch._replace(expert_weight=np.where(zero, F32.type(0), batch.expert_weight))
    found, other = (layer.run(b, **options) for b in (batch, with_zeros))
    compare.assert_bitwise(other.dw, found.dw)
    assert np.all(found.dw[(IDS >= 0) & (IDS < E)])
    assert np.any(other.dx != found.dx)


def accumulation_in_a_scan_14(**options: Any) -> None:
    """AMD-AGI/Primus PR #1046: a scan over 4 microbatches equals one batch of 128 tokens."""
    ids = np.repeat(np.arange(4, dtype=np.int32), 32)[:, None]
    one = oracle(ids, 1.0, experts=4)
    run = layer.results_and_pullback(layer.bind(**options))
    weights = one[3:6]

    def step(sums: tuple[Any, ...], microbatch: tuple[Any, ...]) -> tuple[Any, None]:
        *tokens, dy = microbatch
        gradients = run(*tokens, *weights, dy)[3:]
        return tuple(a + g for a, g in zip(sums, gradients, strict=True)), None

    microbatches = tuple(a.reshape(4, 32, -1) for a in (*one[:3], one.dy))
    zeros = tuple(map(jnp.zeros_like, weights))
    sums, _ = jax.jit(lambda *a: jax.lax.scan(step, *a))(zeros, microbatches)
    assert [float(sums[2][m, 0, 0]) for m in range(4)] == [1024] * 4
    for found, right in zip(sums, layer.run(one, **options)[3:], strict=True):
        compare.assert_bitwise(found, right)


def donation_18(**options: Any) -> None:
    """jax-ml/jax #39625: wrong results from donation, depending on the order of the outputs."""
    x, expert_idx, w, *weights, dy = normal()
    run = layer.results_and_pullback(layer.bind(**options))
    for x_first in (False, True):

        def step(weights: list[Any], x: Any, x_first: bool = x_first) -> tuple[Any, Any]:
            found = run(x, expert_idx, w, *weights, dy)
            new = [a - 0.5 * g for a, g in zip(weights, found[3:], strict=True)]
            moved = x - found.dx
            return (moved, new) if x_first else (new, moved)

        right = jax.jit(step)(weights, x)
        # Copies: device_put may alias the host's memory, which cannot be donated.
        donated = jax.tree.map(lambda a: jnp.array(a, copy=True), (weights, x))
        found = jax.jit(step, donate_argnums=(0, 1))(*donated)
        assert all(a.is_deleted() for a in jax.tree.leaves(donated))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
            compare.assert_bitwise(a, b)


def few_rows_29(**options: Any) -> None:
    """deepseek-ai/DeepGEMM #268: groups of fewer than 64 rows; here one of 1 to 130 rows."""
    rows = np.arange(130)
    all_ids = np.where(rows[None] <= rows[:, None], 2, -1)[:, :, None].astype(np.int32)
    batch = oracle(all_ids[0], 0.5, experts=4)
    for ids, found in zip(all_ids, scan_layer(batch, all_ids, **options), strict=True):
        assert_oracle(found, batch._replace(expert_idx=ids))


def a_layer_used_twice(**options: Any) -> None:
    """Two calls on the same weights: the sum of the gradients of each, its own residuals used."""
    batch = normal()
    (x, w, *weights), dy = floats(batch)
    op = of_floats(batch.expert_idx, **options)

    @jax.jit
    def twice(x: Any, w: Any, *weights: Any) -> Any:
        _, pull = jax.vjp(lambda x, w, *ws: op(op(x, w, *ws), w, *ws), x, w, *weights)
        return pull(dy)

    @functools.partial(jax.jit, static_argnums=0)
    def pull_back(want_y: bool, dy: Any, x: Any, w: Any, *weights: Any) -> Any:
        y, pull = jax.vjp(op, x, w, *weights)
        return y if want_y else pull(dy)

    middle = pull_back(True, dy, x, w, *weights)
    second = pull_back(False, dy, middle, w, *weights)
    first = pull_back(False, second[0], x, w, *weights)
    found = twice(x, w, *weights)
    compare.assert_bitwise(found[0], first[0], "dx")
    for name, a, b, c in zip(Results._fields[2:], found[1:], first[1:], second[1:], strict=True):
        assert np.any(b != c)
        compare.assert_bitwise(a, b + c, name)


def two_pullbacks_before_either_is_used(**options: Any) -> None:
    batch = normal()
    arguments, dy = floats(batch)
    other = tuple(0.5 * a for a in arguments)
    f = jax.jit(of_floats(batch.expert_idx, **options))
    y, pull = jax.vjp(f, *arguments)
    y_other, pull_other = jax.vjp(f, *other)
    of_other = Results(y_other, *pull_other(dy))
    right = layer.run(batch, **options)
    compare.assert_results_bitwise(Results(y, *pull(dy)), right)
    compare.assert_results_bitwise(Results(y, *pull(dy)), right)
    y_other, pull_other = jax.vjp(f, *other)
    compare.assert_results_bitwise(of_other, Results(y_other, *pull_other(dy)))
    assert all(np.any(a != b) for a, b in zip(of_other, right, strict=True))


def x64(**options: Any) -> None:
    """With 64-bit types on, and ids of 64 bits, of which one wraps into range when cut."""
    right = layer.run(normal(), **options)
    ids = np.where((IDS < 0) | (IDS >= E), np.int64(2**32 + 3), IDS)
    arguments, dy = floats(normal())
    with jax.enable_x64(True):
        y, pull = jax.vjp(jax.jit(of_floats(ids, **options)), *arguments)
        found = Results(y, *pull(dy))
    compare.assert_results_bitwise(found, right)


def float32_weights(**options: Any) -> None:
    """Their gradients are the sums themselves: float32, and the bf16 ones are these, rounded."""
    of_float32, of_bf16 = (layer.run(normal(weight_dtype=d), **options) for d in (F32, BF16))
    for name, wide, narrow in zip(Results._fields[3:], of_float32[3:], of_bf16[3:], strict=True):
        assert wide.dtype == F32 and narrow.dtype == BF16
        compare.assert_exact(narrow, wide, name)
        assert np.mean(wide != narrow.astype(F32)) > 0.5, f"{name} was rounded to bf16"


def frozen_experts(**options: Any) -> None:
    """trainable_experts=False changes no other gradient."""
    right = layer.run(normal(), **options)
    found = layer.run(normal(), **options, trainable_experts=False)
    compare.assert_results_bitwise(
        found, Results(*right[:3], *(np.zeros_like(g) for g in right[3:]))
    )


def remat_at_ties_17(policy: Any, **options: Any) -> None:
    """NVIDIA-NeMo/Automodel PR #2635: a recomputed router that breaks ties otherwise.

    A router of two pairs of identical columns and repeated rows of x, T = 256, E = 8, K = 2.
    """
    batch = normal(ROUTINGS["distinct"](tokens=64, choices=2, experts=8), experts=8)
    x = np.repeat(batch.x, 4, axis=0)
    router = np.random.default_rng(2).standard_normal((H, 8)).astype(F32)
    router[:, 5], router[:, 7] = router[:, 2], router[:, 0]
    op = layer.bind(**options)

    def block(x: Any, router: Any, *weights: Any) -> Any:
        r = route(jnp.matmul(x, router, precision="highest"), 2)
        return jnp.tanh(op(x, r.expert_idx, r.expert_weight, *weights)), r.load

    def graded(block: Any) -> Any:
        def loss(*arguments: Any) -> Any:
            y, load = block(*arguments)
            return jnp.sum(jnp.sin(y)), load

        run = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(5)), has_aux=True))
        return run(x, router, *batch[3:6])

    found, right = graded(jax.checkpoint(block, policy=policy)), graded(block)
    assert int(found[0][1].sum()) == 2 * len(x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        compare.assert_bitwise(a, b)
        assert np.any(a)


CHECKS: dict[str, Callable[..., None]] = {
    check.__name__: check
    for check in (
        experts_without_tokens_02,
        residuals_without_nan_03,
        idle_experts_beside_04,
        ids_out_of_range_05,
        nothing_to_do_07,
        router_weights_13,
        zero_weights,
        accumulation_in_a_scan_14,
        donation_18,
        few_rows_29,
        a_layer_used_twice,
        two_pullbacks_before_either_is_used,
        x64,
        float32_weights,
        frozen_experts,
    )
}
