"""The latency benchmark on a CPU: what it runs, and what it records of it."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import mega_moe

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
latency, _measured, _shapes, _timing = map(
    importlib.import_module, ("latency", "_measured", "_shapes", "_timing")
)

TINY = _shapes.Shape("tiny", T=3, K=2, E=4, H=16, I=8)


def test_a_chain_is_its_layers_one_after_another() -> None:
    first, ids, w, *weights = latency.in_layers(TINY)
    assert first.shape == (3, 16) and ids.shape == w.shape == (latency.LAYERS, 3, 2)
    assert len({np.asarray(of_layer).tobytes() for of_layer in ids}) > 1, "all layers route alike"
    y = jnp.zeros_like(first)
    inputs = set()
    for of_layer, weight in zip(ids, w, strict=True):
        x = first + y * jnp.bfloat16(latency.SHARE)
        inputs.add(np.asarray(x).tobytes())
        y = jax.jit(mega_moe)(x, of_layer, weight, *weights)
        assert isinstance(y, jax.Array)
    assert len(inputs) > 1, "no layer depends on the one before it"
    found = latency.ours([first, ids, w, *weights]).call()
    np.testing.assert_array_equal(np.asarray(found), np.asarray(y))


def test_an_expert_counts_in_each_layer_that_it_has_rows_in() -> None:
    ids = jnp.array([[[0, 1], [0, 1]], [[2, 3], [0, 1]]])
    assert latency.weight_bytes(TINY, ids) == 3 * (2 * 3 * 16 * 8)


def test_records_are_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = _timing.Figures(ms=latency.LAYERS * 2.0, ms_spread=latency.LAYERS * 0.5, clock_mhz=7)
    product = _timing.Figures(ms=1.0, ms_spread=0.0, clock_mhz=7)

    def measured(runs: dict[str, object], *_: object) -> object:
        return {n: figures if n.startswith("jax_megamoe") else product for n in runs}, {}

    def broken(_: object) -> object:
        raise ValueError("there is no such peer")

    monkeypatch.setattr(_measured, "measure", measured)
    monkeypatch.setitem(latency.CHAINS, "tokamax_ragged_dot", broken)
    method = _timing.Method(load_seconds=0, timed_seconds=0, rounds=1)
    impls = ["jax_megamoe", "tokamax_ragged_dot"]
    (_, ours), (_, peer) = latency.measure_shape(TINY, impls, method, None, 64, 1024)
    assert (ours["ms"], ours["ms_spread"], ours["layers"]) == (2.0, 0.5, latency.LAYERS)
    assert (ours["impl"], ours["tokens"], ours["pass"]) == ("jax_megamoe", 3, "forward")
    # The copy moves 2 KiB in a millisecond; a layer reads what weight_bytes says.
    read = latency.weight_bytes(TINY, latency.in_layers(TINY)[1])
    assert ours["bound_ms"] == pytest.approx(read / 2048, abs=1e-4)
    assert ours["bound_ratio"] == pytest.approx(2.0 / ours["bound_ms"], abs=1e-3)
    assert "there is no such peer" in peer["error"] and "ms" not in peer
