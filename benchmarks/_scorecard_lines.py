"""What the scorecard asks for: the lines, their rules, and the programs and tests that answer.

Where a line and its like for two GPUs differ in the machine alone, their names say so.
"""

from _scorecard import Line, Part, Rule

NONE_WRONG = (Rule("wrong", at_most=0),)


def program(name: str, gpus: int, *arguments: str) -> Part:
    """One of tests.reliability_programs."""
    return Part(name, gpus, ("-m", "tests.reliability_programs", *arguments))


def suite(name: str, gpus: int, *files: str, only: str = "") -> Part:
    """Tests of some files: those whose names fit `only`, if it says any."""
    chosen = [*(("-m", "gpu") if gpus else ()), *(("-k", only) if only else ())]
    paths = [f"tests/{'gpu' if gpus else 'cpu'}/test_{file}.py" for file in files]
    return Part(name, gpus, ("-m", "pytest", "-p", "no:cacheprovider", *chosen, *paths), True)


def all_pass(tests: int) -> tuple[Rule, ...]:
    return Rule("tests", at_least=tests), Rule("failed", at_most=0), Rule("skipped", at_most=0)


def _fuzz(backend: str, ranks: int, gpus: int) -> tuple[Part, ...]:
    """All shapes, ten in a part, 50 routings each."""
    return tuple(
        program(f"fuzz_ep{ranks}_{i}", gpus, "fuzz", backend, str(ranks), str(10 * i), "10", "50")
        for i in range(4)
    )


def _turns(turns: range) -> str:
    """Of the test that is run 20 times."""
    return f"right_behind and ({' or '.join(f'[{turn}]' for turn in turns)})"


FUZZ_RULES = (Rule("routings", at_least=2000), Rule("shapes", at_most=40), *NONE_WRONG)
FUZZ = "y and all gradients of random routings against the oracle and a float32 reference"

ANY_MACHINE = (
    Line(
        "routing_fuzz_reference",
        f"{FUZZ}, by the reference backend on two simulated devices",
        (program("fuzz_reference", 0, "fuzz", "reference", "2", "4", "10", "10"),),
        (Rule("routings", at_least=100), *NONE_WRONG),
    ),
    Line(
        "routing_fuzz_emulated",
        f"{FUZZ}, by the kernels on the emulated machine, of one rank and of two",
        tuple(
            program(f"fuzz_emulated_ep{ranks}", 0, "fuzz", "emulated", str(ranks), "29", "6", "10")
            for ranks in (1, 2)
        ),
        (Rule("routings", at_least=120), *NONE_WRONG),
    ),
    Line(
        "bad_input",
        "kinds of bad input, each with an exception of its own before anything is launched",
        (program("refusals", 0, "refusals"),),
        (
            Rule("classes", at_least=50),
            Rule("alike", at_most=0),
            Rule("slowest_s", at_most=1, each=True),
        ),
    ),
    Line(
        "isolation_reference",
        "NaN and Inf reach only what depends on them, bitwise, by the reference backend",
        (program("isolation_reference", 0, "isolation", "reference"),),
        (Rule("cases", at_least=12), *NONE_WRONG),
    ),
    Line(
        "transforms_reference",
        "JAX's transformations: the bits of a plain gradient by the reference backend, and the "
        "kernels' calls in programs lowered for CUDA",
        (program("transforms_reference", 0, "transforms", "reference"),),
        (Rule("cases", at_least=24), *NONE_WRONG),
    ),
    Line(
        "refused_setup_emulated",
        "ranks that differ are refused on all ranks with the same words, on the emulated machine",
        (suite("refused_setup", 0, "peers", only="all_ranks_refuse"),),
        all_pass(7),
    ),
    Line(
        "watch_of_processes",
        "the end of a real process is told soon, and of no other one",
        (suite("process_watch", 0, "process_watch"),),
        all_pass(17),
    ),
    Line(
        "security",
        "no predictable names, no foreign peers, nothing of others executed, ids stay in memory",
        (suite("security", 0, "security"),),
        all_pass(15),
    ),
)

