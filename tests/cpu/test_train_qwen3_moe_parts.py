"""The parts of the Qwen3-MoE example: its text, its record, its refusals."""

import importlib
import json
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe.models import training
from tests.qwen3_training import BATCH, SEQ, make_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
data, report, progress, script = map(
    importlib.import_module, ("qwen3.data", "qwen3.report", "qwen3.progress", "train_qwen3_moe")
)

TOKENIZER = data.load_tokenizer("bytes")


def make_text(*texts: str, most: int = 10**6, cache: Path | None = None) -> Any:
    return data.load_text(iter(texts), "here", TOKENIZER, most, cache)


def test_documents_end_and_are_told_apart() -> None:
    text = make_text("ab", "\N{EURO SIGN}", "c")
    assert text.tokens.tolist() == [97, 98, 256, 0xE2, 0x82, 0xAC, 256, 99, 256]
    assert text.tokens.dtype == np.int32
    assert data.segment_ids(text.tokens[None], text.end).tolist() == [[1, 1, 1, 2, 2, 2, 2, 3, 3]]
    assert make_text("ab", "cd", most=4).tokens.tolist() == [97, 98, 256, 99]


def test_tokens_are_kept_for_the_next_run(tmp_path: Path) -> None:
    cache = tmp_path / "kept" / "tokens.npy"
    first, again = make_text("abc", cache=cache), make_text("of another text", cache=cache)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert isinstance(again.tokens, np.memmap) and "kept in" in again.source


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (np.arange(255, 258), "holds 255 to 257, but those of --tokenizer are 0 to 256"),
        (np.arange(-1, 3), "holds -1 to 2, but"),
        (np.zeros(9, np.float32), r"holds float32 \(9,\), and not integers \[N\]"),
        (np.zeros((3, 3), np.int32), r"holds int32 \(3, 3\), and not"),
        (b"", "cannot be read: No data left"),
        (b"no numpy's", "cannot be read: "),
    ],
)
def test_kept_tokens_of_another_kind_are_refused(
    tmp_path: Path, kept: np.ndarray | bytes, message: str
) -> None:
    """Tokens that the model has not would be a loss that is not finite, and name nothing."""
    cache = tmp_path / "tokens.npy"
    cache.write_bytes(kept) if isinstance(kept, bytes) else np.save(cache, kept)
    with pytest.raises(data.DataError, match=f"^--tokens {cache} {message}"):
        make_text("abc", cache=cache)


def test_kept_tokens_are_no_archive(tmp_path: Path) -> None:
    np.savez(tmp_path / "tokens.npz", np.arange(9))
    cache = (tmp_path / "tokens.npz").rename(tmp_path / "tokens.npy")
    with pytest.raises(data.DataError, match=f"^--tokens {cache} holds several arrays"):
        make_text("abc", cache=cache)


def test_tokens_are_kept_in_folders_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "tokens.npy"
    with pytest.raises(data.DataError, match=f"^--tokens {cache} cannot be written: "):
        make_text("abc", cache=cache)


def test_each_pass_has_every_row_once_in_an_order_of_its_own() -> None:
    text = data.Text(np.arange(41, dtype=np.int32), -1, "here")
    steps = [data.rows_of_step(text, 0, step, 4, 4) for step in range(1, 6)]
    starts = np.concatenate([rows[:, 0] for rows in steps])
    assert all((rows == rows[:, :1] + np.arange(5)).all() for rows in steps)
    for of_pass in (starts[:10], starts[10:]):
        assert sorted(of_pass) == list(range(0, 40, 4))
    assert starts[:10].tolist() != starts[10:].tolist()
    np.testing.assert_array_equal(data.rows_of_step(text, 0, 3, 4, 4), steps[2])
    assert not np.array_equal(data.rows_of_step(text, 1, 3, 4, 4), steps[2])
    assert not np.shares_memory(data.rows_of_step(text, 0, 1, 1, 4), text.tokens)
    with pytest.raises(data.DataError, match="too little text in here: 41 tokens"):
        data.rows_of_step(text, 0, 1, 1, 41)


