"""What this machine runs, and why not:

    python -m jax_megamoe.doctor [--tokens T --top-k K --experts E --hidden H --intermediate I]
                                 [--ranks R] [--save gate_up] [--backend cuda] [--json] ...

It prints versions, GPUs and how they reach each other, JAX's settings, the memory that the kernels
take for the sizes given (those of Qwen3-30B-A3B unless said), and which backend runs such a call,
with every reason against the kernels in the words of whoever refuses. It runs without a GPU too,
launches nothing, and takes no share of a GPU's memory. `--json` prints the same for a program.

Exit codes, for scripts:
    0  the kernels run a call of this configuration here
    1  they do not: the reference does, or with `--backend cuda` and for want of memory nothing
    2  an argument that no backend takes; what it may be is on standard error
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence

from jax_megamoe._diagnosis import Diagnosis, Memory, Question, check_question, diagnose
from jax_megamoe._machine import SETTINGS, Facts, gather
from jax_megamoe.config import (
    ACTIVATIONS,
    BACKENDS,
    COMBINE_DTYPES,
    POOL_FACTOR,
    PRECISIONS,
    SAVES,
    ClampedSwiGLU,
    Dims,
    MegaMoEConfig,
)
from jax_megamoe.memory import FRACTIONS

KERNELS_RUN, KERNELS_DO_NOT_RUN, BAD_ARGUMENTS = 0, 1, 2

# By the words of the command line; which constants a clamped one has changes nothing here.
_ACTIVATIONS = {**{name: name for name in ACTIVATIONS}, "clamped_swiglu": ClampedSwiGLU()}

_CONCLUSIONS = {
    "kernels": "the kernels run it",
    "reference": "the reference runs it, since",
    "nothing": "it raises an error, since",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    question = _question(options)
    try:
        check_question(question)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    facts = gather()
    diagnosis = diagnose(facts, question)
    if options.json:
        print(json.dumps(as_json(facts, question, diagnosis), indent=2))
    else:
        print("\n".join(lines(facts, question, diagnosis)))
    return exit_code(diagnosis)


def exit_code(diagnosis: Diagnosis) -> int:
    return KERNELS_RUN if diagnosis.runs == "kernels" else KERNELS_DO_NOT_RUN


def as_json(facts: Facts, question: Question, diagnosis: Diagnosis) -> dict[str, object]:
    """All of it as JSON holds it; the names are those of the records' fields."""
    return {
        "exit_code": exit_code(diagnosis),
        "question": dataclasses.asdict(question),
        "diagnosis": dataclasses.asdict(diagnosis),
        "facts": dataclasses.asdict(facts),
    }


def lines(facts: Facts, question: Question, diagnosis: Diagnosis) -> Iterator[str]:
    """The report as text."""
    yield "versions"
    yield from _indented(_versions(facts))
    yield "the CUDA part of jax_megamoe"
    yield from _indented(_extension(facts))
    yield "GPUs"
    yield from _indented(_gpus(facts, diagnosis))
    yield "settings"
    yield from _indented(_settings(facts))
    dims = question.dims
    yield f"a call of {', '.join(f'{letter} = {getattr(dims, letter)}' for letter in 'TKERHI')}"
    yield from _indented(_choices(question))
    yield "memory of the kernels, on each GPU"
    yield from _indented(_memory(diagnosis))
    yield "what runs"
    yield f"  {_CONCLUSIONS[diagnosis.runs]}"
    yield from _indented(diagnosis.reasons, "  - ")
    if diagnosis.advice:
        yield "what to do"
        yield from _indented(diagnosis.advice, "  - ")


def _indented(lines: Sequence[str] | Iterator[str], by: str = "  ") -> Iterator[str]:
    return (by + line for line in lines)


def _versions(facts: Facts) -> Iterator[str]:
    for name, version in facts.versions.items():
        yield f"{name} {version}"
    yield f"CUDA of JAX: {facts.cuda_runtime or 'none'}"
    newest = facts.driver.cuda_version
    yield (
        f"NVIDIA driver {facts.driver_version or 'unknown'}, for CUDA up to {newest}"
        if (newest)
        else f"NVIDIA driver: {facts.driver.error}"
    )


def _extension(facts: Facts) -> Iterator[str]:
    if facts.extension:
        kind = "a test build, with delays and seeded faults" if facts.test_build else "built"
        yield f"{kind}, for compute capability 9.0 (sm_90a): {facts.extension}"
        yield f"its calls: {', '.join(facts.targets)}"
    else:
        yield f"not built: {facts.missing}"
    yield f"nvcc to build it with: {facts.nvcc or 'none'}"


def _gpus(facts: Facts, diagnosis: Diagnosis) -> Iterator[str]:
    driver = facts.driver
    if not driver.gpus:
        yield f"the driver shows none: {driver.error or 'it works, and finds no GPU'}"
    for ordinal, gpu in enumerate(driver.gpus):
        yield f"GPU {ordinal}: {gpu.name}, compute capability {gpu.compute_capability}"
    for a in range(len(driver.gpus)):
        for b in range(a + 1, len(driver.gpus)):
            yield f"GPU {a} and GPU {b}: {_pair(facts, a, b)}"
    if not diagnosis.devices:
        yield f"JAX sees none: {facts.jax_error}"
    for verdict in diagnosis.devices:
        device = verdict.device
        limit, used = device.bytes_limit, device.bytes_in_use
        memory = "no limit known" if limit is None else f"JAX may take {_mebibytes(limit)}"
        taken = "" if used is None else f", has {_mebibytes(used)}"
        runs = "; ".join(verdict.reasons) or "the kernels run"
        yield f"JAX on GPU {device.ordinal}: {device.kind}; {memory}{taken}; {runs}"


