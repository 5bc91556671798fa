"""The scorecard of reliability: a line a claim, with its figure and the rule that it must keep.

    python benchmarks/scorecard.py [PART ...] [--gpus N] [--list]
        [--parts out/scorecard] [--out benchmarks/results/scorecard-NAME.json]

Runs the parts that are named, or all that this machine's GPUs can run, the short ones first, each
in a process of its own and for at most 8 minutes; what a commit has run before is not run again.
The results file has all lines: those whose hardware is not here are not run, which is no pass. The
exit status is 1 if a line fails.
"""

import argparse
import os
import pathlib
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from _record import commit, smi, write
from _scorecard import Line, Part, Record, Revision, judge, load, parts_of, run, save
from _scorecard_lines import LINES


def num_gpus() -> int:
    """Hopper GPUs, by nvidia-smi: JAX would take their memory."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return 0
    return sum(line.startswith("9.") for line in shown.splitlines())


def run_parts(
    lines: Sequence[Line],
    names: Sequence[str],
    gpus: int,
    folder: pathlib.Path,
    revision_now: Callable[[], Revision],
    device: str,
) -> dict[str, Record]:
    """The records of this revision, after the named parts, or all that so many GPUs can run.

    A part during which sources were changed says nothing of either revision, and ends the program.
    """
    revision = revision_now()
    records = load(folder, revision)
    parts = parts_of(lines)
    if unknown := set(names) - set(parts):
        raise SystemExit(f"no part is named {sorted(unknown)}; --list shows them")
    chosen = [parts[name] for name in names] or [p for p in parts.values() if p.gpus <= gpus]
    if lacking := [part.name for part in chosen if part.gpus > gpus]:
        raise SystemExit(f"{lacking} need more than {gpus} GPUs")
    for part in chosen:
        if part.name not in records:
            records[part.name] = record = run(part, revision, device, folder)
            if (now := revision_now()) != revision:
                raise SystemExit(f"{part.name}: of {revision} when it began, of {now} at its end")
            save(folder, record)
        record = records[part.name]
        print(f"{part.name}: {record.figure or record.error} ({record.seconds} s)", flush=True)
    return records


def listed(parts: Collection[Part]) -> Iterator[str]:
    """What `--list` says of each part, and how long all take at most, by the GPUs they need."""
    yield "GPUs  minutes  part"
    for part in parts:
        yield f"{part.gpus:4}  {part.minutes:7g}  {part.name}"
    for gpus in sorted({part.gpus for part in parts}):
        minutes = sum(part.minutes for part in parts if part.gpus == gpus)
        yield f"{gpus:4}  {minutes:7g}  all of these"


def report(lines: Sequence[Line], records: Mapping[str, Record]) -> list[dict[str, object]]:
    """The judged lines, which it prints."""
    judged = [judge(line, records) for line in lines]
    verdicts = {True: "pass", False: "FAIL", None: "not run"}
    for line in judged:
        print(f"{verdicts[line['pass']]:8}{line['id']}: {line['figure'] or line['why']}")
    return judged


def main() -> int:
    parser = argparse.ArgumentParser(description="The scorecard of reliability.")
    parser.add_argument("names", nargs="*", metavar="PART", help="default: all that can run here")
    here = num_gpus()
    parser.add_argument("--gpus", type=int, default=here, help="that may be relied on")
    parser.add_argument("--list", action="store_true", help="the parts, in their order")
    parser.add_argument("--parts", type=pathlib.Path, default=pathlib.Path("out/scorecard"))
    parser.add_argument("--out", type=pathlib.Path, help="write the lines to this JSON file")
    chosen = parser.parse_args()
    if not 0 <= chosen.gpus <= here:
        parser.error(f"--gpus must be 0 to {here}, the Hopper GPUs here, but it is {chosen.gpus}")
    if chosen.list:
        print(*listed(parts_of(LINES).values()), sep="\n")
        return 0
    # For `write`, which asks JAX for the device; what is run here sets its own.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    device = smi("name") if chosen.gpus else "cpu"
    records = run_parts(
        LINES, chosen.names, chosen.gpus, chosen.parts, lambda: Revision(*commit()), device
    )
    lines = report(LINES, records)
    if chosen.out:
        write(chosen.out, lines, max(chosen.gpus, 1), key="lines")
    return int(any(line["pass"] is False for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
