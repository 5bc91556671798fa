"""Lines of the scorecard for two GPUs of one host."""

from _scorecard import Line, Rule
from _scorecard_parts import FUZZ, FUZZ_RULES, all_pass, fuzz, program, suite


def _turns(turns: range) -> str:
    """Of the test that is run 20 times."""
    return f"right_behind and ({' or '.join(f'[{turn}]' for turn in turns)})"


TWO_GPUS = (
    Line("routing_fuzz_ranks", FUZZ, fuzz("fuzz_ep2", 2, 2, 10), FUZZ_RULES, 2),
    Line(
        "stress_ranks",
        "two processes whose launches are late by up to 50 ms, with delays in every role",
        tuple(
            program(
                f"stress_ranks_{i}", 2, "stress_ranks", "cuda", str(1000 * i), "1000", minutes=8
            )
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
            *(program(f"pairs_{i}", 2, "pairs", "cuda", str(i), "5", minutes=8) for i in range(4)),
            suite("bits_of_ranks", 2, "ranks", only="every_bit or twenty_runs", minutes=8),
        ),
        (Rule("pairs", at_least=20), *all_pass(50)),
        2,
    ),
    Line(
        "configurations_differ",
        "processes that make different calls are refused on both ranks within 30 s",
        (suite("configurations_differ", 2, "processes", only="differs", minutes=6),),
        all_pass(6),
        2,
    ),
    Line(
        "watchdog_ranks",
        "a peer that does not come, or stalls: three phases of each pass in one process, one in "
        "two processes",
        (
            suite("faults_of_groups", 2, "group_faults", minutes=3),
            suite("stalls", 2, "processes", only="stalls", minutes=4),
        ),
        all_pass(12),
        2,
    ),
    Line(
        "false_alarm",
        "a peer that is 90 s late with default settings ends nothing",
        (suite("late", 2, "processes", only="is_late", minutes=5),),
        all_pass(1),
        2,
    ),
    Line(
        "killed_peer",
        "a peer that is killed, interrupted or leaves: the other one raises within 10 s, and the "
        "next start works, 20 times right behind it",
        (
            suite(
                "killed",
                2,
                "processes",
                only="killed_is_named or interrupted or leaves or should",
                minutes=8,
            ),
            suite("killed_at_any_moment", 2, "processes", only="any_moment", minutes=8),
            *(
                suite(
                    f"restarts_{i}", 2, "processes", only=_turns(range(5 * i, 5 * i + 5)), minutes=8
                )
                for i in range(4)
            ),
        ),
        all_pass(30),
        2,
    ),
    Line(
        "overlap_ranks",
        "1,000 steps with collectives of XLA around the layer, of one pass and of several",
        (suite("thousand_steps", 2, "ranks", "passes", only="thousand", minutes=6),),
        all_pass(2),
        2,
    ),
)
