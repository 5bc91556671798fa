"""The scorecard's frame: a line passes by its rules alone, and nothing that was not run does."""

import functools
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import process

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
scorecard, _scorecard, _scorecard_lines = map(
    importlib.import_module, "scorecard _scorecard _scorecard_lines".split()
)
Line, Part, Record, Revision, Rule = (
    getattr(_scorecard, name) for name in "Line Part Record Revision Rule".split()
)

CLEAN, DIRTY = Revision("abc", False), Revision("abc", True)


def part(name: str, code: str, gpus: int = 0) -> Any:
    """A program of one line of Python."""
    return Part(name, gpus, ("-c", code))


def says(**figure: float) -> str:
    return f"print('done:', {json.dumps(json.dumps(figure))})"


def line(*parts: Any, rules: tuple[Any, ...] = (), **fields: Any) -> Any:
    return Line("line", "what", parts, rules or (Rule("wrong", at_most=0),), **fields)


def record(name: str, **figure: float) -> Any:
    return Record(name, *CLEAN, "cpu", 1.0, figure, "")


@pytest.mark.parametrize(
    ("rule", "passes"),
    [
        (Rule("n", at_least=5), True),
        (Rule("n", at_least=6), False),
        (Rule("n", at_most=5), True),
        (Rule("n", at_most=4), False),
        (Rule("n", at_least=2, each=True), True),
        (Rule("n", at_least=3, each=True), False),
        (Rule("n", at_most=3, each=True), True),
        (Rule("n", at_most=2, each=True), False),
        (Rule("nothing said", at_most=0), False),
        (Rule("n"), False),
        (Rule("nan", at_most=1), False),
        (Rule("nan", at_least=1), False),
    ],
    ids=lambda value: value.text if isinstance(value, Rule) else "",
)
def test_a_line_passes_by_its_rules(rule: Any, passes: bool) -> None:
    parts = [part(name, "") for name in "ab"]
    found = {"a": record("a", n=2, nan=float("nan")), "b": record("b", n=3)}
    judged = _scorecard.judge(line(*parts, rules=(rule,)), found)
    assert judged["pass"] is passes and bool(judged["why"]) is not passes
    assert judged["rule"] == rule.text


def test_what_was_not_run_does_not_pass() -> None:
    both = line(part("a", ""), part("b", ""))
    one = {"a": record("a", wrong=0)}
    assert _scorecard.judge(both, one | {"b": record("b", wrong=0)})["pass"] is True
    for judged in (
        _scorecard.judge(both, one),
        _scorecard.judge(line(), one),
        _scorecard.judge(line(part("a", ""), missing="a program is missing"), one),
    ):
        assert judged["pass"] is None and judged["figure"] is None and judged["why"]
    # Not even where all else is good; and what is wrong is wrong, whatever else was not run.
    failed = Record("a", *CLEAN, "cpu", 1.0, None, "it ended with 1")
    assert _scorecard.judge(both, {"a": failed})["pass"] is False


def test_a_part_is_run_once_a_commit_and_what_failed_stays_so(tmp_path: Path) -> None:
    counter = tmp_path / "runs"
    count = f"import pathlib; p = pathlib.Path({str(counter)!r}); p.open('a').write('x'); "
    bad = part("bad", count + "raise SystemExit(3)")
    lines = (line(part("good", count + says(wrong=0))), line(bad))
    for _ in range(2):
        found = scorecard.run_parts(lines, [], 0, tmp_path / "parts", lambda: CLEAN, "cpu")
        assert found["good"].figure == {"wrong": 0}
        assert found["bad"].figure is None and "it ended with 3" in found["bad"].error
        assert counter.read_text() == "xx"
    for revision in (Revision("def", False), DIRTY, DIRTY):
        now = functools.partial(lambda revision: revision, revision)
        scorecard.run_parts(lines, ["good"], 0, tmp_path / "parts", now, "cpu")
    assert counter.read_text() == "xxxxx"


def test_a_part_during_which_sources_change_is_not_kept(tmp_path: Path) -> None:
    revisions = iter([CLEAN, DIRTY])
    lines = (line(part("a", says(wrong=0))),)
    with pytest.raises(SystemExit, match="a: of .*False.* when it began, of .*True.* at its end"):
        scorecard.run_parts(lines, [], 0, tmp_path, lambda: next(revisions), "cpu")
    assert not list(tmp_path.glob("*.json"))


def test_parts_of_two_commits_or_devices_do_not_mix(tmp_path: Path) -> None:
    _scorecard.save(tmp_path, record("a", wrong=0))
    _scorecard.save(tmp_path, record("b", wrong=0)._replace(commit="def", device="NVIDIA H200"))
    assert set(_scorecard.load(tmp_path, CLEAN)) == {"a"}
    _scorecard.save(tmp_path, record("b", wrong=0)._replace(device="NVIDIA H200"))
    assert set(_scorecard.load(tmp_path, CLEAN)) == {"a", "b"}
    _scorecard.save(tmp_path, record("c", wrong=0)._replace(device="NVIDIA H100"))
    with pytest.raises(SystemExit, match="of one device"):
        _scorecard.load(tmp_path, CLEAN)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import time; print('begun', flush=True); time.sleep(60)", "did not end in time\nbegun"),
        ("print('done: all')", "Expecting value"),
        (says(wrong=0) + "; print('more')", "did not say what it did\ndone"),
        (says(wrong=0) + "; raise SystemExit(1)", "ended with 1"),
        ("import os; os.abort()", "ended with -6"),
    ],
)
def test_a_part_that_does_not_end_well_has_no_figure(code: str, error: str, tmp_path: Path) -> None:
    found = _scorecard.run(part("a", code), CLEAN, "cpu", tmp_path, limit_s=2)
    assert found.figure is None and error in found.error
    assert found.seconds < 10


