"""The benchmark of a whole training step: its peers' numbers, its processes, records and table."""

import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jax_megamoe.models import flops, qwen3_config, training, training_config
from tests.qwen3_training import MODEL, make_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
step, _step_job, _step_peers, _step_report = map(
    importlib.import_module, "step _step_job _step_peers _step_report".split()
)

JOB = _step_job.Job("", {}, "", 1, None, 2, 2.0, None)
# Answers as told by the name of the implementation.
FAKE = """
import os, sys, time
import _step_job

def find_out(job):
    if job.impl == "late":
        time.sleep(60)
    if job.impl == "killed":
        print("out of memory", flush=True)
        os._exit(3)
    if job.impl == "silent":
        return None
    return {"impl": 1 / len(job.impl)}

_step_job.answer(find_out, sys.argv[1:])
"""


def losses(num_devices: int, product: str | None, num_steps: int, **changes: Any) -> np.ndarray:
    """Of the first steps of a tiny model, whose layers are exchanged for a product's."""
    model_of_one_layer = {**MODEL, "num_hidden_layers": 1}
    config = make_config(balance="bias", model=model_of_one_layer, **changes)
    mesh = training.make_mesh(config, jax.devices()[:num_devices])
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, config.model.vocab_size, (1, config.batch, config.seq + 1))
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, training.BATCH_SPEC)
        batch = jax.device_put(training.Batch(tokens.astype(np.int32)), sharding)
        model, optimizer = training.create(config)
        if product:
            _step_peers.exchange(model, product, changes.get("expert_parallel", 1))
        return np.array(
            [
                (m.loss, m.gradient_norm)
                for m in (
                    jax.device_get(training.train_step(model, optimizer, batch, config))
                    for _ in range(num_steps)
                )
            ]
        )


@pytest.fixture(autouse=True, scope="module")
def _quick_to_compile() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def right() -> np.ndarray:
    """[steps, (loss, gradient norm)] of the package's reference on one device, in float32."""
    return losses(1, None, 3, moe="jax")


@pytest.mark.parametrize(
    ("num_devices", "layout", "remat"),
    [
        (1, {}, "none"),
        (2, {"expert_parallel": 2}, "full"),
        (4, {"expert_parallel": 2}, "none"),
    ],
    ids=["one", "ep2", "ep2-fsdp2"],
)
def test_the_peers_step_is_that_of_the_reference(
    num_devices: int, layout: dict[str, int], remat: str, right: np.ndarray
) -> None:
    assert right[0, 0] > 1.001 * right[-1, 0]  # it learns, so that gradients count
    found = losses(num_devices, "lax_ragged_dot", 3, remat=remat, **layout)
    np.testing.assert_allclose(found, right, rtol=2e-5)


def test_an_exchange_that_finds_nothing_is_refused() -> None:
    config = make_config(model={**MODEL, "num_hidden_layers": 1})
    with jax.set_mesh(training.make_mesh(config, jax.devices()[:1])):
        model, _ = training.create(config)
        _step_peers.exchange(model, "lax_ragged_dot", 1.0)
        assert isinstance(model.runs[0].mlp, _step_peers.RaggedMoE)
        del model.runs[0]
        with pytest.raises(ValueError, match="no layer with experts"):
            _step_peers.exchange(model, "lax_ragged_dot", 1.0)


def test_rows_of_the_busiest_rank() -> None:
    load = np.array([[1, 1, 1, 1], [3, 3, 1, 1]])
    assert _step_peers.most_rows(load, 1) == 1.0
    assert _step_peers.most_rows(load, 2) == pytest.approx(6 / 4)


def test_the_learning_rate_is_that_of_the_training_step() -> None:
    config = {"learning_rate": 3e-4, "warmup": 5, "steps": 20}
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-4, 5, 20, 0.0)
    found = [_step_job.learning_rate(config, n) for n in range(1, 23)]
    np.testing.assert_allclose(
        found, [np.asarray(schedule(n)) for n in range(22)], rtol=1e-5, atol=1e-12
    )
    assert found[0] == 0 and found[5] == pytest.approx(3e-4)
    assert _step_job.learning_rate({**config, "warmup": 0}, 1) == pytest.approx(3e-4)


