"""Holds the MaxText recipe of docs/drop-in.md to MaxText's own layer. Needs maxtext==0.2.5:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu PYTHONPATH=. \\
        python tests/maxtext_drop_in.py

Theirs runs on one device, since XLA has no ragged all-to-all on a CPU; ours on one and on 2 x 4.
"""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import maxtext  # pyright: ignore[reportMissingImports]
import numpy as np
from flax import linen as nn
from flax import nnx
from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
from maxtext.layers import initializers, moe  # pyright: ignore[reportMissingImports]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "drop-in.md"
B, T, H, I, E, K = 8, 16, 64, 128, 8, 2


def recipe() -> dict[str, Any]:
    """Runs the page's block; the recipe is in force from then on."""
    (block,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    names["OPTIONS"]["precision"] = "float32"
    return names


def config() -> Any:
    base = str(Path(str(maxtext.__file__)).parent / "configs" / "base.yml")
    return pyconfig.initialize(
        ["", base],
        run_name="drop-in",
        model_name="mixtral-8x7b",
        override_model_config=True,
        base_emb_dim=H,
        base_mlp_dim=I,
        base_moe_mlp_dim=I,
        num_experts=E,
        num_experts_per_tok=K,
        dtype="float32",
        weight_dtype="float32",
        sparse_matmul=True,
        megablox=False,
        capacity_factor=-1,
        load_balance_loss_weight=0.01,
        max_target_length=T,
        vocab_size=128,
        hardware="cpu",
        skip_jax_distributed_system=True,
        enable_checkpointing=False,
    )


def results(settings: Any, fsdp: int, expert: int) -> list[np.ndarray]:
    """y, the balance loss and all gradients of a layer on a mesh of fsdp x expert devices."""
    sizes = {axis: 1 for axis in settings.mesh_axes} | {"fsdp": fsdp, "expert": expert}
    devices = np.array(jax.devices()[: fsdp * expert]).reshape(list(sizes.values()))
    mesh = jax.sharding.Mesh(devices, tuple(sizes))
    x = jax.random.normal(jax.random.key(0), (B, T, H))
    with jax.set_mesh(mesh), nn.logical_axis_rules(settings.logical_axis_rules):
        layer = moe.RoutedMoE(
            config=settings,
            num_experts=E,
            num_experts_per_tok=K,
            mesh=mesh,
            kernel_init=initializers.nd_dense_init(1.0, "fan_in", "truncated_normal"),
            kernel_axes=("embed", None),
            rngs=nnx.Rngs(params=0),
            intermediate_dim=I,
        )

        def loss(layer: Any, x: Any) -> Any:
            y, balance, _ = layer(x)
            return jnp.sum(y**2) + balance, (y, balance)

        gradient = nnx.grad(loss, argnums=(0, 1), has_aux=True)
        gradients, outputs = nnx.jit(gradient)(layer, x)
    return [np.asarray(a) for a in jax.tree.leaves((outputs, gradients))]


def main() -> None:
    settings = config()
    theirs = results(settings, 1, 1)
    recipe()
    for sizes in ((1, 1), (2, 4)):
        found = results(settings, *sizes)
        for a, b in zip(theirs, found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        print(f"fsdp x expert = {sizes}: {len(found)} arrays agree")


if __name__ == "__main__":
    main()
