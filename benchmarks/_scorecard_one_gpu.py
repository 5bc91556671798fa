"""Lines of the scorecard for one GPU."""

from _scorecard import Line, Rule
from _scorecard_parts import FUZZ, FUZZ_RULES, NONE_WRONG, all_pass, fuzz, program, suite

ONE_GPU = (
    Line("routing_fuzz", FUZZ, fuzz("fuzz_ep1", 1, 1, 10), FUZZ_RULES, 1),
    Line(
        "stress",
        "runs with random delays in every role and poisoned memory, all of the same bits",
        tuple(
            program(f"stress_{p}", 1, "stress", p, "1000", minutes=7)
            for p in ("forward", "backward")
        ),
        (
            Rule("iterations", at_least=2000),
            Rule("fewest_delays_of_a_role", at_least=1000, each=True),
        ),
        1,
    ),
    Line(
        "repeats",
        "the bits of a forward and backward in fresh processes, twice in each",
        (program("repeats", 1, "repeats", "cuda", "20", "4", minutes=8),),
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
        (
            suite(
                "waits",
                1,
                "wait",
                "forward_waits",
                "backward",
                only="flag or gives_up or wait",
                minutes=6,
            ),
        ),
        all_pass(20),
        1,
    ),
    Line(
        "watchdog_ranks_on_one",
        "ranks that share a GPU, of which one stalls in each of the eight phases of a call in "
        "which others wait for it: how long after the deadline all has ended",
        (program("stalls_on_one", 1, "stalled", "cuda", minutes=3),),
        (
            Rule("cases", at_least=8),
            *NONE_WRONG,
            Rule("slowest_s", at_most=5),
        ),
        1,
    ),
    Line(
        "sanitizer",
        "compute-sanitizer's memcheck, synccheck and initcheck find nothing; racecheck cannot run "
        "such kernels",
        (
            suite("sanitizer_forward", 1, "sanitizer", only="of0 or of1 or of2", minutes=6),
            suite("sanitizer_backward", 1, "sanitizer", only="of3 or of4 or of5", minutes=8),
        ),
        all_pass(6),
        1,
    ),
    Line(
        "isolation",
        "NaN and Inf reach only what depends on them, bitwise",
        (program("isolation", 1, "isolation", "cuda", minutes=3),),
        (Rule("cases", at_least=12), *NONE_WRONG),
        1,
    ),
    Line(
        "offsets",
        "arrays beyond 2^31 elements, rows of H, I and 2I columns and weights, exact",
        tuple(
            suite(f"offsets_{p}", 1, f"{p}_sizes", only="offsets", minutes=6)
            for p in ("forward", "backward")
        ),
        all_pass(12),
        1,
    ),
    Line(
        "transforms",
        "JAX's transformations: the bits of a plain gradient, and no more calls than asked for",
        (program("transforms", 1, "transforms", "cuda", minutes=5),),
        (Rule("cases", at_least=24), *NONE_WRONG),
        1,
    ),
    Line(
        "drift",
        "two models of 64 layers, made and thrown away, and trained: MiB of the device left behind",
        (
            program("leaks_of_models", 1, "leaks", "cuda", "64", "20", "50", minutes=8),
            program("leaks_of_steps", 1, "leaks", "cuda", "64", "1", "1000", minutes=8),
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
        (suite("overlap", 1, "forward_transforms", only="threads or command_buffers", minutes=6),),
        all_pass(6),
        1,
    ),
    Line(
        "memory",
        "the plan of memory is what programs take; too little of it is an error soon, and the "
        "process goes on",
        (
            suite("memory_plan", 1, "backward_memory", "forward_memory", minutes=5),
            program("fractions", 1, "fractions", minutes=4),
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
        (suite("mutations", 1, "mutations", minutes=3),),
        all_pass(18),
        1,
    ),
)
