"""The parts of the benchmarks that need no GPU: shapes, bound, rounds, records, table."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
training, _implementations, _measured, _record, _report, _shapes, _timing = map(
    importlib.import_module,
    "training _implementations _measured _record _report _shapes _timing".split(),
)

TINY = _shapes.Shape("tiny", T=24, K=2, E=4, H=16, I=8, peers=("lax_ragged_dot",))
QUICK = _timing.Method(load_seconds=0, timed_seconds=0, rounds=2)
FIELDS = (
    "impl pass dtype ep tokens hidden intermediate experts top_k routing save weights_dtype "
    "process_model sums_dtype seed ms ms_spread clock_mhz tflops matmul_tflops fraction"
).split()


@pytest.mark.parametrize("routing", ["random", "zipf"])
def test_routings_choose_distinct_experts(routing: str) -> None:
    shape = _shapes.Shape("", T=4096, K=4, E=64, H=1, I=1, routing=routing)
    ids = _shapes.expert_ids(shape)
    assert ids.shape == (4096, 4) and ids.dtype == np.int32
    assert all(len(set(row)) == 4 for row in ids[:100].tolist())
    counts = np.bincount(ids.ravel(), minlength=64)
    assert len(counts) == 64
    # Of an even share of 256 rows; the most popular of Zipf's is chosen by most tokens.
    assert (counts.max() < 400) if routing == "random" else (counts.max() > 1500)


def test_one_hot_routing_and_an_unknown_one() -> None:
    one_hot = _shapes.Shape("", T=8, K=2, E=4, H=1, I=1, routing="one-hot")
    assert set(_shapes.expert_ids(one_hot).ravel().tolist()) == {2}
    with pytest.raises(ValueError, match="routing = 'even'"):
        _shapes.expert_ids(_shapes.Shape("", T=8, K=2, E=4, H=1, I=1, routing="even"))


def test_bound_is_the_padded_rows_and_the_weights() -> None:
    assert _shapes.padded_rows(np.array([0, 1, 128, 129])) == 512
    base = _shapes.Shape("base", T=1024, K=2, E=4, H=64, I=32, routing="one-hot")
    itself = _shapes.bound_ms(base, base, 3.0, 1e9)
    # One expert has rows: three bf16 matrices of 64 x 32 at 1 GB/s.
    assert itself == {"rows": 3.0, "weights": pytest.approx(6 * 64 * 32 / 1e9 * 1e3)}
    few = _shapes.Shape("few", T=10, K=1, E=8, H=128, I=32, routing="one-hot")
    assert _shapes.bound_ms(few, base, 3.0, 1e9)["rows"] == pytest.approx(3.0 * 128 * 2 / 2048)


def test_sets_hold_what_their_names_say() -> None:
    sizes = [(s.name, s.H, s.I, s.T, s.E, s.K) for s in _shapes.SETS["main"][:2]]
    assert sizes == [("30B", 2048, 768, 16384, 128, 8), ("235B", 4096, 1536, 16384, 128, 8)]
    assert [
        dataclasses.replace(s, R=1, peers=_shapes.PEERS) for s in _shapes.SETS["ranks"]
    ] == list(_shapes.SETS["main"][:2])
    cliffs = _shapes.SETS["cliffs"]
    assert {s.T for s in cliffs} == {4096, 16384, 65536} and {s.K for s in cliffs} == {1, 8}
    assert {s.E for s in cliffs} == {8, 128, 256}
    assert {s.routing for s in cliffs} == set(_shapes.ROUTINGS)
    for shapes in _shapes.SETS.values():
        assert len({s.name for s in shapes}) == len(shapes)
    flops = {name: _shapes.BASE.useful_flops(name) for name in _shapes.FLOP_FACTORS}
    assert flops["forward_backward"] == 18 * 16384 * 8 * 2048 * 768
    assert flops["forward"] + flops["backward"] == flops["forward_backward"]
    frozen = {name: _shapes.BASE.useful_flops(name, trainable=False) for name in flops}
    assert frozen["forward"] == flops["forward"] == frozen["backward"]
    assert frozen["forward"] + frozen["backward"] == frozen["forward_backward"]


def test_rounds_alternate_and_a_failure_becomes_its_text() -> None:
    order: list[str] = []
    waited: list[str] = []

    def run(name: str) -> object:
        def call() -> str:
            if order[-1:] != [name]:
                order.append(name)
            if name == "broken" and len(order) > 4:
                raise RuntimeError("no memory")
            return name

        return _timing.Run(call, waited.append)

    names = ("a", "b", "broken")
    method = _timing.Method(load_seconds=0.001, timed_seconds=0.001, rounds=4)
    figures, errors = _timing.measure({n: run(n) for n in names}, method, None)
    assert order == ["a", "b", "broken", "b", "a", "b", "broken", "b", "a"]
    assert errors == {"broken": "RuntimeError: no memory"}
    assert set(figures) == {"a", "b"} and set(waited) == set(names)
    assert all(0 < f.ms < 1 and f.ms_spread >= 0 and f.clock_mhz is None for f in figures.values())


def test_clock_is_the_median_of_the_samples_between() -> None:
    clock = _timing.Clock(lambda: (1500, 1500))
    mhz = {1.0: (100, 90), 2.0: (1400, 1300), 2.5: (1300, 1350), 3.0: (1450, 1250), 9.0: (200, 90)}
    clock._samples = list(mhz.items())
    assert clock.median_mhz(1.5, 3.5) == 1400
    assert clock.median_mhz(1.5, 3.5, num_devices=2) == 1300
    assert clock.median_mhz(4, 5) is None


def test_records_table_and_picture(tmp_path: Path) -> None:
    figures = _timing.Figures(ms=2.0, ms_spread=0.1, clock_mhz=1300)
    choice = ("forward", _shapes.BASE)
    ours = _measured.record(_measured.Variant("jax_megamoe"), *choice, figures, 690.0)
    assert sorted(ours) == sorted(FIELDS)
    assert (ours["ep"], ours["save"], ours["process_model"]) == (1, "none", "single_process")
    assert ours["tflops"] == pytest.approx(6 * 16384 * 8 * 2048 * 768 / 2e-3 * 1e-12, abs=0.05)
    assert ours["fraction"] == pytest.approx(ours["tflops"] / 690, abs=1e-4)
    torch, tokamax = map(_measured.Variant, ("torch_grouped_mm", "tokamax_ragged_dot"))
    slower = _measured.record(torch, *choice, _timing.Figures(5.0, 0, None), 690.0)
    failed = _measured.record(tokamax, *choice, "ImportError: no\ntokamax", 690.0)
    assert sorted(failed) == sorted([*FIELDS[:15], "error"])
    named = [("30B", r) for r in (ours, slower, failed)]
    lines = _report.table(named).splitlines()
    assert lines[2].endswith("| 2.000 | 0.100 | 1300 | 618.5 | 0.896 | 1.00 |  |  |")
    assert "| 5.000 | 0.000 |  |" in lines[3] and lines[3].endswith("| 2.50 |  |  |")
    assert "ImportError: no tokamax" in lines[4]
    assert {line.count("|") for line in lines} == {len(_report.COLUMNS) + 1}
    kept = ours | {"save": "gate_up", "weights_dtype": "float32"}
    assert _report._how(ours) == "jax_megamoe" and _report._how(slower) == "torch_grouped_mm"
    assert _report._how(kept) == "jax_megamoe, save gate_up, float32 weights"
    over = _measured.Variant("jax_megamoe", ep=2, process_model="process_per_gpu", sums="bf16")
    half = _measured.record(over, *choice, figures, 690.0)
    assert _report._how(half) == "jax_megamoe, bf16 sums, a process a GPU"
    # Peers are held against float32 sums.
    assert _report._same_work(half, [half]) is None
    _report.draw(tmp_path / "bars.png", named, "cpu")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_variants_are_those_of_a_pass() -> None:
    def names(pass_name: str, **chosen: object) -> list[str]:
        return [str(v) for v in _measured.variants(TINY, pass_name, **chosen)]

    ours, peer = "jax_megamoe, save", "lax_ragged_dot, save"
    dtypes = ("bf16 weights", "float32 weights")
    kept = [f"{ours} {save}, {d}" for d in dtypes for save in ("none", "gate_up")]
    assert names("forward") == [f"{ours} none, {d}" for d in dtypes] + [f"{peer} none, {dtypes[0]}"]
    for pass_name in ("backward", "forward_backward"):
        assert names(pass_name) == [*kept, f"{peer} activations, {dtypes[0]}"]
    assert names("backward", saves=["gate_up"], weights=["float32"]) == [kept[3]]
    assert names("forward", only=["lax_ragged_dot"]) == [f"{peer} none, {dtypes[0]}"]
    both = ["jax_megamoe", "jax_megamoe_frozen"]
    frozen = [name.replace(both[0], both[1]) for name in kept]
    assert names("forward_backward", only=both) == [*kept, *frozen]
    assert names("forward", only=both) == [f"{ours} none, {d}" for d in dtypes]
    clamped = [name.replace(both[0], "jax_megamoe_clamped_bias") for name in kept]
    only = [both[0], "jax_megamoe_clamped_bias"]
    assert names("forward_backward", only=only) == [*kept, *clamped]
    assert names("forward", only=only[1:]) == [clamped[0], clamped[2]]


def test_what_fails_is_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A peer that is missing, and a save that is refused."""

    def refused(pass_name: str, save: str, arrays: list[object]) -> object:
        if save == "gate_up":
            raise RuntimeError("UNIMPLEMENTED: do not keep g and u")
        return _implementations.jax_megamoe(pass_name, save, arrays)

    monkeypatch.setitem(sys.modules, "tokamax", None)
    ours = _implementations.Implementation("jax_megamoe", refused, ("none", "gate_up"))
    monkeypatch.setitem(_implementations.IMPLEMENTATIONS, "jax_megamoe", ours)
    shape = dataclasses.replace(TINY, peers=("tokamax_ragged_dot", "lax_ragged_dot"))
    chosen = _measured.variants(shape, "forward_backward", weights=["bf16"])
    named = _measured.run_beside_peers(shape, "forward_backward", chosen, QUICK, None, 64)
    none, gate_up, tokamax, lax = records = [record for _, record in named]
    assert sorted(none) == sorted(lax) == sorted(FIELDS)
    assert [r["save"] for r in records] == ["none", "gate_up", "activations", "activations"]
    assert gate_up["error"] == "RuntimeError: UNIMPLEMENTED: do not keep g and u"
    assert "tokamax" in tokamax["error"]
    _record.write(tmp_path / "results" / "layer.json", records)
    written = json.loads((tmp_path / "results" / "layer.json").read_text())
    assert {"commit", "dirty", "date", "device", "num_devices", "versions"} <= set(written)
    assert written["records"] == records


