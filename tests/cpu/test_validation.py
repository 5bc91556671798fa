"""Every class of bad input: the exception's type, and that its message names the argument, what it
was and what it may be. All calls are only traced, so a refusal comes before any launch.
"""

import functools

import pytest

from jax_megamoe import mega_moe, sharded_mega_moe
from tests import layer
from tests.refusal_cases import BAD, GOOD, refuse
from tests.refusals import sizes, trace


@pytest.mark.parametrize("entry", ["mega_moe", "sharded_mega_moe"])
@pytest.mark.parametrize("bad", BAD)
def test_refuses(bad: str, entry: str) -> None:
    refuse(bad, entry)


def test_good_arguments_of_these_tests_are_taken() -> None:
    """The cases above fail for the one thing they change."""
    trace(mega_moe, sizes())
    trace(mega_moe, GOOD)
    trace(mega_moe, {**sizes(H=64, I=64), "backend": "cuda"})
    sharded = functools.partial(sharded_mega_moe, expert_axis="expert", mesh=layer.expert_mesh(2))
    trace(sharded, sizes())


def test_refuses_an_unknown_option() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'presicion'"):
        layer.bind(presicion="bf16")(*GOOD.values())