@pytest.mark.parametrize(
    ("amount", "first"),
    [
        (20, 83),  # where a document begins, not at 80
        (0.2, 83),
        (9, 91),  # the next begins behind the half of these
        (3, 97),
        (0, 100),
        (None, 97),  # a share is less than a sequence
    ],
)
def test_the_end_of_a_text_is_held_out(amount: float | None, first: int) -> None:
    tokens = np.arange(100, dtype=np.int32)
    tokens[[82, 96]] = -1
    text = data.Text(tokens, -1, "here")
    train, held_out = data.hold_out(text, amount, 2)
    np.testing.assert_array_equal(train.tokens, tokens[:first])
    if amount == 0:
        assert held_out is None
    else:
        np.testing.assert_array_equal(held_out.tokens, tokens[first:])


def test_at_most_so_many_tokens_are_held_out_unasked() -> None:
    text = data.Text(np.zeros(200 * data.HELD_OUT_MOST, np.int8), -1, "here")
    assert len(data.hold_out(text, None, 8)[1].tokens) == data.HELD_OUT_MOST


@pytest.mark.parametrize("amount", [3, 0.03, 97, 0.97])
def test_a_part_without_a_sequence_is_refused(amount: float) -> None:
    text = data.Text(np.zeros(100, np.int32), -1, "here")
    count = int(amount if amount > 1 else 100 * amount)
    message = f"^too little text in here: 100 tokens, of which {count} are held out, .* needs 4"
    with pytest.raises(data.DataError, match=message):
        data.hold_out(text, amount, 3)


def test_a_text_without_a_sequence_is_refused_where_nothing_is_held_out() -> None:
    text = data.Text(np.zeros(3, np.int32), -1, "here")
    with pytest.raises(data.DataError, match="^too little text in here: 3 tokens, .* needs 4"):
        data.hold_out(text, 0, 3)
    assert data.hold_out(text, 0, 2) == (text, None)


def test_ends_alone_have_no_loss() -> None:
    ids = np.zeros(100, np.int32)
    ids[-9:] = 7
    with pytest.raises(data.DataError, match="^the last 8 tokens of here are ends of documents"):
        data.hold_out(data.Text(ids, 7, "here"), 8, 3)
    ids[-2] = 0  # whose next one is predicted
    assert len(data.hold_out(data.Text(ids, 7, "here"), 8, 3)[1].tokens) == 8


def test_all_that_is_held_out_is_predicted_once() -> None:
    """But the first token of each document; what fills the last batch is padding."""
    tokens = np.arange(1, 12, dtype=np.int32)
    tokens[5] = 0
    batches = [*data.held_out_batches(data.Text(tokens, 0, "here"), 2, 4)]
    assert all(a.shape == (2, 5) and a.dtype == np.int32 for batch in batches for a in batch)
    rows, ids = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    assert len(rows) == 4 and not ids[3].any()
    is_target = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
    assert rows[:, 1:][is_target].tolist() == [2, 3, 4, 5, 0, 8, 9, 10, 11]


def test_a_folder_with_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    message = f"^--checkpoint {tmp_path} has no record of a run in its step 5 "
    with pytest.raises(script.CheckpointError, match=message):
        script.Checkpoints(tmp_path, 1, {}, True)


def test_batches_are_made_ahead_in_order() -> None:
    made, waits = [], threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if step == 3:
            waits.set()
        return step

    batches = data.prefetch(make, range(1, 8))
    assert next(batches) == 1
    assert waits.wait(10) and made[:3] == [1, 2, 3]  # two are ready while the first runs
    assert list(batches) == [2, 3, 4, 5, 6, 7]


def test_what_making_raises_is_raised_where_it_is_taken() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise data.DataError("no such text")
        return step

    batches = data.prefetch(make, range(1, 5))
    assert next(batches) == 1
    with pytest.raises(data.DataError, match="no such text"):
        next(batches)


