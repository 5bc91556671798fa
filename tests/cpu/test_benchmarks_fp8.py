"""The table of FP8's errors, by the reference."""

import importlib
import itertools
import json
import sys
from pathlib import Path

import pytest

from tests import cases
from tests.cases import Results

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
fp8_errors = importlib.import_module("fp8_errors")

SMALL = ["--shape", "128,4,256,128", "--gates=0,-4"]


def test_the_reference_is_as_far_off_as_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "errors.json"
    assert fp8_errors.main([*SMALL, "--out", str(out)]) == 0
    records = json.loads(out.read_text())["records"]
    found = {(r["gate"], r["save"], r["of"]) for r in records}
    assert found == set(itertools.product((0, -4), ("none", "gate_up"), Results._fields))
    for r in records:
        assert 0.01 < r["recipe"][0] <= r["recipe"][1] <= r["recipe"][2] < 0.1, r
        assert r["ratio"] <= 1.02 and r["off"] <= 2e-2, r
    assert capsys.readouterr().out.count("\n| ") == 2 + len(records)


def test_what_is_not_of_the_recipe_would_be_seen() -> None:
    (_, found, batch), *_ = fp8_errors.results((64, 2, 128, 128), 0)
    exact = {r["of"]: r for r in fp8_errors.rows(batch, cases.dense(batch))}
    assert all(r["ratio"] == 0 and r["off"] > 1e-2 for r in exact.values())
    # One expert of one result is enough.
    dw_up = found.dw_up.copy()
    dw_up[1] *= 1.1
    spoilt = {r["of"]: r for r in fp8_errors.rows(batch, found._replace(dw_up=dw_up))}
    assert [name for name, r in spoilt.items() if r["ratio"] > 1.02] == ["dw_up"]
