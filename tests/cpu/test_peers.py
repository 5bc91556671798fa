"""How the GPUs of an expert group find each other, as far as no GPU is needed for it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_megamoe import _ffi
from tests import lowering, peers


def lowered(axis: str | tuple[str, ...]) -> str:
    mesh = AbstractMesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)

    def exchange(row: jax.Array) -> jax.Array:
        return _ffi.peer_probe(row[0], axis_name=axis, configuration=7, deadline_s=2.0)[None]

    spec = PartitionSpec(mesh.axis_names)
    f = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=spec, out_specs=spec))
    return lowering.lower_for_cuda(f, jax.ShapeDtypeStruct((8, 48), jnp.int32))


@pytest.mark.parametrize(
    ("axis", "R", "groups"),
    [
        ("expert", 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("data", 2, [0, 4, 1, 5, 2, 6, 3, 7]),
        (("data", "expert"), 8, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_call_says_which_devices_form_a_group(
    axis: str | tuple[str, ...], R: int, groups: list[int]
) -> None:
    text = lowered(axis)
    assert lowering.count(text) == {"peer_probe": 1}
    (line,) = (line for line in text.splitlines() if f"@{_ffi.PEER_PROBE}" in line)
    assert f"groups = dense<{groups}>" in line
    for attribute in (f"R = {R}", "N = 48", "configuration = 7", "deadline_ns = 2000000000"):
        assert f"{attribute} : i64" in line
    assert line.endswith(f"(tensor<48xi32>) -> tensor<{R}x48xi32>")


def test_the_loop_of_the_gpu_tests_has_no_collective() -> None:
    """Which would keep the ranks in step, where the flags alone are to do it."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("expert",))
    f = peers.count_wrong(mesh, "expert", num_steps=1000)
    assert lowering.count(lowering.lower_for_cuda(f, peers.rows(2, 8))) == {"peer_probe": 1}