def test_a_data_set_is_read_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*name: str, **how: Any) -> list[dict[str, str]]:
        asked.append((name, how))
        return [{"text": "ab"}, {"text": ""}, {"text": "c"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    texts, source = data.documents(None, "some/name,part", "text")
    assert list(texts) == ["ab", "c"] and source == "some/name,part"
    assert asked == [(("some/name", "part"), {"split": "train", "streaming": True})]
    with pytest.raises(data.DataError, match="--text-field story is no field"):
        data.documents(None, "some/name", "story")


def test_a_tokenizer_is_loaded_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        eos_token_id: int | None = 7

        def __len__(self) -> int:
            return 9

        def __call__(self, texts: list[str], **how: Any) -> dict[str, list[list[int]]]:
            assert how["add_special_tokens"] is False
            return {"input_ids": [[len(text)] for text in texts]}

    auto = types.SimpleNamespace(from_pretrained=lambda name: Found())
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(AutoTokenizer=auto))
    tokenizer = data.load_tokenizer("some/model")
    assert tokenizer.size == 9
    text = data.load_text(iter(["ab", "c"]), "here", tokenizer, 99, None)
    assert text.tokens.tolist() == [2, 7, 1, 7]
    monkeypatch.setattr(Found, "eos_token_id", None)
    with pytest.raises(data.DataError, match="no token for the end"):
        data.load_tokenizer("some/model")


def make_row(step: int, mfu: float | None = None) -> Any:
    held_out = 2.5 if step == 2 else None
    return report.Row(step, 3.0, held_out, 1.0, 100.0, mfu, [1.5, 2.5])


def test_what_tensorboard_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, closed = [], []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path), 5)

        def add_scalar(self, *scalar: Any) -> None:
            shown.append(scalar)

        def close(self) -> None:
            closed.append(True)

    package = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "tensorboardX", package)
    with report.TensorBoard(tmp_path, 5) as board:
        board.add(make_row(5))
        assert not any(name == "held_out_loss" for name, *_ in shown)
        board.add_held_out(make_row(5)._replace(held_out_loss=2.0))
    assert shown[-1] == ("held_out_loss", 2.0, 5)
    assert ("loss", 3.0, 5) in shown and ("imbalance_1", 2.5, 5) in shown and closed
    assert {name for name, *_ in shown}.isdisjoint({"step", "mfu"})
    with report.TensorBoard(None, 1) as board:
        board.add(make_row(1))
    assert len(closed) == 1


def test_the_record_has_a_column_for_each_layer(tmp_path: Path) -> None:
    report.write([make_row(1, 0.4), make_row(2, 0.5)], tmp_path)
    lines = (tmp_path / "run.csv").read_text().splitlines()
    assert lines[0] == (
        "step,loss,held_out_loss,gradient_norm,tokens_per_s_device,mfu"
        ",imbalance,imbalance_0,imbalance_1"
    )
    assert lines[1] == "1,3.0,,1.0,100.0,0.4,2.0,1.5,2.5"
    assert lines[2] == "2,3.0,2.5,1.0,100.0,0.5,2.0,1.5,2.5"


def make_run(device_kinds: list[str], rows: list[Any]) -> tuple[Any, list[Any]]:
    """A run that records into `rows`, and what its bar and its TensorBoard are shown."""
    shown: list[Any] = []
    silent = types.SimpleNamespace(
        add=shown.append,
        add_held_out=shown.append,
        set_postfix_str=lambda text, **_: shown.append(text),
        update=lambda: None,
    )
    devices = np.array([types.SimpleNamespace(device_kind=kind) for kind in device_kinds])
    return progress.Run(make_config(), devices, rows, silent, silent), shown


def metrics_of(loss: float) -> training.StepMetrics:
    load = jnp.array([[2, 2, 0, 0], [1, 1, 1, 1]])
    return training.StepMetrics(jnp.float32(loss), jnp.float32(1), load)


def test_a_loss_that_is_not_finite_ends_the_record() -> None:
    rows: list[Any] = []
    run, shown = make_run(["cpu"] * 2, rows)
    run.record(7, metrics_of(3), 1e9)
    assert shown[0] == rows[0] and rows[0][:4] == (7, 3.0, None, 1.0)
    assert rows[0].imbalance == [2.0, 1.0] and rows[0].mfu is None
    with pytest.raises(progress.UsageError, match="^the loss became nan at step 8"):
        run.record(8, metrics_of(np.nan), 1e9)
    assert [row.step for row in rows] == [7, 8]
    with pytest.raises(progress.UsageError, match="^the held-out loss became inf at step 8"):
        run.record_held_out(np.inf)