ONE_GPU = (
    Line("routing_fuzz", FUZZ, _fuzz("cuda", 1, 1), FUZZ_RULES, 1),
    Line(
        "stress",
        "runs with random delays in every role and poisoned memory, all of the same bits",
        tuple(program(f"stress_{p}", 1, "stress", p, "1000") for p in ("forward", "backward")),
        (
            Rule("iterations", at_least=2000),
            Rule("fewest_delays_of_a_role", at_least=1000, each=True),
        ),
        1,
    ),
    Line(
        "repeats",
        "the bits of a forward and backward in fresh processes, twice in each",
        (program("repeats", 1, "repeats", "cuda", "20", "4"),),
        (
            Rule("processes", at_least=20),
            Rule("runs", at_least=40),
            Rule("different", at_most=0),
        ),
        1,
    ),
    Line(
        "watchdog",
        "a wait inside a kernel whose flag never comes ends at its deadline and names its phase",
        (suite("waits", 1, "wait", "forward_waits", "backward", only="flag or gives_up or wait"),),
        all_pass(20),
        1,
    ),
    Line(
        "sanitizer",
        "compute-sanitizer's memcheck, synccheck and initcheck find nothing; racecheck cannot run "
        "such kernels",
        (
            suite("sanitizer_forward", 1, "sanitizer", only="of0 or of1 or of2"),
            suite("sanitizer_backward", 1, "sanitizer", only="of3 or of4 or of5"),
        ),
        all_pass(6),
        1,
    ),
    Line(
        "isolation",
        "NaN and Inf reach only what depends on them, bitwise",
        (program("isolation", 1, "isolation", "cuda"),),
        (Rule("cases", at_least=12), *NONE_WRONG),
        1,
    ),
    Line(
        "offsets",
        "arrays beyond 2^31 elements, rows of H, I and 2I columns and weights, exact",
        tuple(
            suite(f"offsets_{p}", 1, f"{p}_sizes", only="offsets") for p in ("forward", "backward")
        ),
        all_pass(12),
        1,
    ),
    Line(
        "transforms",
        "JAX's transformations: the bits of a plain gradient, and no more calls than asked for",
        (program("transforms", 1, "transforms", "cuda"),),
        (Rule("cases", at_least=24), *NONE_WRONG),
        1,
    ),
    Line(
        "drift",
        "two models of 64 layers, made and thrown away, and trained: MiB of the device left behind",
        (
            program("leaks_of_models", 1, "leaks", "cuda", "64", "20", "50"),
            program("leaks_of_steps", 1, "leaks", "cuda", "64", "1", "1000"),
        ),
        (
            Rule("layers", at_least=64, each=True),
            Rule("cycles", at_least=20),
            Rule("steps", at_least=1000),
            Rule("drift_mib", at_most=8, each=True),
        ),
        1,
    ),
    Line(
        "overlap",
        "1,000 calls from each of two threads, and with each setting of command buffers",
        (suite("overlap", 1, "forward_transforms", only="threads or command_buffers"),),
        all_pass(6),
        1,
    ),
    Line(
        "memory",
        "the plan of memory is what programs take; too little of it is an error soon, and the "
        "process goes on",
        (
            suite("memory_plan", 1, "backward_memory", "forward_memory"),
            program("fractions", 1, "fractions"),
        ),
        (
            *all_pass(24),
            Rule("settings", at_least=8),
            Rule("slowest_s", at_most=5, each=True),
        ),
        1,
    ),
    Line(
        "mutations",
        "seeded faults of the kernels: the 16 that do not depend on an order are found",
        (suite("mutations", 1, "mutations"),),
        all_pass(18),
        1,
    ),
)

TWO_GPUS = (
    Line("routing_fuzz_ranks", FUZZ, _fuzz("cuda", 2, 2), FUZZ_RULES, 2),
    Line(
        "stress_ranks",
        "two processes whose launches are late by up to 50 ms, with delays in every role",
        tuple(
            program(f"stress_ranks_{i}", 2, "stress_ranks", "cuda", str(1000 * i), "1000")
            for i in range(2)
        ),
        (Rule("iterations", at_least=2000), Rule("different", at_most=0)),
        2,
    ),
    Line(
        "repeats_ranks",
        "the bits of one process in fresh pairs of processes, GPUs in either order; the bits of "
        "one GPU, at every size and 20 times",
        (
            *(program(f"pairs_{i}", 2, "pairs", "cuda", str(i), "5") for i in range(4)),
            suite("bits_of_ranks", 2, "ranks", only="every_bit or twenty_runs"),
        ),
        (Rule("pairs", at_least=20), *all_pass(50)),
        2,
    ),
    Line(
        "configurations_differ",
        "processes that make different calls are refused on both ranks within 30 s",
        (suite("configurations_differ", 2, "processes", only="differs"),),
        all_pass(6),
        2,
    ),
    Line(
        "watchdog_ranks",
        "a peer that does not come, or stalls, in each phase",
        (
            suite("faults_of_groups", 2, "group_faults"),
            suite("stalls", 2, "processes", only="stalls"),
        ),
        all_pass(6),
        2,
        missing="12 phases are wanted; there are programs for 3",
    ),
    Line(
        "false_alarm",
        "a peer that is 90 s late with default settings ends nothing",
        (suite("late", 2, "processes", only="is_late"),),
        all_pass(1),
        2,
    ),
    Line(
        "killed_peer",
        "a peer that is killed, interrupted or leaves: the other one raises within 10 s, and the "
        "next start works, 20 times right behind it",
        (
            suite(
                "killed", 2, "processes", only="killed_is_named or interrupted or leaves or should"
            ),
            suite("killed_at_any_moment", 2, "processes", only="any_moment"),
            *(
                suite(f"restarts_{i}", 2, "processes", only=_turns(range(5 * i, 5 * i + 5)))
                for i in range(4)
            ),
        ),
        all_pass(30),
        2,
    ),
    Line(
        "overlap_ranks",
        "1,000 steps with collectives of XLA around the layer, of one pass and of several",
        (suite("thousand_steps", 2, "ranks", "passes", only="thousand"),),
        all_pass(2),
        2,
    ),
)


def _skips(id: str, gpus: int, lines: tuple[Line, ...]) -> Line:
    suites = tuple(part for line in lines for part in line.parts if part.is_suite)
    what = "tests that were skipped although their hardware is declared"
    return Line(id, what, suites, (Rule("skipped", at_most=0),), gpus)


LINES = (
    *ANY_MACHINE,
    *ONE_GPU,
    _skips("skips", 1, ONE_GPU),
    *TWO_GPUS,
    _skips("skips_ranks", 2, TWO_GPUS),
)
