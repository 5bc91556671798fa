"""The layer benchmark over several GPUs: its JAX layers, the processes beside it, its records."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
layer, _implementations, _ranks, _shapes, _timing, _workers = map(
    importlib.import_module, "layer _implementations _ranks _shapes _timing _workers".split()
)

SHAPE = _shapes.Shape("tiny", T=24, K=2, E=4, H=128, I=128, R=2, peers=_shapes.RANK_PEERS)
# Takes ten times as long on rank 1, twice as long backward, and does otherwise what its pass says.
FAKE = """
import os, time

class Fake:
    num_devices = 1

    def __init__(self, rank, how):
        self.rank, self.how = rank, how

    def seconds(self, calls):
        if self.how == "late" and self.rank == 1:
            time.sleep(60)
        return calls * (10.0 if self.rank else 1.0) * (1 + (self.how == "forward_backward"))

def make(rank, num_ranks, rendezvous, how, *_):
    assert num_ranks == 2 and not os.path.exists(rendezvous)
    if how == "fail" and rank == 0:
        raise ValueError("no memory")
    if how == "end" and rank == 1:
        os._exit(3)
    if how == "fail":
        time.sleep(60)
    return Fake(rank, how)
"""
# Of each process, the results of its rank are those of one device.
CHECKED = """
import _implementations, _jax_ranks, _shapes
import numpy as np

def make(rank, num_ranks, rendezvous, pass_name, shape, *how):
    run = _jax_ranks.make(rank, num_ranks, rendezvous, pass_name, shape, *how)
    (found,) = run.call().addressable_shards
    one = {"bf16": _implementations.jax_megamoe, "fp8_block": _implementations.jax_megamoe_fp8}
    want = one[how[-1]]("forward", "none", _shapes.inputs(shape, "bf16")).call()
    rows = slice(rank * shape.T, (rank + 1) * shape.T)
    np.testing.assert_array_equal(np.asarray(found.data), np.asarray(want)[rows])
    return run
