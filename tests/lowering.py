"""Programs lowered for CUDA on any machine, and what is in them."""

import re
from collections import Counter
from typing import Any

import jax

COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "collective_broadcast",
    "collective_permute",
    "reduce_scatter",
)

_NAME = r"[\w.]+|\"[^\"]+\""


def lower_for_cuda(f: jax.stages.Wrapped, *args: Any) -> str:
    """The StableHLO of a jitted function."""
    return f.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def count(text: str) -> dict[str, int]:
    """How often the program runs each custom call of the package and each collective.

    A function that the program calls n times counts n times; the body of a loop counts once. A pass
    counts the same over one rank and over several.
    """
    function = rf"func\.func \w+ @({_NAME})\(.*?\{{\n(.*?)\n  \}}"
    bodies = dict(re.findall(function, text, flags=re.DOTALL))
    targets = "|".join((r"custom_call @jax_megamoe_\w+", *(rf"{c}\b" for c in COLLECTIVES)))

    def in_body(name: str) -> Counter[str]:
        found = re.findall(rf"stablehlo\.({targets})", bodies[name])
        names = [name.removeprefix("custom_call @jax_megamoe_") for name in found]
        total = Counter(name.removesuffix("_peers") for name in names)
        for callee in re.findall(rf"\bcall @({_NAME})\(", bodies[name]):
            total += in_body(callee)
        return total

    return dict(in_body("main"))
