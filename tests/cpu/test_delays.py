"""The loop of runs with delays: what it counts, and that it finds a run with other bits."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import _ffi
from tests import delays

FUSED, UNFUSED = (3,), (1, 2)


class TestBuild:
    """Counts one more delay in each later role of a run."""

    __test__ = False
    seed = -1

    def set_delay_seed(self, seed: int) -> None:
        self.seed = seed

    def count_delays(self) -> list[int]:
        return list(range(len(delays.ROLES)))


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> TestBuild:
    build = TestBuild()
    monkeypatch.setattr(_ffi, "extension", lambda: (build, ""))
    return build


def calls_of(build: TestBuild, wrong_seed: int | None = None) -> delays.Calls:
    """Two calls of two results each; one number is wrong with a seed."""

    def prepared(first: int) -> Any:
        def call(launches: tuple[int, ...]) -> list[Any]:
            assert launches == (UNFUSED if build.seed % 8 == 7 and build.seed > 0 else FUSED)
            a = np.arange(first, first + 5, dtype=np.uint16)
            return [jnp.asarray(a), jnp.asarray(a + (build.seed == wrong_seed) * (a == 2))]

        return call

    return delays.Calls({"first": prepared(0), "second": prepared(1)}, FUSED, UNFUSED)


def test_runs_and_delays_are_counted(build: TestBuild) -> None:
    calls = calls_of(build)
    found = delays.run(calls, calls.results(), 9)
    assert found["runs"] == 9 == build.seed
    assert found["delays"] == {role: 10 * i for i, role in enumerate(delays.ROLES)}


@pytest.mark.parametrize(("seed", "name"), [(6, "first"), (7, "second")])
def test_a_run_with_other_bits_is_found(seed: int, name: str, build: TestBuild) -> None:
    calls = calls_of(build, wrong_seed=seed)
    right = calls.results()
    with pytest.raises(AssertionError, match=rf"\[0, 1\] values differ: seed {seed}, {name}, "):
        delays.run(calls, right, 9)