def test_a_process_answers_or_its_end_is_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fake_step.py").write_text(FAKE)
    monkeypatch.setattr(_step_job, "SOURCES", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))

    def run(impl: str, timeout: float = 60.0) -> dict[str, Any]:
        return _step_job.run("fake_step", dataclasses.replace(JOB, impl=impl), tmp_path, timeout)

    assert run("four") == {"impl": 0.25}
    assert run("") == {"error": "ZeroDivisionError: division by zero"}
    assert 'return {"impl": 1 / len(job.impl)}' in capsys.readouterr().err
    assert run("killed") == {"error": "the process ended with 3: out of memory"}
    assert run("silent") == {"error": "the process ended with 0: it wrote nothing"}
    assert run("late", 2.0) == {"error": "TimeoutError: it did not end within 2 s"}


def result(seconds: float, last: float, **others: Any) -> dict[str, Any]:
    found = {"losses": [5.0, 4.0, last], "step_seconds": [seconds, seconds], "start": "seed 0"}
    found |= {"runs_on": "", "process_model": "single_process", "busiest_rank": 1.2}
    return found | {"peak_bytes": 2**31, "clock_mhz": 1400} | others


def records(**rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    config = make_config(expert_parallel=2)
    return [
        {"impl": name} | _step_report.record(config, 4, 1e12, found)
        for name, found in rounds.items()
    ]


def test_records_hold_rates_and_what_failed() -> None:
    ours, failed = records(
        jax_megamoe=[result(0.25, 3.0), result(0.75, 3.0)],
        torch_grouped_mm=[result(1.0, 3.0), {"error": "no\nmemory | at all"}],
    )
    config = make_config()
    assert (ours["seconds"], ours["seconds_spread"]) == (0.5, 0.5)
    assert ours["seconds_of_rounds"] == [0.25, 0.75] and ours["fsdp"] == 2
    assert ours["tokens_per_s_device"] == config.batch * config.seq / 0.5 / 4
    pairs = config.batch * config.seq * (config.seq + 1) // 2
    of_step = flops.step_flops(config.model, config.batch * config.seq, pairs)
    assert ours["mfu"] == pytest.approx(of_step / 0.5 / 4 / 1e12, abs=1e-4)
    assert ours["losses"] == [5.0, 4.0, 3.0] and ours["peak_bytes"] == 2**31
    assert failed["error"] == "no\nmemory | at all" and "seconds" not in failed
    lines = _step_report.table([ours, failed]).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "| 0.5000 | 0.5000 | 64 |" in lines[2] and "| 1400 | 3.0000 | 1.00 |" in lines[2]
    assert "no memory / at all" in lines[3]


def test_ours_are_held_against_the_others() -> None:
    found = records(
        jax_megamoe=[result(1.0, 3.0), result(1.0, 3.0)],
        jax_megamoe_fp8=[result(0.5, 3.02)],
        jax_reference=[result(2.0, 3.001), result(4.0, 3.001)],
        torch_grouped_mm=[result(1.5, 9.0, start="seed 0 of PyTorch")],
    )
    comparisons = {tuple(c["pair"]): c for c in _step_report.compared(found)}
    assert len(comparisons) == 5  # ours against two others each, and FP8 against bf16
    one = comparisons["jax_megamoe", "jax_reference"]
    assert (one["ratio"], one["ratio_least"], one["ratio_most"]) == (3.0, 2.0, 4.0)
    assert one["largest_difference"] == pytest.approx(1 / 3001) and one["at_step"] == 3
    assert one["agree"] and one["of_same_parameters"]
    torch = comparisons["jax_megamoe", "torch_grouped_mm"]
    assert not torch["agree"] and not torch["of_same_parameters"]
    fp8 = comparisons["jax_megamoe_fp8", "jax_megamoe"]
    assert fp8["ratio"] == 2.0 and fp8["agree"]
    nan = records(jax_megamoe=[result(1.0, 3.0)], jax_reference=[result(1.0, float("nan"))])
    assert not _step_report.compared(nan)[0]["agree"]
    text = "\n".join(_step_report.sentences(list(comparisons.values())))
    assert "jax_reference takes 3.00 times as long as jax_megamoe (2.00 to 4.00)" in text
    assert "are of other parameters at the start" in text


def test_parameters_are_those_of_the_model() -> None:
    config = make_config()
    with jax.set_mesh(training.make_mesh(config, jax.devices()[:1])):
        model = jax.eval_shape(lambda: training.make_model(config))
        shapes = [a.shape for a in _step_peers.parameters(model).values()]
    assert _step_report.num_parameters(config.model) == sum(map(np.prod, shapes))
    for published, billions in (("QWEN3_30B_A3B", 30.5), ("QWEN3_235B_A22B", 235.1)):
        model = getattr(qwen3_config, published)
        assert _step_report.num_parameters(model) / 1e9 == pytest.approx(billions, abs=0.05)


def test_batches_are_of_the_text(tmp_path: Path) -> None:
    config = make_config(steps=3)
    found = step.make_batches(None, config)
    assert found.shape == (3, config.batch, config.seq + 1) and found.dtype == np.int32
    np.save(tmp_path / "t.npy", np.arange(148, dtype=np.int64).repeat(4))
    np.testing.assert_array_equal(np.diff(step.make_batches(tmp_path / "t.npy", config)) >= 0, True)
    np.save(tmp_path / "t.npy", np.arange(149).repeat(4))
    with pytest.raises(ValueError, match=r"must hold tokens in 0\.\.147, but they are 0\.\.148"):
        step.make_batches(tmp_path / "t.npy", config)
    np.save(tmp_path / "t.npy", np.zeros((3, 3)))
    with pytest.raises(ValueError, match=r"integers \[N\], but they are float64 \(3, 3\)"):
        step.make_batches(tmp_path / "t.npy", config)


def make_job(tmp_path: Path, config: Any, **changes: Any) -> Any:
    rng = np.random.default_rng(3)
    same = rng.integers(0, config.model.vocab_size, (1, config.batch, config.seq + 1))
    batches = tmp_path / "batches.npy"
    np.save(batches, same.astype(np.int32).repeat(config.steps, axis=0))
    found = {"config": training_config.to_dict(config), "batches": str(batches), **changes}
    return dataclasses.replace(JOB, **found)


def test_a_run_in_jax(tmp_path: Path) -> None:
    _step_jax = importlib.import_module("_step_jax")
    config = make_config(model={**MODEL, "num_hidden_layers": 1}, steps=4, expert_parallel=2)
    how = {"impl": "jax_megamoe", "num_devices": 2, "parameters": str(tmp_path)}
    found = _step_jax.find_out(make_job(tmp_path, config, **how))
    assert len(found["losses"]) == 4 and found["losses"][-1] < found["losses"][0]
    assert len(found["step_seconds"]) == 3 and min(found["step_seconds"]) > 0
    begin, end = found["measured"]
    assert end - begin == pytest.approx(sum(found["step_seconds"]))
    assert 1.0 < found["busiest_rank"] < 2 and "reference" in found["runs_on"]
    with jax.set_mesh(training.make_mesh(config, jax.devices()[:2])):
        model, _ = training.create(config)
        first = _step_peers.parameters(model)
    files = {path.stem: np.load(path) for path in tmp_path.glob("*.npy") if path.stem in first}
    assert files.keys() == first.keys() and "runs.0.mlp.w_gate" in first
    for name, value in first.items():
        np.testing.assert_array_equal(files[name], np.asarray(value))

    peer = make_job(tmp_path, config, impl="lax_ragged_dot", num_devices=2, peer_rows=1.0)
    lost = _step_jax.find_out(peer)["error"]
    assert "more than --peer-rows 1.0: rows were lost" in lost


ARGUMENTS = ["--layers", "1", "--seq", "16", "--batch", "8", "--steps", "3", "--first", "2"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What processes that do not run have been told; those of `lax_ragged_dot` fail."""
    jobs: list[tuple[str, Any]] = []

    def run(module: str, job: Any, folder: Path, timeout: float) -> dict[str, Any]:
        jobs.append((module, job))
        assert np.load(job.batches).shape == (3, 8, 17) and 0 < timeout <= 240
        if job.impl == "lax_ragged_dot":
            return {"error": "RESOURCE_EXHAUSTED: no memory"}
        return result(0.5, 3.0 if job.impl != "jax_megamoe_fp8" else 3.5)

    monkeypatch.setattr(step, "run", run)
    monkeypatch.setitem(sys.modules, "tokamax", None)
    return jobs


def test_rounds_alternate_and_what_fails_is_a_record(
    told: list[tuple[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(qwen3_config.to_hugging_face(make_config().model)))
    out, png = tmp_path / "step.json", tmp_path / "step.png"
    files = ["--model", str(config), "--out", str(out), "--png", str(png), "--gpus", "2"]
    # FP8 is too far from bf16 here.
    assert step.main([*ARGUMENTS, *files]) == 1
    names = [job.impl for _, job in told]
    first = ["jax_megamoe", "jax_megamoe_fp8", "lax_ragged_dot", "torch_grouped_mm"]
    first.append("jax_reference")
    assert names == [*first, *(name for name in first[::-1] if name != "lax_ragged_dot")]
    modules = {job.impl: module for module, job in told}
    assert modules["torch_grouped_mm"] == "_step_torch" and modules["jax_reference"] == "_step_jax"
    assert {job.config["precision"] for _, job in told if "fp8" in job.impl} == {"fp8_block"}
    assert {job.config["expert_parallel"] for _, job in told} == {2}
    # The first run in JAX writes the parameters, PyTorch's read them.
    with_parameters = [n for n, (_, job) in enumerate(told) if job.parameters]
    assert with_parameters == [0, names.index("torch_grouped_mm"), 6]
    written = json.loads(out.read_text())
    *records, ends = written["records"]
    assert written["num_devices"] == 2 and [r["impl"] for r in records] == first
    assert [r["impl"] for r in records if "error" in r] == ["lax_ragged_dot"]
    assert {r["rounds"] for r in records if "error" not in r} == {2}
    assert records[0]["start"] == records[3]["start"] == "drawn by JAX"
    assert len(ends["comparisons"]) == 5 and png.read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert "| lax_ragged_dot | bf16 | RESOURCE_EXHAUSTED: no memory |" in table
    assert "losses do not agree" in table

    assert step.main([*ARGUMENTS, *files, "--only", "torch_grouped_mm,jax_megamoe"]) == 0
    assert step.main([*ARGUMENTS, *files, "--only", "torch_grouped_mm", "--within", "30"]) == 0
    (only,) = json.loads(out.read_text())["records"][:-1]
    assert only["error"] == "no time was left within --within 30.0 s"


def test_arguments_that_cannot_be_are_refused(
    told: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, why in (
        (["--only", "jax"], "--only must be of jax_megamoe, .*, but it has jax"),
        (["--first", "4"], "--first must be 2 to --steps 3, but it is 4"),
        (["--gpus", "99"], "--gpus must be 1 to 8, but it is 99"),
    ):
        with pytest.raises(SystemExit):
            step.main([*ARGUMENTS, *wrong])
        assert re.search(why, capsys.readouterr().err)
    with pytest.raises(SystemExit, match="expert_parallel: was 3; it may be one of"):
        step.main([*ARGUMENTS, "--expert-parallel", "3"])
    with pytest.raises(SystemExit, match="a multiple of the 3 devices"):
        step.main([*ARGUMENTS, "--gpus", "3", "--expert-parallel", "1"])
    assert not told


@pytest.mark.transformers
@pytest.mark.limit(600)
def test_the_step_of_pytorch_is_that_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch.compile, whose code is made in minutes; with it `step.py` runs on a CPU too."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = make_config(steps=4, attention="xla")
    job = make_job(tmp_path, config, impl="jax_reference", parameters=str(tmp_path))
    right = importlib.import_module("_step_jax").find_out(job)["losses"]
    assert right[-1] < 0.999 * right[0]
    for num_devices, ranks in ((1, 1), (2, 1), (4, 2)):
        told = training_config.to_dict(dataclasses.replace(config, expert_parallel=ranks))
        over = dataclasses.replace(job, config=told, num_devices=num_devices)
        found = _step_job.run("_step_torch", over, tmp_path, 300)
        np.testing.assert_allclose(found["losses"], right, rtol=1e-5)
        assert len(found["step_seconds"]) == 3 and found["busiest_rank"] >= 1
