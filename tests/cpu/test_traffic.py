"""What crosses NVLink, counted by the kernels on the emulated machine: the bytes of the model."""

import importlib
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_megamoe import quantize_expert_weights
from jax_megamoe._call_arrays import TRAFFIC_RECORDS, trace_result
from jax_megamoe.config import COMBINE_DTYPES, Dims, MegaMoEConfig
from jax_megamoe.plan import backward_steps, forward_steps
from tests import cases, emulated, fp8, layer
from tests.cases import BF16, ROUTINGS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_nvlink, _shapes, _trace, _traffic = map(
    importlib.import_module, ("_nvlink", "_shapes", "_trace", "_traffic")
)

T, K, E, H, I = 48, 4, 16, 192, 64


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("routing", ["distinct", "invalid", "duplicates", "one_expert", "nothing"])
def test_the_kernels_count_what_the_model_says(routing: str, ranks: int) -> None:
    """Both passes, beside each other in the same memory, and the sums in both dtypes."""
    ids = ROUTINGS[routing](tokens=T, choices=K, experts=E)
    batch = cases.normal(ids, num_experts=E, hidden=H, intermediate=I, dtype=BF16)
    dims = Dims(T=T // ranks, K=K, E=E, R=ranks, H=H, I=I)
    calls = [emulated.Call(batch, is_backward=b, trace=True) for b in (False, True)]
    for dtype in COMBINE_DTYPES:
        results = emulated.run(calls, ranks=ranks, seed=ranks, combine_dtype=dtype)
        for is_backward, (*_, records) in zip((False, True), results, strict=True):
            for rank, of_rank in enumerate(np.split(records, ranks)):
                by_rank = ids.reshape(ranks, -1, K)
                how = {"is_backward": is_backward, "combine_dtype": dtype}
                assert _traffic.counted(of_rank) == _traffic.model(by_rank, dims, rank, **how)
                kinds = set(_trace.decode(of_rank, ranks).kind)
                assert ("dispatch" in kinds) == bool(np.any(by_rank // (E // ranks) == rank))
                assert "finish" in kinds


@pytest.mark.parametrize("keep", [False, True])
def test_tokens_cross_as_codes_in_fp8(keep: bool) -> None:
    """To a forward as nothing else; a backward takes bf16, too."""
    ids = ROUTINGS["invalid"](tokens=T, choices=K, experts=E)
    batch = cases.normal(ids, num_experts=E, hidden=640, intermediate=128, dtype=BF16)
    dims = Dims(T=T // 2, K=K, E=E, R=2, H=640, I=128)
    how = {"ranks": 2, "trace": True, "pool_factor": 2.0}
    weights = fp8.quantized_weights(batch)
    *kept, forward = emulated.forward_fp8(batch, weights, keep=keep, **how)
    how["gate_up"] = kept[-1] if keep else None
    *_, backward = emulated.backward_fp8(batch, weights, **how)
    for is_backward, records in ((False, forward), (True, backward)):
        for rank, of_rank in enumerate(np.split(records, 2)):
            right = _traffic.model(
                ids.reshape(2, -1, K),
                dims,
                rank,
                is_backward=is_backward,
                precision="fp8_block",
                takes_gate_up=keep,
            )
            assert _traffic.counted(of_rank) == right
    assert _nvlink.row_bytes(640, False, "fp8_block", False) == 640 + 32
    assert _nvlink.row_bytes(640, True, "fp8_block", keep) == 4 * 640 + (2 - keep) * 672


def test_a_token_crosses_once_for_each_rank() -> None:
    """The sums of the model by hand: rank 1 of 2 has the experts 2 and 3."""
    ids = np.array([[[2, 3], [0, 3], [0, 1], [-1, 4]], [[2, 3], [3, 3], [0, 2], [0, 0]]])
    dims = Dims(T=4, K=2, E=4, R=2, H=64, I=64)
    found = _traffic.model(ids, dims, 1, is_backward=True, combine_dtype="bfloat16")
    assert found == {
        "inputs_read": 2 * 64 * 2 * 2,
        "sums_sent": 2 * 64 * 2,
        "dw_sent": 3 * 4,
        "routing_sent": 4 * 2 * 8,
        "flags_sent": 3 * 4,
    }
    found = _traffic.model(ids, dims, 0, is_backward=False)
    assert (found["inputs_read"], found["sums_sent"]) == (2 * 128, 2 * 256)


@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize("pass_name", ["forward", "backward", "forward_backward"])
def test_the_program_that_counts_returns_the_records_of_all_ranks(
    pass_name: str, save: str, precision: str
) -> None:
    shape = _shapes.Shape("", T=24, K=2, E=4, H=128, I=128, R=2)
    dims = Dims(T=24, K=2, E=4, R=2, H=128, I=128)
    config = MegaMoEConfig(backend="cuda", save=save, precision=precision)
    arrays = _shapes.inputs(shape, "bf16")
    quantized = quantize_expert_weights(*arrays[3:]) if precision == "fp8_block" else None
    run = _traffic.traced(layer.expert_mesh(2), shape, pass_name, config)
    found = jax.eval_shape(run, quantized, *arrays)
    steps = {"forward": forward_steps(dims), "backward": backward_steps(dims)}
    counted = steps if pass_name == "forward_backward" else [pass_name]
    right = [2 * trace_result(dims, steps[name]).shape[0] for name in counted]
    assert [a.shape for a in found] == [(rows, 4) for rows in right]


def test_the_counts_are_those_of_the_kernels() -> None:
    header = (ROOT / "cuda" / "shared" / "trace.h").read_text()
    assert tuple(re.findall(r"unsigned long long (\w+);", header)) == _traffic.COUNTS
    assert -(-len(_traffic.COUNTS) * 8 // 16) == TRAFFIC_RECORDS
