"""Fused mixture-of-experts layers for JAX on NVIDIA Hopper."""

from jax_megamoe._backend import reason_for_reference as reason_for_reference
from jax_megamoe._ffi import check_faults as check_faults
from jax_megamoe.config import ClampedSwiGLU as ClampedSwiGLU
from jax_megamoe.config import MegaMoEConfig as MegaMoEConfig
from jax_megamoe.config import RouterConfig as RouterConfig
from jax_megamoe.memory import MemoryPlan as MemoryPlan
from jax_megamoe.memory import memory_plan as memory_plan
from jax_megamoe.ops import mega_moe as mega_moe
from jax_megamoe.quantization import QuantizedExperts as QuantizedExperts
from jax_megamoe.quantization import QuantizedMatrix as QuantizedMatrix
from jax_megamoe.quantization import quantize_expert_weights as quantize_expert_weights
from jax_megamoe.router import Routing as Routing
from jax_megamoe.router import route as route
from jax_megamoe.router import update_selection_bias as update_selection_bias
from jax_megamoe.sharding import sharded_mega_moe as sharded_mega_moe

__version__ = "0.1.0"
