"""combine_dtype="bfloat16": each rank's sum of a token is rounded on its way, and nothing else is.

The reference on simulated devices and the kernels on the emulated machine, against the same model
of the rounding (tests/combine.py).
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_megamoe import _ffi
from jax_megamoe.config import Dims, MegaMoEConfig
from tests import cases, combine, compare, emulated, layer
from tests.cases import BF16, F32, ROUTINGS, Batch, Results

BF16_SUMS: dict[str, Any] = {"combine_dtype": "bfloat16"}
RANKS = [2, 4, 8]
# T of all ranks, K, E, H, I and the routing.
CASES = (
    ((8, 8, 16, 64, 64), "distinct"),
    ((48, 4, 16, 320, 64), "invalid"),
    ((40, 4, 16, 576, 64), "duplicates"),
)
IDS = [f"{size}-{routing}" for size, routing in CASES]


def routed(size: tuple[int, ...], routing: str) -> Batch:
    tokens, choices, experts, hidden, intermediate = size
    ids = ROUTINGS[routing](tokens=tokens, choices=choices, experts=experts)
    return cases.normal(
        ids, num_experts=experts, hidden=hidden, intermediate=intermediate, dtype=BF16
    )


def emulated_results(batch: Batch, ranks: int = 1, **how: Any) -> Results:
    gradients = emulated.backward(batch, ranks=ranks, weight_dtype=F32, **how)
    return Results(emulated.forward(batch, ranks=ranks, **how), *gradients)


def reference_results(batch: Batch, ranks: int = 1, **options: Any) -> Results:
    return layer.run(batch, ranks, backend="reference", **options)


RUNS = {"emulated": emulated_results, "reference": reference_results}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("size", "routing"), CASES, ids=IDS)
def test_y_and_dx_are_those_of_rounded_sums(
    size: tuple[int, ...], routing: str, ranks: int, run: str
) -> None:
    """Bitwise; the other gradients are those of one rank."""
    batch, of = routed(size, routing), RUNS[run]
    alone = of(batch)
    parts = [of(combine.of_rank(batch, r, ranks)) for r in range(ranks)]
    y, dx = (combine.summed(np.stack([p[i] for p in parts]).astype(F32)) for i in range(2))
    assert np.any(y != alone.y) and np.any(dx != alone.dx)
    found = of(batch, ranks, **BF16_SUMS)
    compare.assert_results_bitwise(found, alone._replace(y=y, dx=dx))


@pytest.mark.parametrize("seed", range(3))
def test_the_same_bits_in_every_order(seed: int) -> None:
    batch = routed(*CASES[1])
    first = emulated_results(batch, 4, **BF16_SUMS)
    again = emulated_results(batch, 4, seed=seed + 1, multiprocessors=2, **BF16_SUMS)
    compare.assert_results_bitwise(again, first)


def test_calls_in_the_same_memory_and_in_parts() -> None:
    batches = [routed((64, 2, 8, 64, 64), name) for name in ("skewed", "nothing", "distinct")]
    calls = [emulated.Call(b, is_backward=i) for b in batches for i in (False, True)]
    found = emulated.run(calls, ranks=2, seed=1, multiprocessors=2, **BF16_SUMS)
    for i, batch in enumerate(batches):
        y = emulated.forward(batch, ranks=2, launches=_ffi.UNFUSED, **BF16_SUMS)
        gradients = emulated.backward(batch, ranks=2, launches=_ffi.BACKWARD_UNFUSED, **BF16_SUMS)
        (found_y,), found_gradients = found[2 * i : 2 * i + 2]
        compare.assert_results_bitwise(Results(found_y, *found_gradients), Results(y, *gradients))


def test_one_rank_is_left_alone() -> None:
    batch = routed(*CASES[1])
    compare.assert_results_bitwise(
        reference_results(batch, 1, **BF16_SUMS), reference_results(batch, 1)
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_the_error_is_as_stated(ranks: int) -> None:
    """`MegaMoEConfig`: at most 2^-8 of the sum of what ranks send, before y itself is rounded; and
    docs/architecture.md: how many elements change, and how much larger the error is."""
    batch = routed((256, 8, 64, 64, 64), "distinct")

    def y_of(batch: Batch) -> np.ndarray:
        return reference_results(batch).y

    sums = combine.rank_sums(batch, ranks, y_of).astype(np.float64)
    alone, rounded = reference_results(batch), reference_results(batch, ranks, **BF16_SUMS)
    exact, found = alone.y.astype(np.float64), rounded.y.astype(np.float64)
    u = 2.0**-8
    most = u * np.abs(sums).sum(0) / (1 - u) + u * (np.abs(found) + np.abs(exact))
    assert np.all(np.abs(found - exact) <= most)
    assert np.max(np.abs(found - exact) / np.abs(sums).sum(0)) > u / 4  # nor is that far off
    right = cases.dense(batch)
    for name, least, most in (("y", 0.3, 0.45), ("dx", 0.2, 0.4)):
        before, after = (getattr(r, name).astype(np.float64) for r in (alone, rounded))
        assert least < np.mean(before != after) < most
        rms = [np.sqrt(np.mean((a - getattr(right, name)) ** 2)) for a in (before, after)]
        assert 1.05 < rms[1] / rms[0] < 1.2


@pytest.mark.parametrize("ranks", RANKS)
def test_a_token_of_one_rank_keeps_its_bits(ranks: int) -> None:
    batch = routed(*CASES[1])
    tokens, choices = batch.expert_idx.shape
    local = batch.num_experts // ranks
    ids = np.arange(tokens)[:, None] % ranks * local + np.arange(choices) % local
    batch = batch._replace(expert_idx=ids.astype(np.int32))
    found = reference_results(batch, ranks, **BF16_SUMS)
    compare.assert_results_bitwise(found, reference_results(batch))


def test_15_an_example_of_the_error() -> None:
    """Weights 1 and six of 2^-8: float32 sums give 1.0234375. Of two ranks the first one's
    1 + 3 2^-8 becomes 1 + 4 2^-8, and with 3 2^-8 of the other the sum is a tie again."""
    weights = [[1, *[2**-8] * 6, 0]] * 2
    ids = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    batch = cases.oracle(ids, weights, num_experts=8, dtype=BF16)
    batch.w_down[:, 0, :] = 1 / 32
    compare.assert_exact(reference_results(batch, 2).y, np.full((2, 32), 1.0234375))
    compare.assert_exact(reference_results(batch, 2, **BF16_SUMS).y, np.full((2, 32), 1.03125))


def lowered(ranks: int, combine_dtype: str) -> str:
    dims = Dims(T=8, K=2, E=8, R=ranks, H=64, I=64)
    config = MegaMoEConfig(backend="cuda", combine_dtype=combine_dtype)

    def forward(*arrays: jax.Array) -> jax.Array:
        return _ffi.forward_call(*arrays, dims=dims, config=config, axis_name="expert")[0]

    spec = PartitionSpec("expert")
    run = jax.shard_map(forward, mesh=layer.expert_mesh(ranks), in_specs=spec, out_specs=spec)
    x, ids, w, *weights, _ = routed((8 * ranks, 2, 8, 64, 64), "distinct")
    traced = jax.jit(run).trace(x, ids, w, *weights)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_custom_call_says_it_and_all_ranks_must_agree() -> None:
    text = {dtype: lowered(2, dtype) for dtype in ("float32", "bfloat16")}
    for dtype, found in text.items():
        assert f'combine_dtype = "{dtype}"' in found
    dims = Dims(T=8, K=2, E=8, R=2, H=64, I=64)
    configuration = functools.partial(_ffi._configuration, dims, expert_bias=False)
    assert configuration(MegaMoEConfig()) != configuration(MegaMoEConfig(**BF16_SUMS))
    # Equal configs agree, whatever kind of str they hold.
    other = MegaMoEConfig(combine_dtype=np.str_("bfloat16"))
    assert configuration(other) == configuration(MegaMoEConfig(**BF16_SUMS))
    # One rank's call does not depend on it.
    assert lowered(1, "float32") == lowered(1, "bfloat16")
    assert "combine_dtype" not in lowered(1, "bfloat16")
