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

SHAPE = _shapes.Shape("tiny", T=24, K=2, E=4, H=16, I=8, R=2, peers=_shapes.RANK_PEERS)
# Takes ten times as long on rank 1, and does otherwise what its pass says.
FAKE = """
import os, time

class Fake:
    num_devices = 1

    def __init__(self, rank, how):
        self.rank, self.how = rank, how

    def seconds(self, calls):
        if self.how == "late" and self.rank == 1:
            time.sleep(60)
        return calls * (10.0 if self.rank else 1.0)

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
    workers.begin("forward")
    assert workers.finish() is workers and workers.num_devices == 2
    assert workers.seconds(3) == 30.0
    for how, why in (
        ("fail", r"^rank 0: ValueError: no memory$"),
        ("end", "^the process of rank 1 ended$"),
    ):
        workers.begin(how)
        processes = workers._processes
        with pytest.raises(RuntimeError, match=why):
            workers.finish()
        assert not any(process.is_alive() for process in processes)
    workers.begin("late")
    workers.finish()
    monkeypatch.setattr(_workers, "ANSWER_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] did not answer within 0 s"):
        workers.seconds(1)


def test_a_module_that_is_missing_is_an_error() -> None:
    workers = _workers.Workers("no_such_module", 2)
    workers.begin("forward")
    with pytest.raises(RuntimeError, match=r"rank [01]: ModuleNotFoundError: .*no_such_module"):
        workers.finish()


@pytest.mark.parametrize("impl", ["jax_megamoe", "all_gather"])
@pytest.mark.parametrize("pass_name", _ranks.PASSES)
def test_layers_over_ranks_compute_what_one_device_does(impl: str, pass_name: str) -> None:
    mesh = _ranks.expert_mesh(2)
    arrays = _shapes.inputs(SHAPE, "bf16")
    assert arrays[0].shape == (48, 16)
    shared = _ranks.on_ranks(mesh, arrays)
    if impl == "jax_megamoe":
        run = _ranks.jax_megamoe(mesh, pass_name, "none", shared)
    else:
        gathered = _ranks.gathered_layer(jax.lax.ragged_dot)
        run = _ranks.layer_run(gathered, mesh, pass_name, shared, check_vma=False)
    assert run.num_devices == 2
    found = run.call()
    want = _implementations.jax_megamoe(pass_name, "none", arrays).call()
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

    @dataclasses.dataclass(frozen=True)
    class Quick(_timing.Method):
        load_seconds: float = 0
        timed_seconds: float = 0
        rounds: int = 2

    monkeypatch.setattr(layer, "Method", Quick)
    monkeypatch.setattr(layer, "TORCH_RANKS", fake)
    monkeypatch.setitem(sys.modules, "tokamax", None)
    out = tmp_path / "layer-ep2.json"
    assert layer.main(["--set", "ranks-tiny", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["num_devices"] == 2
    found = [(r["impl"], r["ep"], r["save"]) for r in written["records"]]
    ours, tokamax, torch = "jax_megamoe", *_shapes.RANK_PEERS
    both = [(ours, ep, save) for ep in (2, 1) for save in ("none", "gate_up")]
    assert found == [
        *((ours, ep, "none") for ep in (2, 1)),
        *((peer, 2, "none") for peer in (tokamax, torch)),
        *both,
        *((peer, 2, "activations") for peer in (tokamax, torch)),
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
        of_torch = record["impl"] == torch
        assert record["process_model"] == ("process_per_gpu" if of_torch else "single_process")
        assert record["tokens"] == 96 and record["weights_dtype"] == "bf16"
    assert {r["ms"] for r in written["records"] if r["impl"] == torch} == {10_000.0}
    assert "| tiny, EP1 | forward_backward | jax_megamoe | gate_up |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="over several GPUs the passes are forward, forward_back"):
        layer.main(["--set", "ranks-tiny", "--passes", "backward"])
