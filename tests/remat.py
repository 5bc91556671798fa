"""The ways in which rematerialisation may treat the router's choices."""

import jax
import pytest

from jax_megamoe.ops import GATE_UP_NAME
from jax_megamoe.router import EXPERT_IDX_NAME, EXPERT_WEIGHT_NAME

_NAMES = [EXPERT_IDX_NAME, EXPERT_WEIGHT_NAME]
_POLICIES = jax.checkpoint_policies

ROUTING_POLICIES = [
    pytest.param(_POLICIES.nothing_saveable, id="nothing"),
    pytest.param(_POLICIES.everything_saveable, id="everything"),
    pytest.param(_POLICIES.save_only_these_names(*_NAMES), id="names"),
    pytest.param(_POLICIES.save_only_these_names(*_NAMES, GATE_UP_NAME), id="names_and_gate_up"),
    pytest.param(
        _POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=_NAMES,
            offload_src="device",
            offload_dst="pinned_host",
        ),
        id="offload",
    ),
]
