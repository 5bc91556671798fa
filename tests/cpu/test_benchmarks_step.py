"""The benchmark of a whole training step: its peers' numbers, its processes, records and table."""

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jax_megamoe.models import flops, qwen3_config, training
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
