"""`python -m jax_megamoe.doctor`: machines that are made up, and the one that is here."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jax_megamoe import doctor, memory_plan
from jax_megamoe._diagnosis import Question, diagnose
from jax_megamoe._machine import NOT_INSTALLED, PACKAGES, Device, Driver, Facts, Gpu
from jax_megamoe.config import Dims, MegaMoEConfig

ROOT = Path(__file__).resolve().parents[2]
NO_CUDA_PART = "the CUDA part of jax_megamoe is not in this installation (No module)"
GIB = 2**30
SIZES: dict[str, Any] = {"T": 16384, "K": 8, "E": 128, "H": 2048, "I": 768}
FP8, OF_FP8 = {"precision": "fp8_block"}, "the kernels of precision 'fp8_block' take no"
FP8_BY_NAME = ["--precision", "fp8_block", "--backend", "cuda"]


def gpu(capability: str = "9.0", number: int = 0) -> Gpu:
    name = "NVIDIA H200" if capability == "9.0" else "NVIDIA B200"
    return Gpu(name=name, compute_capability=capability, uuid=f"GPU-{number}")


def device(ordinal: int = 0, capability: str = "9.0", limit: int | None = 105 * GIB) -> Device:
    used = None if limit is None else GIB
    kind = gpu(capability).name
    return Device(
        ordinal=ordinal,
        kind=kind,
        compute_capability=capability,
        bytes_limit=limit,
        bytes_in_use=used,
    )


def laptop(**changes: Any) -> Facts:
    """No GPU, no driver, nothing built."""
    versions = {"python": "3.12.1"} | dict.fromkeys(PACKAGES, "1.0")
    facts = Facts(
        versions=versions | {"jax-cuda13-plugin": NOT_INSTALLED},
        settings={},
        extension="",
        targets=(),
        test_build=False,
        nvcc="",
        driver=Driver(error="there is no NVIDIA driver (libcuda.so.1)"),
        driver_version="",
        links=(),
        devices=(),
        jax_error="Unknown backend cuda",
        cuda_runtime="",
        missing=NO_CUDA_PART,
    )
    return dataclasses.replace(facts, **changes)


def hoppers(count: int = 1, **changes: Any) -> Facts:
    """H200s that reach each other over NVLink, and all that the kernels need."""
    facts = laptop(
        versions={"python": "3.12.1"} | dict.fromkeys(PACKAGES, "1.0"),
        extension="_cuda.so",
        targets=("jax_megamoe_backward", "jax_megamoe_forward"),
        nvcc="13.0",
        driver=Driver(
            cuda_version="13.0",
            gpus=tuple(gpu(number=i) for i in range(count)),
            peers=((True,) * count,) * count,
        ),
        driver_version="580.65.06",
        links=(("NV18",) * count,) * count,
        devices=tuple(device(i) for i in range(count)),
        jax_error="",
        cuda_runtime="PJRT C API cuda 13000",
        missing="",
    )
    return dataclasses.replace(facts, **changes)


def question(
    weights: str = "float32",
    R: int = 1,
    config: Any = None,
    expert_bias: bool = False,
    **sizes: int,
) -> Question:
    choices = MegaMoEConfig(**(config or {}))
    dims = Dims(R=R, pool_factor=choices.pool_factor, **(SIZES | sizes))
    return Question(dims=dims, config=choices, weights=weights, expert_bias=expert_bias)


def text(facts: Facts, asked: Question) -> list[str]:
    return list(doctor.lines(facts, asked, diagnose(facts, asked)))


def test_a_laptop_is_told_all_of_it() -> None:
    found = text(laptop(), question())
    memory = [line for line in found if "MiB" in line]
    assert [line for line in found if line not in memory] == [
        "versions",
        "  python 3.12.1",
        "  jax_megamoe 1.0",
        "  jax 1.0",
        "  jaxlib 1.0",
        "  flax 1.0",
        "  numpy 1.0",
        "  jax-cuda13-plugin not installed",
        "  nvidia-nccl-cu13 1.0",
        "  CUDA of JAX: none",
        "  NVIDIA driver: there is no NVIDIA driver (libcuda.so.1)",
        "the CUDA part of jax_megamoe",
        f"  not built: {NO_CUDA_PART}",
        "  nvcc to build it with: none",
        "GPUs",
        "  the driver shows none: there is no NVIDIA driver (libcuda.so.1)",
        "  JAX sees none: Unknown backend cuda",
        "settings",
        "  XLA_PYTHON_CLIENT_MEM_FRACTION is not set: JAX takes up to 0.75 of each GPU",
        "a call of T = 16384, K = 8, E = 128, R = 1, H = 2048, I = 768",
        '  precision="bf16", backend="auto", save="none", trainable_experts=True, float32 weights',
        '  activation="swiglu", experts without biases',
        "memory of the kernels, on each GPU",
        "  float32 parameters, gradients of other layers and optimizer state come on top",
        "what runs",
        "  the reference runs it, since",
        f"  - {NO_CUDA_PART}",
        "  - JAX sees no CUDA device (Unknown backend cuda)",
        "what to do",
        "  - Nothing is wrong here without a GPU: the reference runs everything, at the speed of "
        "the CPU. Run this program again on the machine with the H100, H200 or GH200.",
    ]
    assert len(memory) == 3


def test_two_hoppers_are_told_all_of_it() -> None:
    found = text(hoppers(2), question())
    runs = "JAX may take 107,520.0 MiB, has 1,024.0 MiB; the kernels run"
    for line in (
        "  CUDA of JAX: PJRT C API cuda 13000",
        "  NVIDIA driver 580.65.06, for CUDA up to 13.0",
        "  built, for compute capability 9.0 (sm_90a): _cuda.so",
        "  its calls: jax_megamoe_backward, jax_megamoe_forward",
        "  nvcc to build it with: 13.0",
        "  GPU 0: NVIDIA H200, compute capability 9.0",
        "  GPU 1: NVIDIA H200, compute capability 9.0",
        "  GPU 0 and GPU 1: NVLink, 18 links; peer access: both ways",
        f"  JAX on GPU 0: NVIDIA H200; {runs}",
        f"  JAX on GPU 1: NVIDIA H200; {runs}",
    ):
        assert line in found
    assert found[-2:] == ["what runs", "  the kernels run it"]


UNEQUAL = ((True, True), (False, True))
MIXED = Driver(cuda_version="13.0", gpus=(gpu(), gpu("10.0", 1)), peers=((True,) * 2,) * 2)
NO_BLACKWELL = "the kernels run on H100, H200 and GH200 only; JAX sees a NVIDIA B200 too"
TINY = (device(limit=GIB),)
HIDDEN = {"devices": (), "jax_error": "cuInit failed", "missing": "JAX sees no CUDA device"}


@pytest.mark.parametrize(
    ("facts", "asked", "line"),
    [
        (hoppers(test_build=True), {}, "a test build, with delays and seeded faults, for compute"),
        (hoppers(driver_version=""), {}, "NVIDIA driver unknown, for CUDA up to 13.0"),
        (laptop(driver=Driver(cuda_version="13.0")), {}, "shows none: it works, and finds no GPU"),
        (hoppers(2, links=()), {}, "GPU 0 and GPU 1: NVLink unknown (nvidia-smi does not say); p"),
        (hoppers(2, links=(("X", "SYS"), ("SYS", "X"))), {}, "GPU 0 and GPU 1: no NVLink (SYS); "),
        (
            hoppers(2, driver=dataclasses.replace(hoppers(2).driver, peers=UNEQUAL)),
            {},
            "peer access: one way only",
        ),
        (
            hoppers(2, driver=dataclasses.replace(hoppers(2).driver, peers=((False,) * 2,) * 2)),
            {},
            "peer access: none",
        ),
        (
            hoppers(devices=(device(limit=None),)),
            {},
            "H200; no limit known; the kernels run",
        ),
        (hoppers(settings={"XLA_FLAGS": "--a=b"}), {}, "  XLA_FLAGS=--a=b"),
        (
            hoppers(settings={"XLA_CLIENT_MEM_FRACTION": "0.9"}),
            {},
            "  XLA_CLIENT_MEM_FRACTION=0.9",
        ),
        (
            hoppers(),
            {"H": 96},
            "none: H: was 96; it may be in 1..2147483647 and a multiple of 64",
        ),
        (hoppers(), {"R": 2}, 'combine_dtype="float32", pool_factor='),
        (hoppers(), {"R": 8}, "passes over the pool, by the routing"),
        (hoppers(), {"R": 2}, "  one pass"),
        (hoppers(), {"R": 2}, "shared with the other ranks, outside JAX's share: "),
        (hoppers(), {"config": {"save": "gate_up"}}, "kept by each layer for its backward: "),
    ],
)
def test_each_line(facts: Facts, asked: dict[str, Any], line: str) -> None:
    (found,) = [part for part in text(facts, question(**asked)) if line in part]
    usual = text(laptop() if not facts.devices else hoppers(2), question())
    assert found not in usual


@pytest.mark.parametrize(
    ("facts", "asked", "runs", "reason"),
    [
        (hoppers(), {"config": {"backend": "reference"}}, "reference", "asks for it"),
        (hoppers(), {"config": {"precision": "float32"}}, "reference", "no precision 'float32'"),
        (
            hoppers(),
            {"config": {**FP8, "activation": "geglu"}},
            "reference",
            f"{OF_FP8} activation",
        ),
        (hoppers(), {"config": FP8, "expert_bias": True}, "reference", f"{OF_FP8} biases"),
        (hoppers(2), {"config": FP8, "R": 2}, "reference", "on 2 GPUs are not measured yet"),
        (hoppers(), {"H": 96}, "reference", "H = 96 and I = 768 are not both multiples of 64"),
        (hoppers(2), {"R": 2}, "reference", "on 2 GPUs are not measured yet"),
        (hoppers(2, driver=MIXED, missing=NO_BLACKWELL), {}, "reference", NO_BLACKWELL),
        (hoppers(extension="", missing=NO_CUDA_PART), {}, "reference", NO_CUDA_PART),
        (hoppers(**HIDDEN), {}, "reference", "JAX sees no CUDA device"),
        (
            hoppers(devices=TINY),
            {},
            "nothing",
            "bytes at once; JAX may take 1073741824 of GPU 0",
        ),
        (laptop(), {"config": {"backend": "cuda"}}, "nothing", NO_CUDA_PART),
        (hoppers(), {"H": 96, "config": {"backend": "cuda"}}, "nothing", "H = 96"),
        (
            hoppers(2, driver=dataclasses.replace(hoppers(2).driver, peers=UNEQUAL)),
            {"R": 2, "config": {"backend": "cuda"}},
            "nothing",
            "GPU 1 does not reach the memory of GPU 0 (no peer access)",
        ),
    ],
)
def test_reasons_against_the_kernels(
    facts: Facts, asked: dict[str, Any], runs: str, reason: str
) -> None:
    diagnosis = diagnose(facts, question(**asked))
    assert diagnosis.runs == runs
    assert any(reason in r for r in diagnosis.reasons), diagnosis.reasons
    assert doctor.exit_code(diagnosis) == doctor.KERNELS_DO_NOT_RUN
    conclusion = {"reference": "the reference runs it", "nothing": "it raises an error"}[runs]
    assert f"  {conclusion}, since" in text(facts, question(**asked))


@pytest.mark.parametrize(
    ("facts", "asked"),
    [
        (hoppers(), {}),
        (hoppers(), {"weights": "bfloat16", "config": {"save": "gate_up"}}),
        (hoppers(2), {"R": 2, "config": {"backend": "cuda"}}),
        (hoppers(), {"R": 2, "config": {"backend": "cuda"}}),
        (hoppers(), {"config": {"activation": "geglu"}}),
        (hoppers(), {"config": FP8}),
        (hoppers(), {"config": {**FP8, "backend": "cuda"}}),
        (hoppers(2), {"R": 2, "expert_bias": True, "config": {"backend": "cuda"}}),
    ],
)
def test_the_kernels_run(facts: Facts, asked: dict[str, Any]) -> None:
    diagnosis = diagnose(facts, question(**asked))
    assert (diagnosis.runs, diagnosis.reasons) == ("kernels", ())
    assert doctor.exit_code(diagnosis) == doctor.KERNELS_RUN


def test_biases_take_memory() -> None:
    """In both passes, with their gradients and what the backward keeps of each row."""
    plain, biased = (diagnose(hoppers(), question(expert_bias=b)).memory for b in (False, True))
    assert plain is not None and biased is not None
    dims = question().dims
    biases = dims.E * (2 * dims.I + dims.H) * 4
    assert biased.forward.total_bytes == plain.forward.total_bytes + biases
    of_rows = 8 * dims.pool_rows
    assert biased.backward.workspace_bytes == plain.backward.workspace_bytes + of_rows
    assert biased.backward.total_bytes == plain.backward.total_bytes + 2 * biases + of_rows


def test_all_reasons_are_said_and_each_once() -> None:
    asked = question(H=96, R=4, config={"precision": "float32"})
    diagnosis = diagnose(laptop(), asked)
    assert len(diagnosis.reasons) == len(set(diagnosis.reasons)) == 5


def test_each_device_has_its_own_reasons() -> None:
    two = (device(), device(1, "10.0"))
    facts = hoppers(2, driver=MIXED, missing=NO_BLACKWELL, devices=two)
    first, second = diagnose(facts, question()).devices
    assert first.reasons == (NO_BLACKWELL,)
    assert second.reasons == ("its compute capability is 10.0; the kernels run on 9.0",)
    for capability, name in (("8.0", "Ampere"), ("8.6", "Ampere"), ("8.9", "Ada")):
        facts = hoppers(devices=(device(0, capability),), missing="")
        (only,) = diagnose(facts, question(config={"precision": "float32"})).devices
        assert only.reasons == (
            "the kernels have no precision 'float32'",
            f"its compute capability is {capability} ({name}); the kernels run on 9.0",
        )
    facts = hoppers(extension="", missing=NO_CUDA_PART, devices=two)
    assert diagnose(facts, question()).devices[0].reasons == (NO_CUDA_PART,)
    (only,) = diagnose(hoppers(devices=TINY), question(I=96)).devices
    assert only.reasons == ("H = 2048 and I = 96 are not both multiples of 64",)
    (only,) = diagnose(hoppers(devices=TINY), question()).devices
    assert [r.partition(" needs")[0] for r in only.reasons] == ["the forward", "the backward"]


def unbuilt(nvcc: str) -> Facts:
    return hoppers(extension="", missing=NO_CUDA_PART, nvcc=nvcc)


@pytest.mark.parametrize(
    ("facts", "asked", "advice"),
    [
        (laptop(), {"H": 100}, "No machine runs the kernels for this call: change what its reas"),
        (
            laptop(),
            {"config": {"backend": "cuda"}},
            "Run this call on a machine with an H100, H200 or GH200",
        ),
        (laptop(driver=hoppers().driver), {}, "JAX has no CUDA plugin: pip install 'jax_megamoe["),
        (
            hoppers(**HIDDEN, settings={"JAX_PLATFORMS": "cpu"}),
            {},
            "JAX_PLATFORMS=cpu keeps JAX from the GPUs: leave it unset.",
        ),
        (
            hoppers(**HIDDEN, settings={"JAX_PLATFORMS": "cuda,cpu"}),
            {},
            "JAX does not take the GPUs: cuInit failed",
        ),
        (unbuilt("13.1"), {}, "The CUDA part can be built here: pip install . in the sources, or"),
        (unbuilt("12.9"), {}, "needs nvcc >= 13.0 on PATH, in CUDA_HOME or in /usr/local/cuda; fo"),
        (unbuilt("12.9"), {}, "; found is 12.9."),
        (unbuilt(""), {}, "; none is found."),
        (
            hoppers(2, driver=MIXED),
            {},
            "CUDA_VISIBLE_DEVICES=GPU-0 hides the GPUs that",
        ),
        (hoppers(2), {"R": 2}, 'backend="cuda" runs the kernels over several GPUs by name.'),
        (hoppers(2), {"R": 4}, "4 ranks need as many GPUs; this process has 2: others have to"),
        (hoppers(devices=TINY), {}, "Split the batch, or raise XLA_PYTHON_CLIENT_MEM_FRACTION or"),
    ],
)
def test_advice(facts: Facts, asked: dict[str, Any], advice: str) -> None:
    assert any(advice in line for line in diagnose(facts, question(**asked)).advice)
    assert not diagnose(hoppers(2), question()).advice


def test_memory_of_several_ranks() -> None:
    choices: dict[str, Any] = {"combine_dtype": "bfloat16", "pool_factor": 1.25}
    found = diagnose(laptop(), question(R=4, config=choices)).memory
    usual = diagnose(laptop(), question(R=4)).memory
    assert found and usual and found.plan == memory_plan(R=4, **SIZES | choices)
    assert found.plan.peer_bytes < usual.plan.peer_bytes
    assert found.forward.workspace_bytes < usual.forward.workspace_bytes


def test_memory_is_that_of_the_calls() -> None:
    kept = diagnose(laptop(), question(config={"save": "gate_up"})).memory
    none = diagnose(laptop(), question()).memory
    frozen = diagnose(laptop(), question(config={"trainable_experts": False})).memory
    bf16 = diagnose(laptop(), question("bfloat16")).memory
    assert kept and none and frozen and bf16
    plan = memory_plan(**SIZES)
    assert none.plan == plan
    assert none.forward.total_bytes == plan.total_bytes and none.kept_bytes == 0
    assert kept.kept_bytes == plan.gate_up_bytes
    for name in ("forward", "backward"):
        with_it, without = getattr(kept, name), getattr(none, name)
        assert with_it.total_bytes == without.total_bytes + plan.gate_up_bytes
        assert with_it.workspace_bytes == without.workspace_bytes < without.total_bytes
    weights = 3 * 128 * 2048 * 768
    assert none.backward.total_bytes - bf16.backward.total_bytes == 2 * weights
    # Without them the plan has fewer items, too.
    assert none.backward.total_bytes - frozen.backward.total_bytes >= 4 * weights


def test_memory_of_fp8() -> None:
    """Codes take the place of weights and of most of the pools."""
    bf16, found, kept = (
        diagnose(laptop(), question(config=c)).memory for c in ({}, FP8, {**FP8, "save": "gate_up"})
    )
    assert bf16 and found and kept
    assert found.plan == memory_plan(**SIZES, precision="fp8_block")
    weights = 3 * 128 * 2048 * 768
    # One byte an element, and a float32 for each block.
    codes = weights + weights // 128**2 * 4
    assert bf16.plan.operands_bytes - found.plan.operands_bytes == 2 * weights - codes
    of_x = (16384 + question().dims.pool_rows) * (2048 + 128)
    assert found.backward.workspace_bytes - kept.backward.workspace_bytes == of_x
    assert found.backward.workspace_bytes > bf16.backward.workspace_bytes
    several = diagnose(laptop(), question(R=2, config=FP8))
    assert several.memory is not None
    assert several.memory.plan == memory_plan(**SIZES, R=2, precision="fp8_block")
    assert any("by name" in line for line in several.advice)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "R: was 3; it may be one of 1, 2, 4, 8"),
        (["--experts", "12", "--ranks", "8"], "E: was 12; it may be a multiple of R = 8"),
        (["--experts", "513"], "E: was 513; it may be in 1..512"),
        (["--experts", "4"], "K: was 8; it may be in 1..4"),
        (["--top-k", "33"], "K: was 33; it may be in 1..32"),
        (["--tokens", "0"], "T: was 0; it may be in 1..2147483647"),
        (["--hidden", "0"], "H: was 0"),
        (["--intermediate", "0"], "I: was 0"),
        (["--precision", "float32", "--backend", "cuda"], "precision: was 'float32' with backend"),
        (FP8_BY_NAME + ["--expert-bias"], "precision: was 'fp8_block' with backend='cuda' and bia"),
        (FP8_BY_NAME + ["--activation", "geglu"], "with backend='cuda' and activation 'geglu'"),
        (["--precision", "fp8_block", "--hidden", "64"], "H: was of H = 64 with precision="),
        (["--precision", "fp8_block", "--intermediate", "192"], "I: was of I = 192 with precision"),
        (["--tokens", "2147483647"], "routes"),
        (["--pool-factor", "0.5"], "pool_factor: was 0.5; it may be a finite number of at least 1"),
        (["--tokens", "many"], "invalid int value"),
        (["--save", "all"], "invalid choice"),
        (["--activation", "gelu"], "invalid choice"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(arguments)
    assert ended.value.code == doctor.BAD_ARGUMENTS
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("facts", [laptop(), hoppers()], ids=["laptop", "hopper"])
def test_json_holds_it_all(
    facts: Facts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    code = doctor.main(["--json", "--tokens", "128", "--frozen-experts"])
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code == (0 if facts.devices else 1)
    assert found["question"]["dims"]["T"] == 128
    assert found["question"]["config"]["trainable_experts"] is False
    assert found["diagnosis"]["runs"] == ("kernels" if facts.devices else "reference")
    assert found["facts"]["missing"] == facts.missing


def test_activation_and_biases_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tokens", "128", "--activation", "clamped_swiglu", "--expert-bias"]
    assert doctor.main(arguments) == doctor.KERNELS_DO_NOT_RUN
    out = capsys.readouterr().out
    assert "  activation=ClampedSwiGLU(alpha=1.702, limit=7.0), experts with biases" in out
    assert " activation " not in out.partition("experts with biases")[2]
    doctor.main([*arguments, "--json"])
    asked = json.loads(capsys.readouterr().out)["question"]
    assert asked["expert_bias"] and asked["config"]["activation"] == {"alpha": 1.702, "limit": 7.0}


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The program as a user runs it, on a machine that shows JAX no GPU; warnings are errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "jax_megamoe.doctor", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_it_runs_here() -> None:
    result = run_here()
    assert result.returncode == doctor.KERNELS_DO_NOT_RUN, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert "  the reference runs it, since" in result.stdout
    assert "  JAX_PLATFORMS=cpu" in result.stdout


def test_help_documents_the_exit_codes() -> None:
    result = run_here("--help")
    assert result.returncode == 0
    for code in (doctor.KERNELS_RUN, doctor.KERNELS_DO_NOT_RUN, doctor.BAD_ARGUMENTS):
        assert re.search(rf"^    {code}  \w", result.stdout, re.MULTILINE)
