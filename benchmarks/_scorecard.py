"""Lines of the scorecard: what each must reach, the parts that find out, and what comes of them."""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tests import process

PART_LIMIT_S = 480.0
# Of tests/conftest.py, which makes failures of skips where a GPU is declared.
SKIP = "skipped on declared hardware"
Figure = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A bound of a figure.

    Attributes:
      key: of the figure. at_least, at_most: one of the two.
      each: it holds of every part; else of the sum of all parts.
    """

    key: str
    at_least: float | None = None
    at_most: float | None = None
    each: bool = False

    @property
    def text(self) -> str:
        bound = f"at least {self.at_least}" if self.at_most is None else f"at most {self.at_most}"
        return f"{self.key} {bound}{' in each part' * self.each}"

    def value(self, figures: Sequence[Figure]) -> float:
        """What the bound is held against, of the parts that say; KeyError where none does."""
        values = [figure[self.key] for figure in figures if self.key in figure]
        if not values:
            raise KeyError(self.key)
        if not self.each:
            return sum(values)
        return min(values) if self.at_most is None else max(values)

    def holds(self, value: float) -> bool:
        """Of no number it does not."""
        if self.at_least is not None:
            return value >= self.at_least
        return self.at_most is not None and value <= self.at_most


class Part(NamedTuple):
    """A program, or a run of pytest, that fits PART_LIMIT_S.

    Attributes:
      name: of the part, unique. gpus: that it needs. arguments: of Python.
      is_suite: it is pytest, whose report says what came of it; else the last line of the output.
      minutes: that it takes at most, as far as it is known: it is ended at PART_LIMIT_S.
    """

    name: str
    gpus: int
    arguments: tuple[str, ...]
    is_suite: bool = False
    minutes: float = PART_LIMIT_S / 60


class Line(NamedTuple):
    """A line of the scorecard: `what`, by `parts`, of which all `rules` must hold.

    missing: what there is no program for yet; such a line never passes.
    """

    id: str
    what: str
    parts: tuple[Part, ...]
    rules: tuple[Rule, ...]
    gpus: int = 0
    missing: str = ""


class Revision(NamedTuple):
    """Of the sources that run."""

    commit: str
    dirty: bool


class Record(NamedTuple):
    """What came of a part: a figure, or an error."""

    part: str
    commit: str
    dirty: bool
    device: str
    seconds: float
    figure: dict[str, float] | None
    error: str


def run(
    part: Part,
    revision: Revision,
    device: str,
    folder: pathlib.Path,
    limit_s: float = PART_LIMIT_S,
) -> Record:
    """Runs a part in a process group of its own, all of which ends with it.

    What it prints lies in a file in the folder: of the fuzz, all seeds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = process.cpu_environment()
    if part.gpus:
        environment = process.gpu_environment(JAX_MEGAMOE_GPUS=str(part.gpus))
    start = time.monotonic()
    log = folder / f"{part.name}.log"
    with tempfile.TemporaryDirectory() as reports:
        report = pathlib.Path(reports, "report.xml")
        options = [f"--junitxml={report}"] if part.is_suite else []
        code = _run([sys.executable, *part.arguments, *options], environment, log, limit_s)
        output = log.read_text(errors="replace")
        try:
            figure, error = _figure(part, code, output, report), ""
        except ValueError as failed:
            figure, error = None, f"{failed}\n{output[-3000:]}".strip()
    seconds = round(time.monotonic() - start, 1)
    return Record(part.name, *revision, device if part.gpus else "cpu", seconds, figure, error)


