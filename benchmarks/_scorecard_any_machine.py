"""Lines of the scorecard that need no GPU."""

from _scorecard import Line, Rule
from _scorecard_parts import FUZZ, FUZZ_FP8, NONE_WRONG, all_pass, program, suite

# Six shapes, ten routings of each.
EMULATED_FUZZ, SIX = ("fuzz", "emulated"), ("29", "6", "10")

ANY_MACHINE = (
    Line(
        "routing_fuzz_reference",
        f"{FUZZ}, by the reference backend on two simulated devices",
        (program("fuzz_reference", 0, "fuzz", "reference", "2", "4", "10", "10", minutes=8),),
        (Rule("routings", at_least=100), *NONE_WRONG),
    ),
    Line(
        "routing_fuzz_emulated",
        f"{FUZZ}, by the kernels on the emulated machine, of one rank and of two",
        tuple(
            program(f"fuzz_emulated_ep{ranks}", 0, *EMULATED_FUZZ, str(ranks), *SIX, minutes=8)
            for ranks in (1, 2)
        ),
        (Rule("routings", at_least=120), *NONE_WRONG),
    ),
    Line(
        "routing_fuzz_fp8_emulated",
        f"{FUZZ_FP8}, by the kernels on the emulated machine",
        tuple(
            program(
                f"fuzz_fp8_emulated_{first}",
                0,
                *(*EMULATED_FUZZ, "1", first, "3", "5", "fp8_block"),
                minutes=6,
            )
            for first in ("29", "32")
        ),
        (Rule("routings", at_least=30), *NONE_WRONG),
    ),
    Line(
        "bad_input",
        "kinds of bad input, each with an exception of its own before anything is launched",
        (program("refusals", 0, "refusals", minutes=1),),
        (
            Rule("classes", at_least=50),
            Rule("alike", at_most=0),
            Rule("slowest_s", at_most=1, each=True),
        ),
    ),
    Line(
        "isolation_reference",
        "NaN and Inf reach only what depends on them, or on their group in FP8, bitwise, by the "
        "reference backend",
        (
            program("isolation_reference", 0, "isolation", "reference", minutes=4),
            program("isolation_fp8_reference", 0, "isolation", "reference", "fp8_block", minutes=6),
        ),
        (Rule("cases", at_least=24), *NONE_WRONG),
    ),
    Line(
        "isolation_emulated",
        "the same by the kernels on the emulated machine",
        (
            program("isolation_emulated", 0, "isolation", "emulated", minutes=5),
            program("isolation_fp8_emulated", 0, "isolation", "emulated", "fp8_block", minutes=6),
        ),
        (Rule("cases", at_least=24), *NONE_WRONG),
    ),
    Line(
        "transforms_reference",
        "JAX's transformations: the bits of a plain gradient by the reference backend, and the "
        "kernels' calls in programs lowered for CUDA",
        (
            program("transforms_reference", 0, "transforms", "reference", minutes=6),
            program(
                "transforms_fp8_reference", 0, "transforms", "reference", "fp8_block", minutes=8
            ),
        ),
        (Rule("cases", at_least=48), *NONE_WRONG),
    ),
    Line(
        "refused_setup_emulated",
        "ranks that differ are refused on all ranks with the same words, on the emulated machine",
        (suite("refused_setup", 0, "peers", only="all_ranks_refuse", minutes=5),),
        all_pass(7),
    ),
    Line(
        "watchdog_setup",
        "a rank that does not come to the setup, or stalls in one of its four meetings: the others "
        "give up at their deadline and refuse the group",
        (
            suite(
                "stalls_in_setup",
                0,
                "peers",
                only="setup_is_given_up or setup_has or not_come",
                minutes=5,
            ),
        ),
        all_pass(6),
    ),
    Line(
        "watchdog_emulated",
        "a rank that stalls in each of the eight phases of a call in which others wait for it: who "
        "waited for whom and for what, on the emulated machine",
        (program("stalls_emulated", 0, "stalled", "emulated", minutes=5),),
        (Rule("cases", at_least=8), *NONE_WRONG),
    ),
    Line(
        "watch_of_processes",
        "the end of a real process is told soon, and of no other one",
        (suite("process_watch", 0, "process_watch", minutes=3),),
        all_pass(17),
    ),
    Line(
        "security",
        "no predictable names, no foreign peers, nothing of others executed, ids stay in memory",
        (suite("security", 0, "security", minutes=8),),
        all_pass(15),
    ),
)
