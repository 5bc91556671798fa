"""Known faults of systems like this one: wrong ids with debug checks on, and dtypes of ids.

Named as in test_cases.py.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import mega_moe
from jax_megamoe._ids import canonical_ids
from tests import cases, compare, layer, process
from tests.cases import ROUTINGS

CASE_05_IDS = np.array([[0, 3], [-1, 3], [8, 2], [-1, -1], [2**31 - 1, 1], [-(2**31), 1]], np.int32)
WRONG_ID = r"expert_idx: was 8 at token 2, slot 0 \(3 such ids\); .* -1 \(no route\) or in \[0, 8\)"


@pytest.mark.parametrize("jit", [False, True])
def test_05_debug_checks_name_token_slot_and_id(jit: bool) -> None:
    """vllm-project/vllm PR #50845: an id that is wrong must be an error where checks are on."""
    batch = cases.oracle(CASE_05_IDS, 0.5, num_experts=8)
    op = layer.bind(debug_checks=True)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=WRONG_ID):
        jax.block_until_ready((jax.jit(op) if jit else op)(*map(jnp.asarray, batch[:6])))


def test_05_debug_checks_judge_wide_numpy_ids_as_they_are() -> None:
    """2**32 + 3 is wrong, also where x64 is off and JAX would make 3 of it."""
    batch = cases.oracle(np.array([[0, 1], [1, 2**32 + 3]]), 0.5, num_experts=8)
    assert batch.expert_idx.dtype == np.int64
    with pytest.raises(ValueError, match=f"was {2**32 + 3} at token 1, slot 1"):
        mega_moe(*batch[:6], debug_checks=True)


@pytest.mark.parametrize("num_ranks", [None, 4])
def test_05_debug_checks_pass_right_ids_and_change_nothing(num_ranks: int | None) -> None:
    """-1 is a right id, and with the checks on the bits are those without them."""
    ids = ROUTINGS["idle_first_half"](tokens=32, choices=4, experts=16)
    batch = cases.normal(ids, num_experts=16)
    checked = layer.run(batch, num_ranks, precision="float32", debug_checks=True)
    unchecked = layer.run(batch, num_ranks, precision="float32")
    compare.assert_results_bitwise(checked, unchecked)


ALL_RANKS_RAISE = """
import logging, sys
import jax, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from jax_megamoe import mega_moe, sharded_mega_moe
from tests import cases, layer

logging.disable(logging.ERROR)  # JAX logs every callback that raises
entry, ids = sys.argv[1], np.zeros((16, 2), np.int32)
ids[13, 1] = 99
batch = cases.oracle(ids, 0.5, num_experts=8)
mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
tokens, experts = P(("data", "expert")), P("expert")
if entry == "mega_moe":
    def op(*arrays):
        return mega_moe(*arrays, axis_name="expert", debug_checks=True)
    op = jax.shard_map(op, mesh=mesh, in_specs=(tokens,) * 3 + (experts,) * 3, out_specs=tokens)
else:
    def op(*arrays):
        return sharded_mega_moe(
            *arrays, mesh=mesh, expert_axis="expert", data_axes=("data",), debug_checks=True
        )
run = jax.jit(layer.results_and_pullback(op))
for _ in range(20):
    try:
        jax.block_until_ready(run(*map(jax.numpy.asarray, batch)))
    except jax.errors.JaxRuntimeError as error:
        print(str(error).strip().splitlines()[-1])
"""


@pytest.mark.parametrize("entry", ["mega_moe", "sharded_mega_moe"])
def test_05_all_ranks_raise_where_one_has_a_wrong_id(entry: str) -> None:
    """A rank that raised alone would leave the others waiting: on CPU an abort after 40 s.

    Token 13 of 16 is token 1 of the device (data 1, expert 2).
    """
    found = process.run_python(ALL_RANKS_RAISE, entry)
    message = (
        "ValueError: expert_idx: was 99 at token 1, slot 1, data 1, expert 2 (1 such ids); "
        "it may be -1 (no route) or in [0, 8)"
    )
    assert found.stdout.splitlines() == [message] * 20, found.stderr


@pytest.mark.parametrize(
    ("x64", "dtype"),
    [
        *((False, f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        (True, "int64"),
        (True, "uint64"),
    ],
)
def test_06_every_integer_dtype_of_ids(x64: bool, dtype: str) -> None:
    """vllm-project/vllm PR #55147: index width. With x64 off, 64-bit ids are NumPy arrays."""
    ids = ROUTINGS["distinct"](tokens=8, choices=2, experts=8).astype(dtype)
    ids[0, 1] = np.iinfo(dtype).max
    batch = cases.oracle(ids, 0.5, num_experts=8)._replace(expert_idx=ids)
    with jax.enable_x64(True) if x64 else contextlib.nullcontext():
        x, _, w, *weights, dy = map(jnp.asarray, batch)
        expert_idx = jnp.asarray(ids) if x64 or ids.itemsize < 8 else ids
        op = jax.jit(lambda x, w, *weights: mega_moe(x, expert_idx, w, *weights))
        y, pull = jax.vjp(op, x, w, *weights)
        found = cases.Results(y, *pull(dy))
    compare.assert_results_exact(found, cases.oracle_results(batch))


@pytest.mark.parametrize("num_experts", [1, 8, 200, 512])
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64])
def test_06_the_kernels_get_int32_ids_that_are_in_range_or_minus_one(
    dtype: Any, num_experts: int
) -> None:
    """vllm-project/vllm PR #50845 and #55147: neither the sign alone nor the low 32 bits."""
    info = np.iinfo(dtype)
    ids = [-(2**63), -(2**31), -2, -1, 0, 1, 7, 8, 199, 200, 511, 512, 2**31 - 1, 2**32 + 3]
    ids = np.array([i for i in ids if info.min <= i <= info.max], dtype)
    found = canonical_ids(ids, num_experts=num_experts)
    right = [int(i) if 0 <= i < num_experts else -1 for i in ids]
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, right)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(
            canonical_ids(jnp.asarray(ids), num_experts=num_experts), right
        )


@pytest.mark.parametrize("x64", [False, True])
def test_06_a_wide_id_does_not_wrap_into_range(x64: bool) -> None:
    """jax-ml/jax #18847: 2**32 + 3 is no route, not expert 3."""
    batch = cases.oracle(np.array([[2**32 + 3, 1], [2, -(2**32) + 2]]), 0.5, num_experts=8)
    with jax.enable_x64(True) if x64 else contextlib.nullcontext():
        ids = jnp.asarray(batch.expert_idx) if x64 else batch.expert_idx
        y = mega_moe(batch.x, ids, *batch[2:6])
    compare.assert_exact(np.asarray(y)[:, 0], [1.0, 1.5])
