"""The model of a layer at scale: its bytes, its limits, and what it was made from."""

import dataclasses
import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_megamoe.config import RANK_COUNTS, SAVES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_fsdp, _layer_model, _nvlink, _rates, _shapes, model = map(
    importlib.import_module, "_fsdp _layer_model _nvlink _rates _shapes model".split()
)

RECORDS = _rates.measured("layer.json")
FITS = {save: _layer_model.fits(RECORDS, save) for save in SAVES}
SMALL, LARGE = model.SHAPES


def over(shape: Any, **changes: Any) -> Any:
    return dataclasses.replace(shape, **changes)


def test_bytes_are_those_of_the_protocol() -> None:
    """The table of docs/protocol.md, in MB."""
    text = (ROOT / "docs" / "protocol.md").read_text()
    for shape, column in ((SMALL, 3), (LARGE, 4)):
        for pass_name in ("forward", "backward"):
            start = f"| **{pass_name}, each direction"
            row = next(line for line in text.splitlines() if line.startswith(start))
            want = float(row.split("|")[column].strip(" *MB"))
            found = _nvlink.nvlink_bytes(over(shape, R=2), pass_name)
            assert sum(found.values()) / 1e6 == pytest.approx(want, abs=0.06)
    of_two = _nvlink.nvlink_bytes(over(SMALL, R=2), "forward")
    half = _nvlink.nvlink_bytes(over(SMALL, R=2), "forward", "bf16")
    assert half == {**of_two, "sums": of_two["sums"] / 2}


def test_one_rank_moves_nothing_over_nvlink() -> None:
    for pass_name in ("forward", "backward", "forward_backward"):
        assert not any(_nvlink.nvlink_bytes(SMALL, pass_name).values())
    found = _layer_model.predict_pass(SMALL, "forward", FITS["none"]["forward"])
    assert found.share_ms == found.nvlink_ms == found.last_sums_ms == 0


@pytest.mark.parametrize("save", SAVES)
def test_one_gpu_takes_the_time_it_was_made_from(save: str) -> None:
    for shape in (SMALL, LARGE):
        for pass_name in ("forward", "forward_backward"):
            kept = save if pass_name == "forward_backward" else "none"
            fields = {"hidden": shape.H, "tokens": shape.T, "pass": pass_name, "save": kept}
            (record,) = _rates.ours(RECORDS, **fields)
            found = _layer_model.layer_ms(shape, pass_name, FITS[save], save=kept)
            assert found == pytest.approx(record["ms"], rel=1e-9)


@pytest.mark.parametrize("R", RANK_COUNTS)
def test_more_work_never_takes_less_time(R: int) -> None:
    """Of tokens, of rows on the busiest rank, and of wider experts."""
    shape = over(SMALL, R=R)
    for pass_name, save in model.cases():

        def ms(shape: Any, name: str = pass_name, kept: str = save, **how: Any) -> float:
            return _layer_model.layer_ms(shape, name, FITS[kept], save=kept, **how)

        tokens = [ms(over(shape, T=T)) for T in (1, 100, 1000, 1024, 5000, 16384, 70000)]
        uneven = [ms(shape, imbalance=more) for more in (1.0, 1.01, 1.5, 2.0)]
        wider = [ms(over(shape, I=I)) for I in range(64, 2049, 64)]
        for times in (tokens, uneven, wider):
            assert all(a <= b for a, b in itertools.pairwise(times)), times
        if R > 1:
            assert ms(shape, sums="bf16") <= ms(shape, sums="float32")


