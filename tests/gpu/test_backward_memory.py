"""A backward takes the memory that is reported, and results of the wrong size become errors."""

from typing import Any

import jax
import numpy as np
import pytest

from jax_megamoe import _call_arrays, _ffi
from jax_megamoe.config import MegaMoEConfig
from tests.backward import assert_same, gradients, launched, operands
from tests.cases import BF16, F32
from tests.forward import SIZES, dims_of, random_batch

pytestmark = pytest.mark.gpu

NUM_GRADIENTS = 5


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("size", [SIZES[5], (16384, 8, 32, 512, 256)], ids=str)
def test_the_workspace_is_what_is_reported(size: tuple[int, ...], dtype: np.dtype) -> None:
    batch = random_batch(size, "distinct")
    dims, arrays = dims_of(batch), operands(batch, dtype)
    workspace = sum(a.num_bytes for a in _call_arrays.backward_results(dims, dtype)[NUM_GRADIENTS:])
    analysis = launched.lower(*arrays, dims=dims).compile().memory_analysis()
    assert analysis is not None
    casts = 0 if dtype == BF16 else sum(a.nbytes // 2 for a in arrays[4:])
    temp_bytes = analysis.temp_size_in_bytes
    assert workspace + casts <= temp_bytes <= 1.01 * (workspace + casts) + 2**26


def test_layers_share_one_workspace() -> None:
    """A stack of 16 layers takes what one of 2 takes and the inputs that a backward needs."""
    batch = random_batch(SIZES[5], "distinct")
    dims = dims_of(batch)
    workspace = sum(a.num_bytes for a in _call_arrays.backward_results(dims, BF16)[NUM_GRADIENTS:])

    def temp_bytes(num_layers: int) -> int:
        def stack(dy: Any, *arrays: Any) -> Any:
            gradients = []
            for _ in range(num_layers):
                dy, *others = launched(dy, *arrays, dims=dims)
                gradients.append(others[0])
            return dy, gradients

        analysis = jax.jit(stack).lower(*operands(batch)).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    few, many = temp_bytes(2), temp_bytes(16)
    assert few >= workspace
    assert many < few + workspace // 2


@pytest.mark.parametrize(
    "name", ["dx", "dw", "dw_down", "row_slot", "dy_pool", "wh", "dw_partial", "counters"]
)
def test_a_result_of_the_wrong_size_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a version of the Python part that does not belong to the extension would ask for."""
    batch = random_batch(SIZES[3], "distinct")
    right = _call_arrays.backward_results(dims_of(batch), BF16)
    wrong = [
        a._replace(shape=(a.shape[0] + 1, *a.shape[1:])) if a.name == name else a for a in right
    ]
    assert wrong != right
    want = gradients(batch)
    monkeypatch.setattr(_ffi, "backward_results", lambda *_: wrong)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*result {name} has"):
        call(batch)
    monkeypatch.undo()
    assert_same(call(batch), want)


def call(batch: Any) -> Any:
    """The gradients, by a program that is compiled anew."""
    static: dict[str, Any] = {"dims": dims_of(batch), "config": MegaMoEConfig(), "axis_name": None}
    program = jax.jit(lambda *a: _ffi.backward_call(*a, **static))
    return jax.block_until_ready(program(*operands(batch)))
