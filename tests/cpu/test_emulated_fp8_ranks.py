"""The kernels of precision="fp8_block" of several ranks on an emulated machine: the bits of one
rank with all experts, whatever comes as codes from another one."""

from typing import Any

import numpy as np
import pytest

from jax_megamoe import _ffi
from tests import cases, compare, emulated, fp8
from tests.cases import BF16, F32, Batch, Results, normal_of

# T of all ranks, K, E, H, I and the routing.
CASES = (
    ((8, 8, 16, 128, 128), "distinct"),
    ((160, 2, 8, 128, 256), "skewed"),
    ((200, 3, 8, 256, 128), "invalid"),
    ((40, 2, 8, 128, 128), "nothing"),
)


def run(batch: Batch, ranks: int = 1, *, keep: bool = False, **how: Any) -> Results:
    """Of a forward, and of a backward of what it has kept or of nothing."""
    weights, how = fp8.quantized_weights(batch), {"ranks": ranks, **how}
    y, *others = emulated.forward_fp8(batch, weights, keep=keep, **how)
    how["gate_up"] = others[-1] if keep else None
    return Results(y, *emulated.backward_fp8(batch, weights, weight_dtype=F32, **how))


def scaled(size: tuple[int, ...], routing: str) -> Batch:
    return fp8.with_scales(normal_of(size, routing))


@pytest.mark.parametrize(
    ("ranks", "case"), [(2, 0), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2), (8, 0), (8, 2)]
)
def test_every_bit_is_that_of_one_rank(ranks: int, case: int) -> None:
    batch = scaled(*CASES[case])
    how: dict[str, Any] = {"pool_factor": float(ranks), "seed": ranks}  # one pass
    right = run(batch)
    for keep in (False, True):
        compare.assert_results_bitwise(run(batch, ranks, keep=keep, **how), right)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_every_order(seed: int) -> None:
    how: dict[str, Any] = {"pool_factor": 2.0, "seed": seed, "multiprocessors": 2 * seed}
    compare.assert_results_bitwise(run(scaled(*CASES[2]), 2, **how), run(scaled(*CASES[2])))


def test_parts_one_after_another() -> None:
    batch = scaled(*CASES[2])
    weights, how = fp8.quantized_weights(batch), {"ranks": 2, "pool_factor": 2.0}
    (y,) = emulated.forward_fp8(batch, weights, launches=_ffi.UNFUSED, **how)
    how |= {"launches": _ffi.BACKWARD_UNFUSED, "weight_dtype": F32}
    found = Results(y, *emulated.backward_fp8(batch, weights, **how))
    compare.assert_results_bitwise(found, run(batch))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_several_passes(ranks: int, keep: bool) -> None:
    """All routes go to the experts of one rank; g and u of its later passes are computed again."""
    ids = np.random.default_rng(0).integers(0, 2, (120, 3)).astype(np.int32)
    sizes: dict[str, Any] = {"num_experts": 2 * ranks, "hidden": 128, "intermediate": 128}
    batch = fp8.with_scales(cases.normal(ids, dtype=BF16, **sizes))
    found = run(batch, ranks, keep=keep, pool_factor=1.0, seed=ranks, multiprocessors=2)
    right = run(batch)
    for name, a, b in list(zip(Results._fields, found, right, strict=True))[:3]:
        compare.assert_bitwise(a, b, name)
    compare.assert_within(found, right, 1e-6)


def test_sums_that_are_rounded_on_their_way() -> None:
    batch = scaled(*CASES[1])
    rounded, exact = run(batch, 2, combine_dtype="bfloat16", pool_factor=2.0), run(batch)
    compare.assert_results_bitwise(Results(rounded.y, rounded.dx, *exact[2:]), rounded)
    y, right = rounded.y.astype(F32), exact.y.astype(F32)
    assert 0 < np.linalg.norm(y - right) < 0.01 * np.linalg.norm(right)


@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_one_after_another_in_the_same_memory(ranks: int) -> None:
    """Of other tokens and routes each; a rank begins a call while others end the one before."""
    batches = []
    for i, routing in enumerate(("invalid", "one_expert", "nothing", "skewed")):
        batch = scaled((120, 3, 8, 128, 128), routing)
        roll = {f: np.roll(getattr(batch, f), 7 * i + 1, axis=0) for f in ("x", "dy")}
        batches.append(batch._replace(**roll))
    calls = [
        emulated.Call(b, is_backward=i, float_gradients=True, quantized=fp8.quantized_weights(b))
        for b in batches
        for i in (False, True)
    ]
    how: dict[str, Any] = {"pool_factor": float(ranks), "seed": 1, "multiprocessors": 2}
    found = emulated.run(calls, ranks=ranks, **how)
    for i, batch in enumerate(batches):
        (y,), gradients = found[2 * i : 2 * i + 2]
        compare.assert_results_bitwise(Results(y, *gradients), run(batch))


@pytest.mark.parametrize("is_backward", [False, True])
def test_ranks_that_need_a_failed_one_fail_too(is_backward: bool) -> None:
    batch = normal_of((64, 8, 8, 128, 128), "distinct")
    weights = fp8.quantized_weights(batch)
    call = emulated.Call(batch, is_backward=is_backward, quantized=weights)
    found = emulated.failed_ranks([call], ranks=2, failed_ranks=(0,), deadline=5000)
    assert found == [0, 1]
