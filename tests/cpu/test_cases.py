"""Known faults of systems like this one: routing data, stale rows, sizes. One test per report.

The number in a test's name is that of a kind of fault, the same in every file; the public report in
which it was seen is named in the docstring. Those that any backend can be asked about on one device
are in tests/gradient_cases.py.
Right values are the oracle's unless the test says otherwise.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe.config import SAVES
from tests import cases, compare, layer
from tests.cases import BF16, F32, ROUTINGS


def assert_oracle(batch: cases.Batch, num_ranks: int | None = None, **how: Any) -> None:
    found = layer.run(batch, num_ranks, **how)
    compare.assert_results_exact(found, cases.oracle_results(batch))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_03_pad_rows_do_not_enter_reductions(precision: str, save: str) -> None:
    """AI-Hypercomputer/maxtext PR #3699: residuals across a jit boundary, no count a multiple."""
    ids = ROUTINGS["distinct"](tokens=50, choices=3, experts=8, seed=1)
    assert np.all(np.bincount(ids.ravel()) % 8)
    batch = cases.oracle(ids, 0.5, num_experts=8)
    x, expert_idx, w, *weights, dy = map(jnp.asarray, batch)
    spec = jax.sharding.PartitionSpec("expert")
    op = jax.shard_map(
        layer.bind(axis_name="expert", precision=precision, save=save),
        mesh=layer.expert_mesh(2),
        in_specs=spec,
        out_specs=spec,
    )
    with jax.debug_nans(True):
        forward = jax.jit(lambda x, w, *weights: op(x, expert_idx, w, *weights))
        y, pull = jax.vjp(forward, x, w, *weights)
        found = cases.Results(y, *pull(dy))
    compare.assert_results_exact(found, cases.oracle_results(batch))


@pytest.mark.parametrize("save", SAVES)
def test_04_one_expert_per_rank_equals_two_of_which_one_is_idle(save: str) -> None:
    """NVIDIA/TransformerEngine #3484: R = 2, E = 2 against E = 4 with experts 1 and 3 idle."""
    ids = ROUTINGS["duplicates"](tokens=200, choices=1, experts=2)
    two = cases.normal(ids, num_experts=2)
    spread = {
        name: np.repeat(getattr(two, name), 2, axis=0) for name in ("w_gate", "w_up", "w_down")
    }
    four = two._replace(expert_idx=2 * ids, **spread)
    found_two, found_four = (layer.run(b, 2, precision="float32", save=save) for b in (two, four))
    shared = cases.Results(*found_four[:3], *(a[::2] for a in found_four[3:]))
    compare.assert_results_bitwise(found_two, shared)
    compare.assert_within(found_two, cases.dense(two), 1e-5)


CASE_05_IDS = np.array([[0, 3], [-1, 3], [8, 2], [-1, -1], [2**31 - 1, 1], [-(2**31), 1]], np.int32)


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_05_ids_out_of_range_are_no_routes(num_ranks: int | None) -> None:
    """vllm-project/vllm PR #50845: a stale positive id of which only the sign was checked."""
    batch = cases.oracle(CASE_05_IDS, 0.5, num_experts=8)
    found = layer.run(batch, num_ranks)
    compare.assert_exact(found.y[:, 0], [2.5, 2.0, 1.5, 0, 1.0, 1.0])
    invalid = (batch.expert_idx < 0) | (batch.expert_idx >= 8)
    assert not np.any(found.dw[invalid])
    compare.assert_results_exact(found, cases.oracle_results(batch))


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("num_ranks", [None, 4])
def test_07_idle_ranks(num_ranks: int | None, save: str) -> None:
    """vllm-project/vllm #43547: a rank without tokens must not skip its half of the exchange."""
    half, experts = np.arange(32)[:, None] < 16, np.tile(np.array([0, 1], np.int32), (32, 1))
    for ids in (
        np.where(half, -1, experts),  # the first ranks idle, the last use the first's experts
        np.where(half, experts + 6, -1),  # mirrored
        np.full((32, 2), -1, np.int32),
    ):
        assert_oracle(cases.oracle(ids, 0.5, num_experts=8), num_ranks, save=save)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("num_ranks", [None, 2])
def test_07_no_tokens_at_all(num_ranks: int | None, save: str) -> None:
    """vllm-project/vllm #43547: T = 0 is a valid shape."""
    batch = cases.oracle(np.zeros((0, 2), np.int32), 0.5, num_experts=8)
    assert_oracle(batch, num_ranks, save=save)


@pytest.mark.parametrize("tokens_per_rank", [1, 2, 3])
def test_08_few_tokens_per_rank(tokens_per_rank: int) -> None:
    """linkedin/Liger-Kernel PR #1368: a heuristic took the logarithm of 0 for a 1-token rank."""
    ids = ROUTINGS["distinct"](tokens=2 * tokens_per_rank, choices=8, experts=32)
    assert_oracle(cases.oracle(ids, 0.5, num_experts=32), 2)


