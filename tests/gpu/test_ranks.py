"""Experts over two GPUs of one host: the bits of one GPU with all experts, in training programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests import compare, layer
from tests.cases import BF16, F32, ROUTINGS, Batch, normal_of
from tests.forward import poison_free_memory, random_batch

pytestmark = pytest.mark.multi_gpu(2)

# T of both ranks, K, E, H, I.
SIZES = (
    (6, 8, 16, 64, 64),
    (200, 2, 8, 128, 128),
    (778, 3, 8, 256, 192),
    (1000, 4, 4, 320, 320),
    (4096, 8, 128, 512, 256),
    (600, 32, 64, 448, 320),
    (300, 2, 6, 2112, 128),
)


def cast(batch: Batch, dtype: np.dtype) -> Batch:
    return Batch(*(a if a.dtype == np.int32 else a.astype(dtype) for a in batch))


def assert_as_one_gpu(batch: Batch, **how: Any) -> None:
    found = layer.run(batch, 2, backend="cuda", **how)
    compare.assert_results_bitwise(found, layer.run(batch, backend="cuda"))


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_bit_is_that_of_one_gpu(size: tuple[int, ...], routing: str) -> None:
    assert_as_one_gpu(cast(random_batch(size, routing), BF16))


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_dtypes_and_what_is_kept(dtype: np.dtype, save: str) -> None:
    assert_as_one_gpu(cast(random_batch(SIZES[2], "invalid"), dtype), save=save)


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("size", [(200, 2, 8, 128, 128), (778, 3, 8, 256, 384)], ids=str)
def test_in_fp8(size: tuple[int, ...], save: str) -> None:
    batch = cast(random_batch(size, "invalid"), BF16)
    how: dict[str, Any] = {"backend": "cuda", "precision": "fp8_block", "save": save}
    compare.assert_results_bitwise(layer.run(batch, 2, **how), layer.run(batch, **how))


@pytest.mark.parametrize("owner", [0, 1])
def test_all_tokens_to_one_rank(owner: int) -> None:
    size = SIZES[1]
    ids = np.random.default_rng(owner).integers(0, 4, size[:2]).astype(np.int32) + 4 * owner
    assert_as_one_gpu(normal_of(size, ids))


@pytest.mark.parametrize("source", [0, 1])
def test_a_rank_without_routes(source: int) -> None:
    size = SIZES[1]
    ids = ROUTINGS["distinct"](tokens=200, choices=2, experts=8).copy()
    ids[100 * source : 100 * (source + 1)] = -1
    assert_as_one_gpu(normal_of(size, ids))


def test_twenty_runs_have_the_same_bits_whatever_memory_holds() -> None:
    batch = cast(random_batch(SIZES[4], "skewed"), BF16)
    first = layer.run(batch, 2, backend="cuda")
    for _ in range(20):
        poison_free_memory()
        compare.assert_results_bitwise(layer.run(batch, 2, backend="cuda"), first)


def test_a_thousand_steps_of_other_routes_each() -> None:
    """Inside one loop, with a collective of XLA's before the layer and one behind it."""
    size = (256, 2, 8, 64, 64)
    batch = cast(random_batch(size, "distinct"), BF16)
    op = layer.bind(axis_name="expert", backend="cuda")

    def step(i: Any, x: Any, ids: Any, *rest: Any) -> Any:
        # No sum depends on which rank holds a token.
        mean = jax.lax.pmean(jnp.mean(x.astype(jnp.float32)), "expert").astype(x.dtype)
        return op(x - mean, (ids + i) % size[2], *rest)

    found, again = (layer.after_steps(step, batch, 2) for _ in range(2))
    compare.assert_bitwise(found, again, "x after 1,000 steps")


def test_a_stack_of_layers_in_scan_and_remat() -> None:
    x, ids, w, *weights, dy = map(jnp.asarray, cast(random_batch(SIZES[2], "distinct"), BF16))

    def gradients(num_ranks: int | None) -> Any:
        axis = None if num_ranks is None else "expert"
        op = layer.bind(backend="cuda", axis_name=axis)

        def run(x: Any, ids: Any, w: Any, *rest: Any) -> Any:
            *weights, dy = rest

            def block(x: Any, w: Any, *weights: Any) -> Any:
                return x + jnp.tanh(op(x, ids, w, *weights))

            body = jax.checkpoint(block)
            loop = lambda x, w, *weights: jax.lax.scan(  # noqa: E731
                lambda x, _: (body(x, w, *weights), None), x, length=3
            )[0]
            return jax.vjp(loop, x, w, *weights)[1](dy)

        if num_ranks is not None:
            spec, mesh = PartitionSpec("expert"), layer.expert_mesh(num_ranks)
            run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(run)(x, ids, w, *weights, dy)

    for name, a, b in zip(
        ("dx", "dw", "dWg", "dWu", "dWd"), gradients(2), gradients(None), strict=True
    ):
        compare.assert_bitwise(np.asarray(a), np.asarray(b), name)
