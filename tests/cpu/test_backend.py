"""backend="auto": the kernels in a program for CUDA where they run, and the reference elsewhere.

The machine is made to look as if nothing were missing; programs are then lowered for CUDA, or run
on the CPU.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_megamoe import (
    MegaMoEConfig,
    _ffi,
    _guard,
    mega_moe,
    reason_for_reference,
    sharded_mega_moe,
)
from jax_megamoe.config import SAVES
from jax_megamoe.ops import GATE_UP_NAME
from tests import cases, compare, layer
from tests.cases import BF16, F32, ROUTINGS, Batch
from tests.lowering import count, lower_for_cuda

T, K, E, H, I = 16, 2, 8, 64, 64
ONE_EACH = {"forward": 1, "backward": 1}
SIZES: dict[str, Any] = {"H": H, "I": I}
POLICIES = jax.checkpoint_policies
REMAT_POLICIES = {
    "no policy": None,
    "everything": POLICIES.everything_saveable,
    "dots": POLICIES.dots_saveable,
    "gate_up": POLICIES.save_only_these_names(GATE_UP_NAME),
}


def batch(*, hidden: int = H, intermediate: int = I, dtype: np.dtype = F32) -> Batch:
    ids = ROUTINGS["distinct"](tokens=T, choices=K, experts=E)
    widths: dict[str, Any] = {"hidden": hidden, "intermediate": intermediate}
    return cases.normal(ids, num_experts=E, **widths, dtype=dtype)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ffi, "missing", lambda: "")


def program(**options: Any) -> Any:
    """y and the gradients of a batch, traced anew."""
    return jax.jit(layer.results_and_pullback(functools.partial(mega_moe, **options)))


def lower_for_cpu(f: Any, *args: Any) -> str:
    return f.trace(*args).lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_platform_of_the_program_decides(dtype: np.dtype, save: str) -> None:
    arrays = batch(dtype=dtype)
    assert count(lower_for_cuda(program(save=save), *arrays)) == ONE_EACH
    assert "jax_megamoe" not in lower_for_cpu(program(save=save), *arrays)
    found = program(save=save)(*arrays)
    right = program(save=save, backend="reference")(*arrays)
    compare.assert_results_bitwise(found, right)
    assert [a.dtype for a in found] == [a.dtype for a in right]


@pytest.mark.usefixtures("on_hopper")
def test_one_program_for_both_platforms_holds_both() -> None:
    text = program().trace(*batch()).lower(lowering_platforms=("cuda", "cpu")).as_text()
    for name in ("forward", "backward"):
        assert text.count(f"@jax_megamoe_{name}") == 1
    assert "stablehlo.case" in text and "stablehlo.dot_general" in text


def test_elsewhere_it_is_the_reference() -> None:
    assert _ffi.missing() != ""
    assert lower_for_cuda(program(), *batch()) == lower_for_cuda(
        program(backend="reference"), *batch()
    )


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("options", "widths"),
    [
        ({"precision": "float32"}, (H, I)),
        ({"precision": "fp8_block", "activation": "geglu"}, (128, 128)),
        ({"backend": "reference"}, (H, I)),
        ({}, (96, I)),
    ],
    ids=["precision", "fp8", "reference", "H"],
)
def test_what_the_kernels_do_not_take_is_the_reference(
    options: dict[str, Any], widths: tuple[int, int]
) -> None:
    config = MegaMoEConfig(**options)
    hidden, intermediate = widths
    arrays = batch(hidden=hidden, intermediate=intermediate)
    assert reason_for_reference(config, H=hidden, I=intermediate) != ""
    assert "jax_megamoe" not in lower_for_cuda(program(**options), *arrays)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("backend", ["auto", "cuda"])
@pytest.mark.parametrize("save", SAVES)
def test_fp8_has_kernels_of_its_own(save: str, backend: str) -> None:
    """Over several GPUs by name; with biases it is the reference, and says why."""
    arrays = batch(hidden=128, intermediate=256)
    how = {"precision": "fp8_block", "save": save, "backend": backend}
    assert count(lower_for_cuda(program(**how), *arrays)) == {"forward_fp8": 1, "backward_fp8": 1}
    for num_ranks in (1, 2):
        text = lower_for_cuda(layer.compiled.__wrapped__(num_ranks=num_ranks, **how), *arrays)
        peers = "_peers" if num_ranks > 1 else ""
        runs = 0 if backend == "auto" and peers else 1
        for name in ("forward_fp8", "backward_fp8"):
            assert text.count(f"@jax_megamoe_{name}{peers}(") == runs
        assert text.count("@jax_megamoe_") == 2 * runs
    config = MegaMoEConfig(precision="fp8_block", save=save)
    sizes: dict[str, Any] = {"H": 128, "I": 256}
    assert reason_for_reference(config, **sizes) == ""
    assert "on 2 GPUs are not measured yet" in reason_for_reference(config, **sizes, R=2)
    reason = reason_for_reference(config, **sizes, expert_bias=True)
    assert reason == "the kernels of precision 'fp8_block' take no biases"
    config = dataclasses.replace(config, activation="geglu")
    assert reason_for_reference(config, **sizes).endswith("take no activation 'geglu'")


@pytest.mark.usefixtures("on_hopper")
def test_fp8_with_biases_is_the_reference() -> None:
    *arrays, dy = batch(hidden=128, intermediate=128)
    biases = [np.zeros((E, 128), F32)] * 3
    run = layer.biased_results_and_pullback(layer.bind(precision="fp8_block"))
    assert "jax_megamoe" not in lower_for_cuda(jax.jit(run), *arrays, *biases, dy)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_in_shard_map(num_ranks: int, check_vma: bool) -> None:
    """Experts on one device: its kernels; on several: the reference."""
    arrays = batch()
    how = {"num_ranks": num_ranks, "check_vma": check_vma}
    make = layer.compiled.__wrapped__
    text = lower_for_cuda(make(**how), *arrays)
    assert count(text) == ONE_EACH if num_ranks == 1 else "jax_megamoe" not in text
    reason = reason_for_reference(MegaMoEConfig(), **SIZES, R=num_ranks)
    assert reason == "" if num_ranks == 1 else "on 2 GPUs are not measured yet" in reason
    assert reason_for_reference(MegaMoEConfig(backend="cuda"), **SIZES, R=num_ranks) == ""
    right = layer.compiled(**how, backend="reference")(*arrays)
    compare.assert_results_bitwise(make(**how)(*arrays), right)


@pytest.mark.usefixtures("on_hopper")
def test_data_parallel_layers_are_the_kernels_of_each_device() -> None:
    mesh = jax.make_mesh((4, 1), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, ids, *rest, _ = map(jnp.asarray, batch())
    entry = functools.partial(sharded_mega_moe, expert_axis="expert", data_axes=("data",))

    def gradients(backend: str) -> Any:
        def loss(x: Any, *rest: Any) -> Any:
            y: Any = entry(x, ids, *rest, backend=backend)
            return jnp.sum(jnp.square(y))

        return jax.jit(jax.grad(loss, argnums=tuple(range(5))))

    with jax.set_mesh(mesh):
        counted = count(lower_for_cuda(gradients("auto"), x, *rest))
        assert counted == {**ONE_EACH, "all_reduce": 3}
        found, right = (gradients(backend)(x, *rest) for backend in ("auto", "reference"))
    for a, b in zip(found, right, strict=True):
        compare.assert_bitwise(a, b)


@pytest.mark.usefixtures("on_hopper")
def test_without_jit_and_inside_a_shard_map_without_jit() -> None:
    arrays = batch()[:6]
    right = mega_moe(*arrays, backend="reference")
    for _ in range(2):
        compare.assert_bitwise(mega_moe(*arrays), right)
    experts = PartitionSpec("expert")
    op = functools.partial(mega_moe, axis_name="expert")
    mapped = jax.shard_map(op, mesh=layer.expert_mesh(1), in_specs=experts, out_specs=experts)
    compare.assert_bitwise(mapped(*arrays), right)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("save", SAVES)
def test_with_jit_disabled(save: str) -> None:
    arrays = batch()
    right = program(save=save, backend="reference")(*arrays)
    with jax.disable_jit():
        compare.assert_results_bitwise(program(save=save)(*arrays), right)


@pytest.mark.parametrize("disabled", [False, True])
def test_the_workspace_leaves_no_program(monkeypatch: pytest.MonkeyPatch, disabled: bool) -> None:
    """Nor that of a call outside of any, where jax_debug_nans would find what it holds."""

    def ffi_call(_: str, results: Any) -> Any:
        def call(*_: Any, **__: Any) -> list[Any]:
            # Of the forward y and counts, of the backward all gradients come first.
            fill = [0.0] * (2 if results[1].dtype == jnp.int32 else 5)
            fill += [jnp.nan] * (len(results) - len(fill))
            return [
                jnp.full(r.shape, v).astype(r.dtype) for r, v in zip(results, fill, strict=True)
            ]

        return call

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    monkeypatch.setattr(_guard, "_check_platform", lambda *_: None)
    x, ids, *rest, dy = map(jnp.asarray, batch())
    with jax.debug_nans(True), jax.disable_jit(disabled):
        y, pull = jax.vjp(lambda x, *rest: mega_moe(x, ids, *rest, backend="cuda"), x, *rest)
        found = (y, *pull(dy))
    assert not any(np.any(np.asarray(a)) for a in found)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("backend", ["auto", "cuda", "reference"])
def test_no_result_is_weakly_typed(backend: str) -> None:
    """Or y of a weakly typed x would give way to bf16 in the next operation."""
    _, ids, *rest = map(jnp.asarray, batch()[:6])

    def op(*floats: Any) -> Any:
        x, w, *weights = floats
        return mega_moe(x, ids, w, *weights, backend=backend, return_counts=True)

    def results(*floats: Any) -> Any:
        y, pull, counts = jax.vjp(op, *floats, has_aux=True)
        return y, counts, pull(jnp.ones_like(y))

    x = jnp.full((T, H), 0.5)
    assert jax.typeof(x).weak_type
    found = jax.tree.leaves(jax.jit(results).trace(x, *rest).out_avals)
    assert len(found) == 7 and not any(a.weak_type for a in found)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("nonlinear", [False, True])
@pytest.mark.parametrize("policy", REMAT_POLICIES.values(), ids=REMAT_POLICIES)
def test_remat_and_scan_treat_it_as_the_kernels(policy: Any, nonlinear: bool, save: str) -> None:
    x, ids, w, *weights, _ = map(jnp.asarray, batch())
    stack = [jnp.stack([a, -a]) for a in weights]

    def gradients(backend: str) -> Any:
        def block(x: Any, weights: Any) -> Any:
            y: Any = mega_moe(jnp.tanh(x), ids, w, *weights, backend=backend, save=save)
            return x + (jnp.tanh(y) if nonlinear else y), None

        body = jax.checkpoint(block, policy=policy)
        return jax.jit(jax.grad(lambda x, stack: jnp.sum(jax.lax.scan(body, x, stack)[0])))

    right = count(lower_for_cuda(gradients("cuda"), x, stack))
    assert right["backward"] == 1
    assert count(lower_for_cuda(gradients("auto"), x, stack)) == right
    found = gradients("auto")(x, stack)
    compare.assert_bitwise(found, gradients("reference")(x, stack))


@pytest.mark.usefixtures("on_hopper")
def test_what_fits_no_gpu_still_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: Any) -> None:
        raise MemoryError("no GPU holds it")

    monkeypatch.setattr(_ffi, "check_fits", check)
    assert "jax_megamoe" not in lower_for_cpu(program(), *batch())
    with pytest.raises(MemoryError, match="no GPU holds it"):
        lower_for_cuda(program(), *batch())


@pytest.mark.usefixtures("on_hopper")
def test_refusals_stay() -> None:
    x, ids, *rest = map(jnp.asarray, batch()[:6])

    def op(x: Any) -> Any:
        return mega_moe(x, ids, *rest)

    with pytest.raises(NotImplementedError, match="vmap of mega_moe"):
        jax.vmap(op)(x[None])
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.hessian(lambda x: jnp.sum(op(x)))(x)


def device(capability: str, kind: str) -> Any:
    return SimpleNamespace(compute_capability=capability, device_kind=kind)


HOPPER, OTHER = device("9.0", "NVIDIA H200"), device("10.0", "NVIDIA B200")


@pytest.mark.parametrize(
    ("devices", "why"),
    [
        ([HOPPER, HOPPER], ""),
        ([], "H100, H200 and GH200 only; JAX sees no CUDA device"),
        ([HOPPER, OTHER], "H100, H200 and GH200 only; JAX sees a NVIDIA B200 too"),
        ([device("8.0", "NVIDIA A100")], "JAX sees a NVIDIA A100 (Ampere) too"),
        ([HOPPER, device("8.6", "NVIDIA A40")], "JAX sees a NVIDIA A40 (Ampere) too"),
        ([device("8.9", "NVIDIA L40S")], "JAX sees a NVIDIA L40S (Ada) too"),
    ],
)
def test_reasons_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, devices: list[Any], why: str
) -> None:
    monkeypatch.setattr(_ffi, "extension", lambda: (SimpleNamespace(), ""))
    monkeypatch.setattr(_ffi, "cuda_devices", lambda: devices)
    assert reason_for_reference(MegaMoEConfig(), **SIZES).endswith(why)
    assert (reason_for_reference(MegaMoEConfig(), **SIZES) == "") == (why == "")
    monkeypatch.setattr(_ffi, "extension", lambda: (None, "no CUDA part"))
    assert reason_for_reference(MegaMoEConfig(), **SIZES) == "no CUDA part"
    assert reason_for_reference(MegaMoEConfig(backend="cuda"), **SIZES) == ""
