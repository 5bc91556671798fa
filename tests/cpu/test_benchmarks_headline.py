"""The benchmark of one node: all of it runs, small, on two simulated devices, and its table says
what its records say."""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
headline, _headline_table, _layer_model, _ranks, _shapes, _timing = map(
    importlib.import_module,
    "headline _headline_table _layer_model _ranks _shapes _timing".split(),
)

OURS, FP8 = _ranks.PRECISIONS
ONE, SEVERAL = _ranks.PROCESS_MODELS
# Takes ten seconds a call.
FAKE = """
class Fake:
    num_devices = 2

    def seconds(self, calls):
        return 10.0 * calls

def make(rank, num_ranks, rendezvous, *how):
    assert num_ranks == 2
    return Fake()
"""


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results; the processes a GPU are faked, and a round is a call of each."""
    (tmp_path / "fake_of_rank.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    fakes = dict.fromkeys(headline.WORKER_MODULES, "fake_of_rank")
    monkeypatch.setattr(headline, "WORKER_MODULES", fakes)
    method = _timing.Method(load_seconds=0, timed_seconds=0, rounds=1)
    monkeypatch.setattr(headline, "METHOD", method)
    monkeypatch.setitem(sys.modules, "tokamax", None)
    return tmp_path


@pytest.mark.limit(600)
def test_the_program(quick: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = quick / "headline.json"
    stages = ["oracle", "30B forward_backward", "235B backward", f"uneven {FP8}"]
    how = ["--gpus", "2", "--tiny", "--within", "100000", "--out", str(out), "--stages", *stages]
    assert headline.main(how) == 0
    written = json.loads(out.read_text())
    assert written["num_devices"] == 2
    assert written["oracle"] == {"cases": 12, "wrong": 0}
    assert written["not_run"] == {} and set(written["seconds"]) == set(stages)
    uneven = [r for r in written["records"] if "bound_ratio" in r]
    beside = [r for r in written["records"] if "bound_ratio" not in r]
    of_ours = [(i, *how) for i in (OURS, FP8) for how in ((ONE, "float32"), (ONE, "bf16"))]
    of_ours += [(i, SEVERAL, "float32") for i in (OURS, FP8)]
    peers = [(peer, SEVERAL, None) for peer in (_ranks.EXCHANGED, _ranks.EXCHANGED_FP8)]
    peers.append((_ranks.GATHERED, ONE, None))
    keys = ("impl", "process_model", "sums_dtype")
    for pass_name, hidden in (("forward_backward", 128), ("backward", 256)):
        same = [r for r in beside if (r["pass"], r["hidden"]) == (pass_name, hidden)]
        assert {tuple(r[k] for k in keys) for r in same} == {*of_ours, *peers}
        assert len(same) == len(of_ours) + len(peers)
    for record in beside:
        assert ("error" in record) == (record["impl"] == _ranks.GATHERED)
        counted = record["impl"] in (OURS, FP8) and record["pass"] == "forward_backward"
        assert ("nvlink_bytes" in record) == counted
    assert [r["routing"] for r in uneven] == ["random", "zipf", "one-hot"]
    assert all(r["impl"] == FP8 and r["bound_ratio"] > 0 for r in uneven)
    assert len(written["lines"]) == 2 * 6 + 3
    table = capsys.readouterr().out.splitlines()[-2 - len(written["lines"]) :]
    assert table == _headline_table.table(written["lines"]).splitlines()


def test_what_has_no_time_left_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what hangs is given up, with the table of what is there."""
    options = headline.parse(["--gpus", "2", "--tiny"])
    stopped: list[int] = []
    done = headline.Stage("done", 1, lambda _: None)
    fails = headline.Stage("fails", 1, lambda _: 1 / 0)
    long = headline.Stage("long", 3600, lambda run: run.named.append(("", {})))
    of_30s = headline.Headline(options, {}, time.monotonic() + 30)
    of_30s.run_stages([done, fails, long])
    assert list(of_30s.seconds) == ["done", "fails"] and not of_30s.passed
    monkeypatch.setattr(headline.os, "_exit", stopped.append)
    of_30s.give_up()
    *_, oracle, failed, late, head, rule = capsys.readouterr().out.splitlines()
    assert oracle == "oracle: did not run"
    assert failed == "not run: fails: ZeroDivisionError: division by zero"
    assert late.startswith("not run: long: ") and late.endswith(" s left of 3600")
    assert head.startswith("| (H, I) |") and rule.startswith("| --- |")
    assert stopped == [1]
    of_30s.report()
    assert capsys.readouterr().out == ""
    of_30s.not_run.clear()
    assert of_30s.passed
    of_30s.oracle = {"cases": 12, "wrong": 1}
    assert not of_30s.passed


def record(impl: str, ms: float, **fields: Any) -> dict[str, Any]:
    described = {"pass": "forward_backward", "ep": 8, "tokens": 16384, "hidden": 2048}
    described |= {"intermediate": 768, "experts": 128, "top_k": 8, "routing": "random"}
    described |= {"save": "gate_up", "sums_dtype": "float32", "process_model": ONE}
    return {**described, "impl": impl, "ms": ms, "fraction": 0.5, **fields}


def test_lines_hold_ours_against_peers_aims_and_the_model() -> None:
    shape = _shapes.Shape("", T=16384, K=8, E=128, H=2048, I=768, R=8)
    records, predicted = [], {}
    for impl, precision in _ranks.PRECISIONS.items():
        fits = _layer_model.fits_of(precision, "gate_up")
        how = {"save": "gate_up", "precision": precision}
        predicted[impl] = _layer_model.layer_ms(shape, "forward_backward", fits, **how)
        records += [record(impl, predicted[impl] * by) for by in (1.0, 1.09, 1.2, 0.8)]
    ms = predicted[FP8]
    assert ms < predicted[OURS]
    records.append(record(_ranks.EXCHANGED, 3.2 * predicted[OURS]))
    records.append(record(_ranks.EXCHANGED_FP8, 3.0 * ms))
    records.append(record(_ranks.EXCHANGED, 1.0, hidden=4096))
    records.append({**record(OURS, 0.0), "error": "no memory"})
    lines = _headline_table.judged(records)
    of_ours, of_fp8, failed = lines[:4], lines[4:8], lines[8]
    assert [line["near predicted"] for line in of_ours] == [True, True, False, False]
    assert [line["reached"] for line in of_ours] == [True, False, False, True]
    assert [line["reached"] for line in of_fp8] == [False, False, False, True]
    assert [line["over predicted"] for line in of_fp8] == [1.0, 1.09, 1.2, 0.8]
    assert of_fp8[0]["PyTorch FP8"] == 3.0 and of_fp8[0]["aim"] == "3.11 PyTorch FP8"
    assert of_ours[0]["PyTorch bf16"] == 3.2 and "JAX bf16" not in of_ours[0]
    assert failed["error"] == "no memory" and _headline_table.failed(records)
    assert not _headline_table.failed(records[:-1])
    _, _, *rows = _headline_table.table(lines).splitlines()
    assert "3.11 PyTorch bf16, reached" in rows[0] and "**not reached**" in rows[1]
    assert "**off**" not in rows[1] and "**off**" in rows[2] and "no memory" in rows[8]
    assert len({row.count("|") for row in rows}) == 1