def test_shapes_against_their_bound() -> None:
    shapes = [TINY, dataclasses.replace(TINY, name="more", T=48)]
    records = [r for _, r in _measured.run_against_bound(shapes, QUICK, None, 64, 2**12)]
    assert records[0]["bound_ratio"] <= 1.0  # the base against itself, or against its weights
    for record in records:
        assert record["bound_ratio"] == pytest.approx(record["ms"] / record["bound_ms"], rel=0.1)


@pytest.mark.parametrize("save", ["none", "gate_up"])
@pytest.mark.parametrize(
    ("pass_name", "results"), [("forward", 1), ("backward", 5), ("forward_backward", 6)]
)
def test_the_ragged_layer_computes_the_same(pass_name: str, results: int, save: str) -> None:
    arrays = _shapes.inputs(TINY, "bf16")
    ours = _implementations.jax_megamoe(pass_name, save, arrays).call()
    peers = _implementations.lax_ragged_dot(pass_name, "activations", arrays).call()
    ours, peers = (r if isinstance(r, tuple) else (r,) for r in (ours, peers))
    assert len(ours) == len(peers) == results
    for a, b in zip(ours, peers, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)


def test_a_backward_is_that_of_the_whole() -> None:
    arrays = _shapes.inputs(TINY, "float32")
    of_pass = {
        name: _implementations.jax_megamoe(name, "none", arrays).call()
        for name in ("forward", "backward", "forward_backward")
    }
    y, *gradients = of_pass["forward_backward"]
    assert [a.dtype for a in gradients[2:]] == [np.float32] * 3
    for a, b in zip((of_pass["forward"], *of_pass["backward"]), (y, *gradients), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("save", ["none", "gate_up"])
def test_frozen_experts_have_the_same_other_gradients(save: str) -> None:
    arrays = _shapes.inputs(TINY, "bf16")
    for pass_name, count in (("backward", 2), ("forward_backward", 3)):
        frozen = _implementations.jax_megamoe_frozen(pass_name, save, arrays).call()
        trained = _implementations.jax_megamoe(pass_name, save, arrays).call()
        assert len(frozen) == count and len(trained) == count + 3
        for a, b in zip(frozen, trained[:count], strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("save", ["none", "gate_up"])
def test_the_experts_of_gpt_oss_have_gradients_of_biases(save: str) -> None:
    arrays = _shapes.inputs(TINY, "bf16")
    run = _implementations.jax_megamoe_clamped_bias
    y, *found = run("forward_backward", save, arrays).call()
    assert [a.shape for a in found[5:]] == [(TINY.E, n) for n in (TINY.I, TINY.I, TINY.H)]
    np.testing.assert_array_equal(np.asarray(run("forward", "none", arrays).call()), y)
    gradients = run("backward", save, arrays).call()
    assert len(gradients) == len(found) == 8
    for a, b in zip(gradients, found, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert np.any(np.asarray(a, np.float32))


def test_a_record_of_frozen_experts() -> None:
    figures = _timing.Figures(ms=2.0, ms_spread=0.1, clock_mhz=1300)
    frozen = _measured.Variant("jax_megamoe_frozen", save="gate_up")
    found = _measured.record(frozen, "backward", _shapes.BASE, figures, 690.0)
    assert found["tflops"] == pytest.approx(6 * 16384 * 8 * 2048 * 768 / 2e-3 * 1e-12, abs=0.05)
    assert _report._how(found) == "jax_megamoe_frozen, save gate_up"


def test_two_training_runs_are_held_beside_each_other(tmp_path: Path) -> None:
    right = np.linspace(5, 2, 40)
    losses = right.copy()
    losses[6] *= 0.97
    losses[-training.LAST :] += 0.01
    apart = training.differences(losses, right)
    assert (apart["largest"], apart["at_step"]) == (pytest.approx(0.03), 7)
    assert apart["of_last_20"] == pytest.approx(0.01 / right[-20:].mean())
    # 1,000 tokens at 10 a ms, but for steps that wait for a compiler.
    rates = np.full(40, 10_000.0)
    rates[:20] = 1.0
    run = {"train_loss": losses, "tokens_per_s": rates}
    assert training.record("cuda", run, 1000)["step_ms"] == 100
    training.draw(tmp_path / "curves.png", [losses, right])
    assert (tmp_path / "curves.png").stat().st_size > 1000