def test_rows_of_an_expert_are_those_of_random_routing() -> None:
    drawn = np.random.default_rng(0).poisson([[0.5], [64], [128], [1024]], (4, 20000))
    want = (-(-drawn // 128) * 128).mean(1)
    found = [_layer_model.padded(mean) for mean in (0.5, 64, 128, 1024)]
    np.testing.assert_allclose(found, want, rtol=0.02)
    assert _layer_model.padded(0) == 0
    rows = _shapes.padded_rows(_shapes.expert_rows(SMALL)[0])
    assert _layer_model.pool_rows(SMALL) == pytest.approx(rows, rel=5e-3)


def test_last_sums_wait_for_products_or_for_the_link() -> None:
    assert _layer_model.last_sums_ms(SMALL, 2.0, 0.0) == 2.0
    # A link that is slower than the products by far has all its work to do from the start.
    shape = over(SMALL, R=8)
    assert _layer_model.last_sums_ms(shape, 0.01, 5.0) == pytest.approx(5.0, rel=0.01)
    assert 2.0 < _layer_model.last_sums_ms(shape, 2.0, 1.8) < 3.8
    # With more ranks a token has fewer routes on each, whose sum is complete earlier.
    done = np.array([0.0, 0.5, 1.0])
    parts = [_layer_model.complete(over(SMALL, R=R), done) for R in RANK_COUNTS]
    assert all(p[0] == pytest.approx(0) and p[2] == pytest.approx(1) for p in parts)
    assert all(a[1] < b[1] for a, b in itertools.pairwise(parts))
    assert parts[0][1] == pytest.approx(2**-8)


def test_what_binds() -> None:
    """Products where experts are wide; NVLink where they are narrow; then half the bytes help."""
    shape = over(SMALL, R=8)
    least = {s: model.least_intermediate(shape, FITS["none"], s) for s in _nvlink.SUM_BYTES}
    assert 64 < least["bf16"] < least["float32"]
    for I, binds in ((least["float32"], "products"), (least["float32"] - 64, "NVLink")):
        found = _layer_model.predict(over(shape, I=I), "forward", FITS["none"])
        assert _layer_model.binds(found) == binds


def test_weights_over_nodes() -> None:
    weights = 2 * 3 * 2048 * 768 * 128
    of_rank = {R: _fsdp.gather(over(SMALL, R=R), 64) for R in RANK_COUNTS}
    assert {t.network for t in of_rank.values()} == {63 / 64 * weights / 8}
    assert [t.nvlink for t in of_rank.values()] == [weights * (1 / R - 1 / 8) for R in RANK_COUNTS]
    assert _fsdp.transfer_ms(of_rank[8]) == pytest.approx(of_rank[8].network / 50e6)
    assert _fsdp.gather(over(SMALL, R=8), 1) == _fsdp.Traffic(0, 0)

    found = _fsdp.hiding(over(SMALL, R=8), FITS["none"], 64)
    assert found.backward_ms == 2 * found.forward_ms and found.microbatches >= 1
    enough, fewer = (
        _fsdp.hiding(over(SMALL, R=8, T=T), FITS["none"], 64).microbatches
        for T in (found.tokens, found.tokens // 2)
    )
    assert (enough, fewer) == (1, 2)
    free = _fsdp.hiding(over(SMALL, R=8), FITS["none"], 1)
    assert (free.forward_ms, free.microbatches) == (0, 0)

    gb = {R: _fsdp.memory_gb(over(SMALL, R=R), 48, 8, save="none") for R in (1, 8)}
    assert gb[1]["weights"] == pytest.approx(8 * gb[8]["weights"]) and gb[1]["peers"] == 0
    assert gb[1]["state"] == gb[8]["state"] == pytest.approx(16 * weights / 2 * 48 / 64 / 1e9)


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    model.main(["--json", str(path)])
    printed, written = capsys.readouterr().out, json.loads(path.read_text())
    tables = model.tables()
    for title, table in tables.items():
        assert f"**{title}**" in printed and written[title] == json.loads(json.dumps(table))
    sources = [rate["source"] for rate in written["Rates"]]
    assert all(s.startswith(("measured", "assumed", "results/", "none")) for s in sources)
    rows = [r for r in written["A layer"] if (r["EP"], r["pass"]) == (1, "forward")]
    assert [r["over EP1"] for r in rows] == [1, 1]


def test_the_docs_have_the_tables_of_the_program() -> None:
    """Where results are measured anew: benchmarks/model.py --docs docs/scaling.md."""
    text, found = (ROOT / "docs" / "scaling.md").read_text(), model.tables()
    assert all(f"**{title}**\n\n| " in text for title in found)
    assert model.with_tables(text, found) == text
    other = {title: [{"a": 1}] for title in found}
    assert model.with_tables(text, other).count("| a |\n| --- |\n| 1 |\n") == len(found)


def test_times_of_two_gpus_stand_beside_their_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = _rates.ours(RECORDS, hidden=2048, **{"pass": "forward"})
    two = {**one, "ep": 2, "sums_dtype": "bf16", "process_model": "process_per_gpu", "ms": 3.0}
    (tmp_path / "layer-ep2.json").write_text(json.dumps({"records": [one, two]}))
    monkeypatch.setattr(_rates, "RESULTS", tmp_path)
    (line,) = model.beside_measured(FITS)
    predicted = _layer_model.layer_ms(over(SMALL, R=2), "forward", FITS["none"], sums="bf16")
    assert (line["EP"], line["sums"], line["measured ms"]) == (2, "bf16", 3.0)
    assert line["predicted ms"] == round(predicted, 3)


def test_a_fit_needs_two_widths() -> None:
    of_one = [r for r in RECORDS if r["hidden"] == 2048]
    with pytest.raises(ValueError, match=r"two widths .* those of \[\(2048, 768\)\]"):
        _layer_model.fits(of_one, "none")