def _run(
    command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path, limit_s: float
) -> int | None:
    """The exit status; None when time was up."""
    with log.open("w") as output:
        running = subprocess.Popen(
            command,
            cwd=process.ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return running.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def _figure(part: Part, code: int | None, output: str, report: pathlib.Path) -> dict[str, float]:
    """What a part has counted; ValueError: it did not end as it should."""
    if code is None:
        raise ValueError("it did not end in time")
    if code != 0 and not (part.is_suite and code == 1):  # 1: tests have failed
        raise ValueError(f"it ended with {code}")
    if part.is_suite:
        if not report.exists():
            raise ValueError("pytest has left no report")
        return suite_figure(report)
    last = output.strip().splitlines()[-1:]
    if not last or not last[0].startswith("done: "):
        raise ValueError("it did not say what it did")
    return json.loads(last[0].removeprefix("done: "))


def suite_figure(report: pathlib.Path) -> dict[str, float]:
    """How many tests ran, failed and were skipped, by pytest's JUnit report."""
    figure: dict[str, float] = {"tests": 0, "failed": 0, "skipped": 0}
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        faults = [*case.iter("failure"), *case.iter("error")]
        figure["tests"] += 1
        figure["failed"] += bool(faults)
        skips = [f for f in faults if SKIP in f"{f.get('message')}{f.text}"]
        figure["skipped"] += bool([*case.iter("skipped"), *skips])
    return figure


def judge(line: Line, records: Mapping[str, Record]) -> dict[str, Any]:
    """The line for the results file: `pass` is None where a part was not run."""
    rule = ", ".join(r.text for r in line.rules)
    judged: dict[str, Any] = {"id": line.id, "what": line.what, "rule": rule, "gpus": line.gpus}
    of_parts = [records.get(part.name) for part in line.parts]
    absent = [p.name for p, record in zip(line.parts, of_parts, strict=True) if record is None]
    found = [record for record in of_parts if record is not None]
    errors = [f"{record.part}: {record.error}" for record in found if record.figure is None]
    figures = [record.figure for record in found if record.figure is not None]
    judged |= {"figure": None, "pass": None, "why": ""}
    if found:
        judged |= {"device": found[0].device, "seconds": round(sum(r.seconds for r in found), 1)}
    if errors:
        return judged | {"pass": False, "why": "\n".join(errors)}
    if line.missing or absent or not line.parts:
        why = line.missing or f"not run: {', '.join(absent)}"
        return judged | {"why": f"needs {line.gpus} GPUs; {why}" if line.gpus > 1 else why}
    try:
        judged["figure"] = {rule.key: rule.value(figures) for rule in line.rules}
    except KeyError as error:
        return judged | {"pass": False, "why": f"no part says {error}"}
    broken = [r.text for r in line.rules if not r.holds(judged["figure"][r.key])]
    return judged | {"pass": not broken, "why": "; ".join(broken)}


def load(folder: pathlib.Path, revision: Revision) -> dict[str, Record]:
    """The records of earlier runs of this revision, by part; none where sources were changed.

    What has failed stays so: a part that is tried until it passes would say nothing.
    """
    if revision.dirty:
        return {}
    paths = sorted(folder.glob("*.json"))
    found = [Record(**json.loads(path.read_text())) for path in paths]
    same = [r for r in found if (r.commit, r.dirty) == revision]
    devices = {record.device for record in same} - {"cpu"}
    if len(devices) > 1:
        raise SystemExit(f"{folder} has parts of {sorted(devices)}; a scorecard is of one device")
    return {record.part: record for record in same}


def save(folder: pathlib.Path, record: Record) -> None:
    path = folder / f"{record.part}.json"
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(record._asdict(), indent=2) + "\n")
    unfinished.rename(path)


def parts_of(lines: Iterable[Line]) -> dict[str, Part]:
    """All parts by name, those that take few GPUs and little time first; several lines may share
    one."""
    found: dict[str, Part] = {}
    for part in (part for line in lines for part in line.parts):
        if found.setdefault(part.name, part) != part:
            raise ValueError(f"two parts have the name {part.name}")
    ordered = sorted(found.values(), key=lambda part: (part.gpus, part.minutes))
    return {part.name: part for part in ordered}