"""


@dataclasses.dataclass(frozen=True)
class Quick(_timing.Method):
    load_seconds: float = 0
    timed_seconds: float = 0
    rounds: int = 2


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that the processes can import."""
    (tmp_path / "fake_ranks.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_workers, "END_SECONDS", 0.2)
    return "fake_ranks"


@pytest.fixture
def workers(fake: str) -> Iterator[Any]:
    made = _workers.Workers(fake, 2)
    yield made
    made.close()


@pytest.mark.limit(300)
def test_processes_answer_and_one_that_fails_ends_all(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.begin([("forward",), ("forward_backward",)])
    runs = [workers.finish(how) for how in (("forward",), ("forward_backward",))]
    assert [run.num_devices for run in runs] == [2, 2]
    assert [run.seconds(3) for run in runs] == [30.0, 60.0]
    for how, why in (
        ("fail", r"^rank 0: ValueError: no memory$"),
        ("end", "^the process of rank 1 ended$"),
    ):
        workers.begin([(how,)])
        processes = workers._processes
        with pytest.raises(RuntimeError, match=why):
            workers.finish((how,))
        assert not any(process.is_alive() for process in processes)
        with pytest.raises(RuntimeError, match="the processes have ended, after another failure"):
            runs[0].seconds(1)
    workers.begin([("late",)])
    late = workers.finish(("late",))
    monkeypatch.setattr(_workers, "ANSWER_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not answer within 0 s"):
        late.seconds(1)


def test_a_module_that_is_missing_is_an_error() -> None:
    workers = _workers.Workers("no_such_module", 2)
    workers.begin([("forward",)])
    with pytest.raises(RuntimeError, match=r"rank [01]: ModuleNotFoundError: .*no_such_module"):
        workers.finish(("forward",))


@pytest.mark.limit(300)
@pytest.mark.parametrize("precision", ["bf16", "fp8_block"])
def test_a_process_a_rank_computes_what_one_device_does(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checked_ranks.py").write_text(CHECKED)
    monkeypatch.syspath_prepend(str(tmp_path))
    workers = _workers.Workers("checked_ranks", 2)
    try:
        how = ("forward", SHAPE, "none", "float32", precision)
        workers.begin([how])
        assert workers.finish(how).seconds(2) > 0
    finally:
        workers.close()


@pytest.mark.parametrize("impl", ["jax_megamoe", "jax_megamoe_fp8", "all_gather"])
@pytest.mark.parametrize("pass_name", _shapes.FLOP_FACTORS)
def test_layers_over_ranks_compute_what_one_device_does(impl: str, pass_name: str) -> None:
    mesh = _ranks.expert_mesh(2)
    arrays = _shapes.inputs(SHAPE, "bf16")
    assert arrays[0].shape == (48, 128)
    shared = _ranks.on_ranks(mesh, arrays)
    of_one = "jax_megamoe" if impl == "all_gather" else impl
    if impl == "all_gather":
        gathered = _ranks.gathered_layer(jax.lax.ragged_dot)
        run = _ranks.layer_run(gathered, mesh, pass_name, shared, check_vma=False)
    else:
        quantized = _ranks.quantized_on(mesh, shared) if impl == "jax_megamoe_fp8" else None
        run = _ranks.jax_megamoe(mesh, pass_name, "none", shared, "float32", quantized)
    assert run.num_devices == 2
    found = run.call()
    want = getattr(_implementations, of_one)(pass_name, "none", arrays).call()
    found, want = (r if isinstance(r, tuple) else (r,) for r in (found, want))
    for a, b in zip(found, want, strict=True):
        assert len(a.sharding.device_set) == 2
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)


def test_random_routing_fits_what_the_jax_peer_gathers() -> None:
    for shape in _shapes.SETS["ranks"]:
        rows = np.bincount(_shapes.expert_ids(shape).ravel(), minlength=shape.E)
        of_ranks = rows.reshape(shape.R, -1).sum(1)
        assert of_ranks.max() < (1 + _ranks.SPARE_ROWS / 10) * shape.T * shape.K


def test_the_program_over_ranks(
    fake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All parts are there, and a peer that is missing is a record; ours alone decides the exit."""
    monkeypatch.setattr(layer, "Method", Quick)
    monkeypatch.setattr(layer, "WORKER_MODULES", dict.fromkeys(layer.WORKER_MODULES, fake))
    monkeypatch.setitem(sys.modules, "tokamax", None)
    out = tmp_path / "layer-ep2.json"
    assert layer.main(["--set", "ranks-tiny", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["num_devices"] == 2
    keys = ("impl", "ep", "process_model", "sums_dtype", "save")
    found = [tuple(r[key] for key in keys) for r in written["records"]]
    ours, (tokamax, torch, _) = "jax_megamoe", _shapes.RANK_PEERS
    one, several = _ranks.PROCESS_MODELS
    float32, bf16 = _ranks.SUMS
    of_ours = ((2, one, float32), (2, one, bf16), (2, several, float32), (1, one, None))
    of_peers = ((tokamax, 2, one, None), (torch, 2, several, None))
    assert found == [
        *((ours, *how, "none") for how in of_ours),
        *((*peer, "none") for peer in of_peers),
        *((ours, *how, save) for how in of_ours for save in ("none", "gate_up")),
        *((*peer, "activations") for peer in of_peers),
    ]
    for record in written["records"]:
        assert ("error" in record) == (record["impl"] == tokamax)
        over_nvlink = record["impl"] == ours and record["ep"] == 2
        assert ("nvlink_bytes" in record) == over_nvlink
        if over_nvlink:
            found = record["nvlink_bytes"]
            assert found["counted"] is None and len(found["model"]) == 2
            of_both = record["pass"] == "forward_backward"
            assert found["model"][0]["routing_sent"] == 96 * 2 * 8 * (1 + of_both)
        assert record["tokens"] == 96 and record["weights_dtype"] == "bf16"
        over_ranks = record["impl"] == ours and record["ep"] == 2
        assert ("over_ep1" in record) == over_ranks
    of_processes = [r for r in written["records"] if r["process_model"] == several]
    for pass_name, ms in (("forward", 10_000.0), ("forward_backward", 20_000.0)):
        assert {r["ms"] for r in of_processes if r["pass"] == pass_name} == {ms}
    assert "| tiny, EP1 | forward_backward | jax_megamoe | gate_up |" in capsys.readouterr().out


def test_uneven_routings_are_held_against_the_busiest_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, zipf, one_hot = _shapes.SETS["ranks-cliffs"]
    assert (base.R, zipf.routing, one_hot.routing) == (2, "zipf", "one-hot")
    rows = _shapes.expert_rows(one_hot)
    assert rows.sum(1).tolist() == [0, 2 * 16384 * 8]
    busiest = max(map(_shapes.padded_rows, _shapes.expert_rows(base)))
    bound = _shapes.bound_ms(one_hot, base, 2.0, 4e12)
    assert bound["rows"] == pytest.approx(2.0 * 2 * 16384 * 8 / busiest)
    # One expert of 2048 x 768.
    assert bound["weights"] == pytest.approx(2 * 3 * 2048 * 768 / 4e12 * 1e3)

    monkeypatch.setattr(layer, "Method", Quick)
    out = tmp_path / "cliffs.json"
    assert layer.main(["--set", "ranks-tiny-cliffs", "--out", str(out)]) == 0
    written = json.loads(out.read_text())["records"]
    assert [(r["pass"], r["routing"], r["ep"]) for r in written] == [
        (pass_name, routing, 2)
        for pass_name in ("forward", "forward_backward")
        for routing in ("random", "one-hot")
    ]
    assert [r["bound_ratio"] for r in written[::2]] == [1, 1]
