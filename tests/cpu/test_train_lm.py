"""The training example through its command line, on a tiny model and a small text."""

import re
import signal
import subprocess

import pytest

from tests.training import command, environment, rows, train, write_text

TINY = "--steps 24 --eval-every 8 --batch 8 --seq 32 --layers 2 --hidden 32 --intermediate 16"
TINY = f"{TINY} --experts 4 --learning-rate 0.01".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def single(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("single")
    return train("--data", text, "--out", out, *TINY), out


def test_a_run_learns_reports_and_writes_its_files(single):
    run, out = single
    assert run.returncode == 0, run.stderr
    assert "(3 files)" in run.stdout  # the binary one is left out
    assert "experts: the reference (JAX runs on the cpu)" in run.stdout
    assert "held-out loss" in run.stdout and "unigram entropy" in run.stdout
    assert "tokens/s" in run.stderr
    losses = [float(row["train_loss"]) for row in rows(out)]
    assert len(losses) == 24
    assert losses[-1] < losses[0] - 1
    assert [row["step"] for row in rows(out) if row["held_out_loss"]] == ["8", "16", "24"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "sample.txt").read_text()) > 100


def test_four_devices_train_the_same_model(single, text, tmp_path):
    run = train("--data", text, "--out", tmp_path, "--devices", 4, *TINY)
    assert run.returncode == 0, run.stderr
    assert "'data': 2, 'expert': 2" in run.stdout
    for one, four in zip(rows(single[1]), rows(tmp_path), strict=True):
        assert float(four["train_loss"]) == pytest.approx(float(one["train_loss"]), abs=1e-5)
        if one["held_out_loss"]:
            assert float(four["held_out_loss"]) == pytest.approx(
                float(one["held_out_loss"]), abs=1e-5
            )


def test_interrupt_ends_cleanly_with_the_files_of_what_was_trained(text, tmp_path):
    arguments = ["--data", text, "--out", tmp_path, *TINY, "--steps", 100_000, "--eval-every", 1]
    arguments += ["--checkpoint", tmp_path / "run", "--checkpoint-every", 100_000]
    process = subprocess.Popen(
        command(*arguments),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3:"):
            break
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert f"interrupted after {len(rows(tmp_path))} of 100000 steps" in stdout
    assert "unigram entropy" in stdout
    assert rows(tmp_path)[-1]["held_out_loss"]
    assert (tmp_path / "loss.png").exists()
    assert (tmp_path / "run" / str(len(rows(tmp_path)))).is_dir()  # to go on with


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path):
    run = train("--data", text, "--out", tmp_path, *TINY, "--learning-rate", "1e38")
    assert run.returncode == 2
    assert "train_lm: the loss became nan at step" in run.stderr
    assert 0 < len(rows(tmp_path)) < 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no/such/text"], "--data no/such/text: no such file or directory"),
        (["--seq", "20000"], "too little text in .*: the training part has"),
        (["--devices", "4", "--batch", "6"], "--batch must be a multiple of 4, .* it is 6"),
        (["--precision", "fp8_block"], "--hidden must be a multiple of 128, .* it is 32"),
        (
            ["--precision", "fp8_block", "--hidden", "128", "--intermediate", "192"],
            "--intermediate must be a multiple of 128, .* it is 192",
        ),
        (["--devices", "0"], "--devices must be at least 1, but it is 0"),
        (["--devices", "4", "--expert-parallel", "3"], "--expert-parallel must be .* it is 3"),
        (["--expert-parallel", "0"], "--expert-parallel must be one of .* it is 0"),
        (["--seed", "-1"], "--seed must be at least 0, but it is -1"),
        (["--backend", "cuda"], "--backend: was 'cuda', but JAX runs on the cpu"),
        (["--choices", "5"], "--choices 5 must be at most --experts 4"),
        (["--steps", "0"], "--steps must be at least 1, but it is 0"),
    ],
)
def test_bad_input_is_refused_with_its_reason(text, tmp_path, arguments, message):
    run = train("--data", text, "--out", tmp_path / "out", *TINY, *arguments)
    assert run.returncode == 2
    last_line = run.stderr.strip().splitlines()[-1]
    assert re.search(f"^train_lm: .*{message}", last_line)
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_a_file_is_refused_and_kept(text, tmp_path):
    out = tmp_path / "out"
    out.write_text("mine")
    run = train("--data", text, "--out", out, *TINY)
    assert run.returncode == 2
    assert re.search("train_lm: --out .* cannot be made a directory", run.stderr)
    assert out.read_text() == "mine"
