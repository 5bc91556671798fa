"""Lines of the scorecard for precision="fp8_block" on one GPU: SwiGLU, no biases, both passes, with
what `save` keeps and without."""

from _scorecard import Line, Rule
from _scorecard_parts import FUZZ_FP8, FUZZ_RULES, NONE_WRONG, all_pass, fuzz, program, suite

FP8 = (
    Line("routing_fuzz_fp8", FUZZ_FP8, fuzz("fuzz_fp8", 1, 1, 5, "fp8_block"), FUZZ_RULES, 1),
    Line(
        "stress_fp8",
        "as stress: random delays in every role and poisoned memory, all of the same bits",
        tuple(
            program(f"stress_{p}_fp8", 1, "stress", f"{p}_fp8", "1000", minutes=8)
            for p in ("forward", "backward")
        ),
        (
            Rule("iterations", at_least=2000),
            Rule("fewest_delays_of_a_role", at_least=1000, each=True),
        ),
        1,
    ),
    Line(
        "repeats_fp8",
        "as repeats: the bits of a forward and backward in fresh processes, twice in each",
        tuple(
            program(f"repeats_fp8_{i}", 1, "repeats", "cuda", "10", "4", "fp8_block", minutes=6)
            for i in range(2)
        ),
        (
            Rule("processes", at_least=20),
            Rule("runs", at_least=40),
            Rule("different", at_most=0),
        ),
        1,
    ),
    Line(
        "sanitizer_fp8",
        "compute-sanitizer's memcheck and synccheck find nothing; initcheck would find scales of "
        "pads, which are loaded for sums that are not stored",
        (
            suite("sanitizer_forward_fp8", 1, "sanitizer", only="of6 or of7", minutes=6),
            suite("sanitizer_backward_fp8", 1, "sanitizer", only="of8 or of9", minutes=8),
        ),
        all_pass(4),
        1,
    ),
    Line(
        "isolation_fp8",
        "NaN and Inf reach only what depends on them, or on the 128 values of a token or the "
        "128 x 128 weights around them, bitwise",
        (program("isolation_fp8", 1, "isolation", "cuda", "fp8_block", minutes=3),),
        (Rule("cases", at_least=12), *NONE_WRONG),
        1,
    ),
    Line(
        "transforms_fp8",
        "as transforms: the bits of a plain gradient, and no more calls than asked for",
        (program("transforms_fp8", 1, "transforms", "cuda", "fp8_block", minutes=6),),
        (Rule("cases", at_least=24), *NONE_WRONG),
        1,
    ),
)