def test_a_held_out_loss_is_of_its_step_and_stays_in_sight() -> None:
    rows: list[Any] = [make_row(2)]
    run, shown = make_run(["cpu"], rows)  # of a run that goes on
    run.record(3, metrics_of(3), 1e9)
    run.record_held_out(2.25)
    run.record(4, metrics_of(3), 1e9)
    assert [row.held_out_loss for row in rows] == [2.5, 2.25, None]
    texts = [text for text in shown if isinstance(text, str)]
    assert ["held out 2.500" in t for t in texts] == [True, False, False]
    assert ["held out 2.250" in t for t in texts] == [False, True, True]


def test_mfu_and_tokens_are_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the time between two steps without that of an evaluation."""
    times = iter([10.0, 12.0, 20.0, 21.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(times))
    rows: list[Any] = []
    run, _ = make_run(["NVIDIA H200"] * 4, rows)
    run.record(1, metrics_of(3), 2 * 4 * 989.4e12 / 2)
    run.record_held_out(3.0)
    run.record(2, metrics_of(3), 1e9)
    assert rows[0].mfu == pytest.approx(0.5)  # half of what four give in two seconds
    assert [row.tokens_per_s_device for row in rows] == [BATCH * SEQ / 2 / 4, BATCH * SEQ / 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "some/name"], "--dataset some/name needs the package datasets: pip install"),
        (["--tokenizer", "some/model"], "some/model needs the package transformers: pip install"),
        (["--tensorboard"], "--tensorboard needs the package tensorboardX: pip install"),
        (["--data", "no/such"], "--data no/such: no such file"),
        (["--resume"], "--resume needs --checkpoint"),
        (["--most-tokens", "0"], "--most-tokens must be at least 1, but it is 0"),
        (["--most-tokens", "5"], "too little text in .*: 5 tokens"),
        (["--held-out", "-1"], "--held-out must be finite and at least 0, but it is -1"),
        (["--held-out", "nan"], "--held-out must be finite and at least 0, but it is nan"),
        (["--held-out-every", "0"], "--held-out-every must be at least 1, but it is 0"),
        (["--most-tokens", "5", "--held-out", "0"], "too little text in .*: 5 tokens"),
        (["--tokens", "FOLDER.npy"], "--tokens must be a file, but .*FOLDER.npy is a folder"),
        (
            ["--coordinator", "here:1", "--num-processes", "0", "--process-id", "0"],
            "--num-processes must be at least 1, but it is 0",
        ),
        (["--tokens", "tokens.bin"], "--tokens must end in .npy, but it is tokens.bin"),
        (["--batch", "6"], "batch: was 6 in 1 microbatches"),
        (["--precision", "bf16", "--backend", "cuda"], "backend: was 'cuda', but JAX runs on"),
        (["--model", "SMALL"], "--tokenizer bytes has 257 tokens, but .* vocab_size is 256"),
        (["--config", "missing.toml"], "missing.toml"),
    ],
)
def test_bad_input_is_refused_with_its_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    for package in ("datasets", "transformers", "tensorboardX"):
        monkeypatch.setitem(sys.modules, package, None)
    small = ROOT / "examples" / "qwen3" / "small.toml"
    table = {"base": "qwen3-30b-a3b", "vocab_size": 256, "num_hidden_layers": 1}
    (tmp_path / "small.json").write_text(json.dumps({"model": table}))
    (tmp_path / "FOLDER.npy").mkdir()
    arguments = [a.replace("FOLDER", str(tmp_path / "FOLDER")) for a in arguments]
    if arguments == ["--model", "SMALL"]:
        small, arguments = tmp_path / "small.json", []
    given = ["--config", str(small), "--data", __file__, "--out", str(tmp_path / "out")]
    if "--dataset" in arguments or "--data" in arguments:
        given[2:4] = []
    assert script.main([*given, *arguments]) == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith("train_qwen3_moe: ")
    assert re.search(message, last_line), last_line