SUITE = """
import pytest
def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip(reason="no such device")
def test_skips(): pass
def test_skips_on_hardware(): pytest.fail("skipped on declared hardware: no such device")
"""


def test_a_suite_counts_tests_failures_and_skips(tmp_path: Path) -> None:
    file = tmp_path / "test_suite.py"
    file.write_text(SUITE)
    alone = ("-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    found = _scorecard.run(Part("suite", 0, (*alone, str(file)), True), CLEAN, "cpu", tmp_path)
    assert found.figure == {"tests": 4, "failed": 2, "skipped": 2}
    none = Part("suite", 0, (*alone, "-k", "nothing", str(file)), True)
    assert "it ended with 5" in _scorecard.run(none, CLEAN, "cpu", tmp_path).error
    assert "4 deselected" in (tmp_path / "suite.log").read_text()


def test_a_failing_line_fails_the_program_and_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = part("good", says(wrong=0)), part("bad", says(wrong=2))
    far = part("far", says(wrong=0), gpus=2)
    lines = (line(good), line(bad)._replace(id="bad"), line(far, gpus=2)._replace(id="far"))
    out = tmp_path / "scorecard.json"
    monkeypatch.setattr(scorecard, "LINES", lines)

    def main(*names: str) -> int:
        how = ["--gpus", "0", "--parts", str(tmp_path / "parts"), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["scorecard.py", *names, *how])
        return scorecard.main()

    assert main() == 1
    written = json.loads(out.read_text())
    assert {"commit", "dirty", "date", "device", "versions"} <= set(written)
    judged = {found["id"]: found for found in written["lines"]}
    assert {id: found["pass"] for id, found in judged.items()} == {
        "line": True,
        "bad": False,
        "far": None,
    }
    assert judged["bad"]["figure"] == {"wrong": 2} and judged["bad"]["why"] == "wrong at most 0"
    assert judged["far"]["why"] == "needs 2 GPUs; not run: far"
    printed = capsys.readouterr().out
    assert "FAIL    bad" in printed and "not run far" in printed
    monkeypatch.setattr(scorecard, "LINES", lines[::2])
    assert main() == 0
    for name, why in (("far", "need more than 0 GPUs"), ("nothing", "no part is named")):
        with pytest.raises(SystemExit, match=why):
            main(name)


def test_parts_are_listed_and_run_the_short_ones_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    minutes = {"long": 8, "short": 0.5, "middle": 3}
    parts = [part(name, says(wrong=0))._replace(minutes=m) for name, m in minutes.items()]
    lines = (line(part("far", "", gpus=1)._replace(minutes=1)), line(*parts))
    listed = list(scorecard.listed(_scorecard.parts_of(lines).values()))
    right = ["0 0.5 short", "0 3 middle", "0 8 long", "1 1 far"]
    right += ["0 11.5 all of these", "1 1 all of these"]
    assert [" ".join(row.split()) for row in listed[1:]] == right
    scorecard.run_parts(lines, [], 0, tmp_path, lambda: CLEAN, "cpu")
    order = [row.split(":")[0] for row in capsys.readouterr().out.splitlines()]
    assert order == ["short", "middle", "long"]


@pytest.mark.parametrize("gpus", ["-1", "3"])
def test_gpus_that_are_not_here_are_refused(
    gpus: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scorecard, "num_gpus", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["scorecard.py", "--gpus", gpus])
    with pytest.raises(SystemExit, match="2"):
        scorecard.main()
    assert (
        f"--gpus must be 0 to 2, the Hopper GPUs here, but it is {gpus}" in capsys.readouterr().err
    )


def test_lines_are_whole() -> None:
    lines = _scorecard_lines.LINES
    assert len({found.id for found in lines}) == len(lines)
    for found in lines:
        assert found.parts or found.missing
        assert all(rule.at_least is not None or rule.at_most is not None for rule in found.rules)
        assert {part.gpus for part in found.parts} <= {found.gpus}
        for part in found.parts:
            assert 0 < 60 * part.minutes <= _scorecard.PART_LIMIT_S
    assert {found.gpus for found in lines} == {0, 1, 2}


# How many tests pytest would run with each of some lists of arguments.
COLLECT = """
import contextlib, io, json, sys
import pytest

class Collected:
    def pytest_collection_finish(self, session):
        self.num_tests = len(session.items)

found = {}
for name, arguments in json.loads(sys.argv[1]).items():
    collected = Collected()
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*arguments, "--co", "-q", "--noconftest"], plugins=[collected])
    found[name] = collected.num_tests
print(json.dumps(found))
"""


def test_suites_hold_as_many_tests_as_their_lines_ask_for() -> None:
    suites = {}
    for name, found in _scorecard.parts_of(_scorecard_lines.LINES).items():
        if found.is_suite:
            _, _, *arguments = found.arguments
            if found.gpus:
                arguments[arguments.index("-m") + 1] = "gpu or multi_gpu"
            suites[name] = arguments
    result = process.run_python(COLLECT, json.dumps(suites))
    assert result.returncode == 0, result.stderr
    num_tests = json.loads(result.stdout)
    assert all(num_tests.values()), num_tests
    for found in _scorecard_lines.LINES:
        right = sum(num_tests[part.name] for part in found.parts if part.is_suite)
        wanted = [rule.at_least for rule in found.rules if rule.key == "tests"]
        assert wanted in ([], [right]), f"{found.id} has {right} tests"


def test_programs_are_called_as_they_can_be() -> None:
    for found in _scorecard.parts_of(_scorecard_lines.LINES).values():
        if not found.is_suite:
            _, module, name, *arguments = found.arguments
            program = importlib.import_module(module).PROGRAMS[name]
            inspect.signature(program).bind(*arguments)
