"""`python -m jax_megamoe.compare`: what it measures, what it says, and its exit codes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jax_megamoe import compare
from tests.qwen3_training import MODEL, RUN

FEW = ["--skip", "1", "--measure", "2", "--rounds", "2"]


@pytest.fixture(autouse=True, scope="module")
def _quick_to_compile() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "run.json"
    model = {**MODEL, "num_hidden_layers": 1, "hidden_size": 32, "moe_intermediate_size": 32}
    path.write_text(json.dumps({**RUN, "model": model, "expert_parallel": 2}))
    return path


def side(losses: list[float], seconds: list[float]) -> compare.Side:
    return compare.Side(np.array(losses), np.array(seconds))


def test_it_trains_both_and_agrees(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--png", str(tmp_path / "c.png"), "--json", str(tmp_path / "c.json")]
    assert compare.main(["--config", str(config), *FEW, *files]) == compare.AGREE
    table = capsys.readouterr().out
    assert "megamoe" in table and "losses agree" in table
    assert "the kernels did not run" in table and "JAX runs on the cpu" in table
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["agree"] and found["largest_difference"] == 0  # the reference twice
    assert found["ratio_least"] <= found["ratio"] <= found["ratio_most"]
    assert min(found["tokens_per_s_device"]) > 0


def test_losses_that_part_are_an_exit_code(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def run(of_side: Any, _: Any, batches: list[Any]) -> compare.Side:
        asked.append(of_side.moe)
        return side([5.0, 4.0 if of_side.moe == "jax" else 4.1], [1.0] * len(batches))

    monkeypatch.setattr(compare, "run", run)
    assert compare.main(["--config", str(config), *FEW]) == compare.DISAGREE
    assert asked == ["megamoe", "jax"] * 2
    assert "do not agree: they differ by at most 2.50e-02 relative, at step 2" in (
        capsys.readouterr().out
    )
    wide = ["--tolerance", "0.03"]
    assert compare.main(["--config", str(config), *FEW, *wide]) == compare.AGREE


def test_times_behind_the_skipped_steps_count() -> None:
    rounds = [
        [side([1, 1, 1], [90, 1, 1]), side([1, 1, 1], [7, 2, 2])],
        [side([1, 1, 1], [1, 2, 2]), side([1, 1, 1.005], [1, 8, 8])],
    ]
    found = compare.judge(rounds, 100.0, 1, 1e-2)
    assert found.tokens_per_s_device == (100 / 1.5, 100 / 5)
    assert (found.ratio_least, found.ratio_most) == (2, 4)
    assert found.ratio == pytest.approx(5 / 1.5)
    assert found.agree and found.at_step == 3
    assert found.largest_difference == pytest.approx(0.005 / 1.005)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_does_not_agree(value: float) -> None:
    found = compare.judge([[side([1, value], [1, 1]), side([1, value], [1, 1])]], 1.0, 0, 1e-2)
    assert not found.agree and found.at_step == 2


def test_given_tokens_are_trained_on(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = np.arange(8 * 17 * 3, dtype=np.uint16) % 100
    np.save(tmp_path / "tokens.npy", text)
    seen = []

    def run(_: Any, __: Any, batches: list[Any]) -> compare.Side:
        seen.append(np.concatenate([batch.tokens.ravel() for batch in batches]))
        return side([1.0], [1.0] * len(batches))

    monkeypatch.setattr(compare, "run", run)
    tokens = ["--tokens", str(tmp_path / "tokens.npy")]
    assert compare.main(["--config", str(config), *FEW, *tokens]) == compare.AGREE
    np.testing.assert_array_equal(seen[0], text)


def test_made_up_text_can_be_learnt() -> None:
    run = compare.from_arguments(compare._parser().parse_args(["--model", "qwen3-30b-a3b"]))
    rows = compare._made_up(run, 0)
    followers = {(a, b) for row in rows for a, b in zip(row, row[1:], strict=False)}
    assert 200 < len({a for a, _ in followers}) <= compare.ALPHABET
    assert 0 < len(followers) <= compare.ALPHABET * compare.SUCCESSORS
    assert not np.array_equal(rows, compare._made_up(run, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "model: was missing"),
        (["--config", "missing.json"], "missing.json"),
        (["CONFIG", "--batch", "6"], "batch: was 6 in 1 microbatches"),
        (["CONFIG", "--data-parallel", "3"], "data_parallel, fsdp and expert_parallel: was"),
        (["CONFIG", "--precision", "bf16", "--backend", "cuda"], "backend: was 'cuda', but"),
        (["CONFIG", "--rounds", "0"], "rounds: was 0"),
        (["CONFIG", "--skip", "-1"], "skip: was -1"),
        (["CONFIG", "--tolerance", "-1"], "tolerance: was -1"),
        (["CONFIG", "--tokens", "TEXT"], "tokens: was int64"),
        (["CONFIG", "--tokens", "ARCHIVE"], "tokens: was several arrays in"),
        (["CONFIG", "--tokens", "EMPTY"], "No data left in file"),
        (["CONFIG", "--png", "no/such/c.png"], "png: was no/such/c.png; it may be a file, in a"),
        (["CONFIG", "--json", "."], "json: was .; it may be a file"),
        (["CONFIG", "--moe", "jax"], "unrecognized arguments: --moe jax"),
    ],
)
def test_what_cannot_be_is_refused(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    np.save(tmp_path / "text.npy", np.zeros(5, np.int64))
    (tmp_path / "empty.npy").touch()
    np.savez(tmp_path / "text.npz", np.zeros(5, np.int64))
    places = {"TEXT": str(tmp_path / "text.npy"), "EMPTY": str(tmp_path / "empty.npy")}
    places["ARCHIVE"] = str(tmp_path / "text.npz")
    places["CONFIG"] = f"--config={config}"
    with pytest.raises(SystemExit) as end:
        compare.main([places.get(argument, argument) for argument in arguments])
    assert end.value.code == compare.BAD_ARGUMENTS
    assert message in capsys.readouterr().err


def test_a_picture_needs_matplotlib(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        compare.main(["--config", str(config), "--png", "c.png"])
    assert "without the package matplotlib" in capsys.readouterr().err