def _pair(facts: Facts, a: int, b: int) -> str:
    """How two GPUs reach each other."""
    link = facts.links[a][b] if facts.links else ""
    if link.startswith("NV"):
        how = f"NVLink, {link[2:]} links"
    else:
        how = f"no NVLink ({link})" if link else "NVLink unknown (nvidia-smi does not say)"
    peers = facts.driver.peers
    reached = {(True, True): "both ways", (False, False): "none"}.get(
        (peers[a][b], peers[b][a]), "one way only"
    )
    return f"{how}; peer access: {reached}"


def _settings(facts: Facts) -> Iterator[str]:
    for name in SETTINGS:
        if name in facts.settings:
            yield f"{name}={facts.settings[name]}"
    if not set(FRACTIONS) & set(facts.settings):
        yield f"{FRACTIONS[0]} is not set: JAX takes up to 0.75 of each GPU"


def _choices(question: Question) -> Iterator[str]:
    config = question.config
    yield (
        f'precision="{config.precision}", backend="{config.backend}", save="{config.save}", '
        f"trainable_experts={config.trainable_experts}, {question.weights} weights"
    )
    biases = "experts with biases" if question.expert_bias else "experts without biases"
    activation = config.activation
    named = f'"{activation}"' if isinstance(activation, str) else repr(activation)
    yield f"activation={named}, {biases}"
    if question.dims.R > 1:
        yield f'combine_dtype="{config.combine_dtype}", pool_factor={config.pool_factor}'
        passes = question.dims.max_passes
        yield f"at most {passes} passes over the pool, by the routing" if passes > 1 else "one pass"


def _memory(diagnosis: Diagnosis) -> Iterator[str]:
    needed = diagnosis.memory
    if needed is None:
        yield f"none: {diagnosis.memory_error}"
        return
    yield from _passes(needed)
    plan = needed.plan
    parts = {
        "operands": plan.operands_bytes,
        "y": plan.y_bytes,
        "plan": plan.plan_bytes,
        "pool": plan.pool_bytes,
        "h": plan.h_bytes,
        "counters": plan.counters_bytes,
    }
    listed = ", ".join(f"{name} {_mebibytes(size)}" for name, size in parts.items())
    yield f"the forward in parts: {listed}"
    if plan.peer_bytes:
        yield f"shared with the other ranks, outside JAX's share: {_mebibytes(plan.peer_bytes)}"
    yield "float32 parameters, gradients of other layers and optimizer state come on top"


def _passes(needed: Memory) -> Iterator[str]:
    for name, of_pass in (("forward", needed.forward), ("backward", needed.backward)):
        yield (
            f"{name}: {_mebibytes(of_pass.total_bytes)}, of which "
            f"{_mebibytes(of_pass.workspace_bytes)} are workspace, shared by all layers"
        )
    if needed.kept_bytes:
        yield f"kept by each layer for its backward: {_mebibytes(needed.kept_bytes)}"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _question(options: argparse.Namespace) -> Question:
    config = MegaMoEConfig(
        precision=options.precision,
        activation=_ACTIVATIONS[options.activation],
        backend=options.backend,
        save=options.save,
        combine_dtype=options.combine_dtype,
        pool_factor=options.pool_factor,
        trainable_experts=not options.frozen_experts,
    )
    dims = Dims(
        T=options.tokens,
        K=options.top_k,
        E=options.experts,
        R=options.ranks,
        H=options.hidden,
        I=options.intermediate,
        pool_factor=config.pool_factor,
    )
    return Question(
        dims=dims, config=config, weights=options.weights, expert_bias=options.expert_bias
    )


def _parser() -> argparse.ArgumentParser:
    text, _, codes = str(__doc__).partition("Exit codes")
    parser = argparse.ArgumentParser(
        prog="python -m jax_megamoe.doctor",
        description=text.partition("\n\n")[2].partition("\n\n")[2],
        epilog=f"Exit codes{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sizes = {
        "--tokens": (16384, "T, tokens of a rank"),
        "--top-k": (8, "K, experts of a token"),
        "--experts": (128, "E, experts of all ranks"),
        "--ranks": (1, "R, GPUs that share the experts"),
        "--hidden": (2048, "H, hidden size"),
        "--intermediate": (768, "I, intermediate size of one expert"),
    }
    for flag, (default, meaning) in sizes.items():
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{meaning} (default: {default})"
        )
    choices = {
        "--precision": PRECISIONS,
        "--activation": tuple(_ACTIVATIONS),
        "--backend": BACKENDS,
        "--save": SAVES,
        "--combine-dtype": COMBINE_DTYPES,
        "--weights": ("float32", "bfloat16"),
    }
    for flag, values in choices.items():
        default = "auto" if flag == "--backend" else values[0]
        note = "; clamped_swiglu: ClampedSwiGLU(), gpt-oss's" if flag == "--activation" else ""
        parser.add_argument(
            flag, choices=values, default=default, help=f"default: %(default)s{note}"
        )
    parser.add_argument(
        "--pool-factor", type=float, default=POOL_FACTOR, help="(default: %(default)s)"
    )
    parser.add_argument("--frozen-experts", action="store_true", help="trainable_experts=False")
    parser.add_argument("--expert-bias", action="store_true", help="the experts have biases")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
