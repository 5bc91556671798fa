"""What is left of the memory of a device when models of many layers come and go, and when they
train."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import route
from tests import layer

# T, K, E, H, I: two models, which take turns.
MODELS = ((192, 2, 8, 64, 64), (128, 4, 16, 128, 64))
LEARNING_RATE = 0.01
# Steps before the first look, and at which memory is looked at afterwards.
LOOK_EVERY = 50


class Model:
    """Residual layers with a router each, trained towards fixed targets."""

    def __init__(self, size: tuple[int, ...], layers: int, backend: str) -> None:
        tokens, self._choices, experts, hidden, intermediate = size
        keys = jax.random.split(jax.random.key(0), 6)
        up, down = (layers, experts, hidden, intermediate), (layers, experts, intermediate, hidden)

        def draw(key: jax.Array, *shape: int) -> jax.Array:
            return shape[-2] ** -0.5 * jax.random.normal(key, shape)

        shapes = ((layers, hidden, experts), up, up, down)
        self._params = [draw(k, *s) for k, s in zip(keys, shapes, strict=False)]
        self._x, self._target = (jax.random.normal(k, (tokens, hidden)) for k in keys[4:])
        self._op = layer.bind(backend=backend)
        self._step = jax.jit(self._one_step, donate_argnums=0)

    def train(self, steps: int) -> float:
        """The loss of the last step."""
        loss: Any = jnp.nan
        for _ in range(steps):
            self._params, loss = self._step(self._params, self._x, self._target)
        return float(loss)

    def _one_step(self, params: Any, x: Any, target: Any) -> Any:
        loss, gradients = jax.value_and_grad(self._loss)(params, x, target)
        moved = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients)
        return moved, loss

    def _loss(self, params: Any, x: Any, target: Any) -> Any:
        # Unrolled: as many calls as layers.
        for i in range(len(params[0])):
            router, *experts = (p[i] for p in params)
            normed = x / jnp.sqrt(jnp.mean(jnp.square(x), axis=1, keepdims=True))
            routing = route(normed @ router, self._choices)
            x = x + self._op(normed, routing.expert_idx, routing.expert_weight, *experts)
        return jnp.mean(jnp.square(x - target))


def in_use() -> int:
    """Bytes of the device: by its allocator, or those of all arrays where it has no such."""
    gc.collect()
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_in_use"] if stats else sum(a.nbytes for a in jax.live_arrays())


def largest_growth(act: Callable[[], None], times: int) -> int:
    """By how much more is in use after the act than after it was done once."""
    act()
    first = in_use()
    most = 0
    for _ in range(times - 1):
        act()
        most = max(most, in_use() - first)
    return most


def measure(backend: str, layers: int, cycles: int, steps: int) -> dict[str, Any]:
    """Bytes left by models that are made, run and thrown away, and by steps of two that stay."""

    def models() -> list[Model]:
        return [Model(size, layers, backend) for size in MODELS]

    def make_and_drop() -> None:
        assert all(np.isfinite(model.train(1)) for model in models())
        jax.clear_caches()

    of_cycles = largest_growth(make_and_drop, cycles)
    kept = models()

    def train(steps: int) -> None:
        losses = [model.train(steps) for model in kept]
        assert np.isfinite(losses).all(), losses

    of_steps = largest_growth(functools.partial(train, LOOK_EVERY), -(-steps // LOOK_EVERY))
    return {
        "layers": layers,
        "cycles": cycles,
        "steps": -(-steps // LOOK_EVERY) * LOOK_EVERY,
        "drift_mib": round(max(of_cycles, of_steps) / 2**20, 3),
    }
