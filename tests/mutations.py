"""The seeded faults of cuda/pipeline/seeded_faults.h, and which checks find the one that is set."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

HEADER = Path(__file__).resolve().parents[1] / "cuda" / "pipeline" / "seeded_faults.h"
ORDERING = "ordering"


class Fault(NamedTuple):
    """number: as HasFault's kernels know it. kind: one of five. what: the kernel then does."""

    number: int
    name: str
    kind: str
    what: str


def _read() -> list[Fault]:
    text = HEADER.read_text().replace("\\\n", "")
    found = re.findall(r'\bF\((\w+),\s*"([^"]+)",\s*"([^"]+)"\)', text)
    return [Fault(number, *fields) for number, fields in enumerate(found, 1)]


FAULTS = _read()
NO_FAULT = Fault(0, "no fault", "none", "nothing is wrong")
# Those that show in whatever order things happen.
SEMANTIC = [fault for fault in FAULTS if fault.kind != ORDERING]


def error_of(check: Callable[[], None]) -> str:
    """What a check fails with; "" when it passes."""
    try:
        check()
    except (AssertionError, jax.errors.JaxRuntimeError) as error:
        return str(error) or type(error).__name__
    return ""


def failing(checks: Mapping[str, Callable[[], None]]) -> Iterable[str]:
    """The names of the checks that fail; each is run when its turn comes."""
    return (name for name, check in checks.items() if error_of(check))


def table(caught: Mapping[Fault, str]) -> str:
    """Markdown, a line a fault with what found it."""
    lines = ["| kind | fault | what the kernel does | found by |", "|---|---|---|---|"]
    lines += [f"| {f.kind} | {f.name} | {f.what} | {found} |" for f, found in caught.items()]
    return "\n".join(lines)
