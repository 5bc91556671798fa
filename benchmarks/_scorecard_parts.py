"""How lines of the scorecard name their programs and tests, and rules that several share."""

from _scorecard import Part, Rule

NONE_WRONG = (Rule("wrong", at_most=0),)
FUZZ_RULES = (Rule("routings", at_least=2000), Rule("shapes", at_most=40), *NONE_WRONG)
FUZZ = "y and all gradients of random routings against the oracle and a float32 reference"
FUZZ_FP8 = "y and all gradients in FP8 of random routings against the oracle and the recipe"


def program(name: str, gpus: int, *arguments: str, minutes: float) -> Part:
    """One of tests.reliability_programs."""
    command = ("-m", "tests.reliability_programs", *arguments)
    return Part(name, gpus, command, minutes=minutes)


def suite(name: str, gpus: int, *files: str, only: str = "", minutes: float) -> Part:
    """Tests of some files: those whose names fit `only`, if it says any."""
    chosen = [*(("-m", "gpu") if gpus else ()), *(("-k", only) if only else ())]
    paths = [f"tests/{'gpu' if gpus else 'cpu'}/test_{file}.py" for file in files]
    command = ("-m", "pytest", "-p", "no:cacheprovider", *chosen, *paths)
    return Part(name, gpus, command, is_suite=True, minutes=minutes)


def all_pass(tests: int) -> tuple[Rule, ...]:
    return Rule("tests", at_least=tests), Rule("failed", at_most=0), Rule("skipped", at_most=0)


def fuzz(name: str, ranks: int, gpus: int, in_part: int, *precision: str) -> tuple[Part, ...]:
    """All 40 shapes on GPUs, so many in a part, 50 routings each."""
    how = ("fuzz", "cuda", str(ranks))
    return tuple(
        program(f"{name}_{i}", gpus, *how, str(first), str(in_part), "50", *precision, minutes=8)
        for i, first in enumerate(range(0, 40, in_part))
    )
