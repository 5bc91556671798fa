"""Too little memory, and results of the wrong size, become errors; the process goes on."""

from typing import Any

import jax
import pytest

from jax_megamoe import _call_arrays, _ffi
from jax_megamoe.config import Dims, MegaMoEConfig
from tests import compare, memory_limits
from tests.forward import SIZES, dims_of, forward, operands, random_batch

pytestmark = pytest.mark.gpu


def test_too_little_memory_is_an_error_and_the_process_goes_on() -> None:
    """In a process that may take a twentieth of the device, and takes it at once."""
    assert memory_limits.refused_s(".05", "true") < 5


@pytest.mark.parametrize(
    "name", ["y", "row_slot", "chunk_counts", "pool", "h", "counters", "gate_up"]
)
def test_a_result_of_the_wrong_size_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a version of the Python part that does not belong to the extension would ask for."""
    batch = random_batch(SIZES[3], "distinct")
    keep = name == "gate_up"
    right = _call_arrays.forward_results(dims_of(batch), keep)
    wrong = [
        a._replace(shape=(a.shape[0] + 1, *a.shape[1:])) if a.name == name else a for a in right
    ]
    assert wrong != right
    want, _ = forward(*operands(batch))
    monkeypatch.setattr(_ffi, "forward_results", lambda *_: wrong)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*result {name} has"):
        call(batch, keep)
    monkeypatch.undo()
    compare.assert_bitwise(call(batch, keep), want, "y")


@pytest.mark.parametrize("num_blocks", [0, 3, 16])
def test_a_wrong_number_of_blocks_is_refused(
    num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dims, "num_blocks", num_blocks)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"num_blocks is {num_blocks} for 8"):
        call(random_batch(SIZES[3], "distinct"))


def call(batch: Any, keep_gate_up: bool = False) -> jax.Array:
    """y, by a program that is compiled anew."""
    static = {"dims": dims_of(batch), "config": MegaMoEConfig(), "axis_name": None}
    static["keep_gate_up"] = keep_gate_up
    return jax.jit(lambda *a: _ffi.forward_call(*a, **static)[0])(
        *operands(batch)
    ).block_until_ready()
