"""Experts over the GPUs of a node, and their weights over many nodes: bytes, times and memory.

A node has 8 GPUs, 8 / R groups of R ranks; the weights, gradients and optimizer state of a rank's
experts are divided over all GPUs of that rank. All numbers are of one layer, or of all L.

A gather over nodes comes in two steps: over the network each GPU fetches its part of what its node
needs, over NVLink the 8 / R GPUs of a node that need the same exchange it. So the bytes over the
network do not depend on R; those over NVLink and the memory for gathered weights do.
"""

import dataclasses
import functools
import math

from _layer_model import Fit, layer_ms, pool_rows
from _rates import value
from _shapes import Shape

GPUS = 8  # of a node
GRADIENT_BYTES = {"float32": 4, "bf16": 2}
# Of a parameter, over all GPUs: float32 weight, two moments and gradient.
STATE_BYTES = 16
POOL_SPARE = 1.25  # pools hold so many times the balanced rows
MOST_TOKENS = 1 << 21


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a GPU sends in one all_gather of bf16 weights, and likewise gets."""

    network: float
    nvlink: float


def parameters(shape: Shape) -> int:
    """Of the experts of a layer."""
    return 3 * shape.H * shape.I * shape.E


def gather(shape: Shape, num_nodes: int, bytes_each: int = 2) -> Traffic:
    """A reduce_scatter moves as many, at bytes_each of the gradients."""
    of_node = parameters(shape) * bytes_each
    of_group = of_node / shape.R
    network = (num_nodes - 1) / num_nodes * of_node / GPUS
    return Traffic(network, of_group * (1 - shape.R / GPUS))


def transfer_ms(traffic: Traffic) -> float:
    """One step behind the other, each chunk by chunk, so that the slower one counts."""
    network = traffic.network / value("network")
    return max(network, traffic.nvlink / value("nvlink_stores")) / 1e6


@dataclasses.dataclass(frozen=True)
class Hiding:
    """Whether weights of the next layer come, and gradients go, behind the compute of a layer.

    forward_ms, backward_ms: the transfers beside each pass: a gather; a gather and a scatter.
    tokens: a GPU needs so many for both to be hidden; None for more than MOST_TOKENS.
    microbatches: of shape.T tokens, for which weights are gathered and gradients sent once.
    """

    forward_ms: float
    backward_ms: float
    tokens: int | None
    microbatches: int


def hiding(
    shape: Shape, of: dict[str, Fit], num_nodes: int, gradients: str = "bf16", **how: str | float
) -> Hiding:
    """of, how: as for `_layer_model.predict`."""
    weights_ms = transfer_ms(gather(shape, num_nodes))
    gradients_ms = transfer_ms(gather(shape, num_nodes, GRADIENT_BYTES[gradients]))
    needed = {"forward": weights_ms, "backward": weights_ms + gradients_ms}

    @functools.cache
    def is_hidden(tokens: int) -> bool:
        larger = dataclasses.replace(shape, T=tokens)
        return all(layer_ms(larger, name, of, **how) >= ms for name, ms in needed.items())

    exponent = next((n for n in range(7, 22) if is_hidden(1 << n)), None)
    tokens = None
    if exponent is not None:
        first, last = 1 << (exponent - 1), 1 << exponent
        tokens = next(t for t in range(first, last + 1, last // 32) if is_hidden(t))
    each = [ms / layer_ms(shape, name, of, **how) for name, ms in needed.items()]
    return Hiding(needed["forward"], needed["backward"], tokens, math.ceil(max(each)))


def memory_gb(
    shape: Shape, num_layers: int, num_nodes: int, *, save: str, gradients: str = "bf16"
) -> dict[str, float]:
    """GB of a GPU for the experts of all layers, of which two are gathered at a time.

    state: divided over all GPUs. weights: bf16, of two layers. gradients: of one. kept: x of each
    layer, and g and u with save="gate_up". pools: of one backward. peers: what ranks share.
    """
    rows = POOL_SPARE * pool_rows(shape)
    T, H, I, R = shape.T, shape.H, shape.I, shape.R
    of_rank = parameters(shape) / R
    of_gate_up = 4 * rows * I if save == "gate_up" else 0
    found = {
        "state": STATE_BYTES * parameters(shape) * num_layers / (GPUS * num_nodes),
        "weights": 2 * 2 * of_rank,
        "gradients": GRADIENT_BYTES[gradients] * of_rank,
        "kept": num_layers * (2 * T * H + of_gate_up),
        "pools": rows * (6 * H + 6 * I),
        "peers": (4 + 4 * R) * T * H + 16 * R * T * shape.K if R > 1 else 0,
    }
    return {name: num_bytes / 1e9 for name, num_bytes in found.items()}
