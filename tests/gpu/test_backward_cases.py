"""The checks of gradients that hold on every backend, by the kernels, with each `save`."""

from typing import Any

import pytest

from jax_megamoe.config import SAVES
from tests.gradient_cases import CHECKS, remat_at_ties_17
from tests.remat import ROUTING_POLICIES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("check", CHECKS)
def test_gradients(check: str, save: str) -> None:
    CHECKS[check](backend="cuda", save=save)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_17_remat_at_ties(policy: Any, save: str) -> None:
    remat_at_ties_17(policy, backend="cuda", save=save)