# (H, I), the ones the report names and their like; E is what the memory of a small machine takes.
SIZES = {
    (1, 1): 4,
    (64, 64): 4,
    (128, 64): 4,
    (200, 130): 4,
    (2048, 768): 2,
    (4096, 704): 1,
    (2880, 2880): 1,
    (5120, 1536): 1,
    (7168, 2048): 1,
    (8192, 3072): 1,
}


@pytest.mark.parametrize(
    ("hidden", "intermediate", "num_choices"),
    [(1, 1, 1), (1, 1, 8), (64, 64, 2), (128, 64, 8), (200, 130, 2), (200, 130, 8)],
)
def test_10_sizes_of_every_kind(hidden: int, intermediate: int, num_choices: int) -> None:
    """deepseek-ai/DeepGEMM #339, TensorRT-LLM PR #13908, tile-ai/TileOPs PR #1540."""
    ids = ROUTINGS["duplicates"](tokens=6, choices=num_choices, experts=5)
    assert_oracle(
        cases.oracle(ids, 0.5, num_experts=4, hidden=hidden, intermediate=intermediate, dtype=BF16)
    )


@pytest.mark.parametrize(("hidden", "intermediate"), [s for s, e in SIZES.items() if e < 4])
def test_10_sizes_of_real_models(hidden: int, intermediate: int) -> None:
    """deepseek-ai/DeepGEMM #339, TensorRT-LLM PR #13908, tile-ai/TileOPs PR #1540."""
    num_experts = SIZES[hidden, intermediate]
    ids = ROUTINGS["duplicates"](tokens=4, choices=2, experts=num_experts)
    assert_oracle(
        cases.oracle(
            ids,
            0.5,
            num_experts=num_experts,
            hidden=hidden,
            intermediate=intermediate,
            dtype=BF16,
        )
    )


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_10_the_kernels_take_a_size_or_name_it(hidden: int, intermediate: int) -> None:
    """deepseek-ai/DeepGEMM #339: limits are declared, not found deep inside a kernel."""
    f32, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=d) for d in (F32, np.int32))
    up, down = (4, hidden, intermediate), (4, intermediate, hidden)
    shapes = (f32((6, hidden)), i32((6, 2)), f32((6, 2)), f32(up), f32(up), f32(down))
    trace = functools.partial(jax.eval_shape, layer.bind(backend="cuda"), *shapes)
    if hidden % 64 == 0 and intermediate % 64 == 0:
        assert trace().shape == (6, hidden)
        return
    letter, size = ("H", hidden) if hidden % 64 else ("I", intermediate)
    with pytest.raises(ValueError, match=f"of {letter} = {size} .* multiple of 64"):
        trace()


@pytest.mark.parametrize(("dtype", "precision"), [(BF16, "bf16"), (F32, "bf16"), (F32, "float32")])
def test_15_sums_of_many_choices_are_float32(dtype: np.dtype, precision: str) -> None:
    """vllm-project/vllm #15045: a running sum in bf16 would give 1."""
    batch = cases.oracle(
        np.arange(8, dtype=np.int32)[None], [[1, *[2**-8] * 6, 0]], num_experts=8, dtype=dtype
    )
    batch.w_down[:, 0, :] = 1 / 32
    found = layer.run(batch, precision=precision)
    compare.assert_exact(found.y, np.full((1, 32), 1.0234375))


@pytest.mark.parametrize(("remat", "num_ranks"), [(False, 4), (True, 1), (True, 4)])
def test_30_counts_are_counted_once(remat: bool, num_ranks: int) -> None:
    """NVIDIA/Megatron-LM #1330: load statistics counted twice under recompute."""
    ids = ROUTINGS["invalid"](tokens=64, choices=4, experts=16)
    batch = cases.normal(ids, num_experts=16)
    x, expert_idx, *rest, _ = map(jnp.asarray, batch)
    spec = jax.sharding.PartitionSpec("expert")
    op = jax.shard_map(
        layer.bind(axis_name="expert", return_counts=True),
        mesh=layer.expert_mesh(num_ranks),
        in_specs=spec,
        out_specs=spec,
    )

    def loss(x: Any, *rest: Any) -> Any:
        y, counts = (jax.checkpoint(op) if remat else op)(x, expert_idx, *rest)
        return jnp.sum(jnp.square(y)), counts

    (_, counts), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(x, *rest)
    assert counts.dtype == np.int32
    valid = (ids >= 0) & (ids < 16)
    np.testing.assert_array_equal(counts, np.bincount(ids[valid], minlength=16))
    assert counts.sum() == ids.size - np.sum(~valid)
