"""A training run of the step benchmark, in a process of its own: what it is told, what it answers.

Imports neither JAX nor PyTorch: both kinds of processes need it.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

Result = dict[str, Any]
TORCH = "torch_grouped_mm"
# By name, in the order of a round: the program that runs it, and the fields of the configuration
# that make it.
IMPLEMENTATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "jax_megamoe": ("_step_jax", {}),
    "jax_megamoe_fp8": ("_step_jax", {"precision": "fp8_block"}),
    "tokamax_ragged_dot": ("_step_jax", {"moe": "jax"}),
    "lax_ragged_dot": ("_step_jax", {"moe": "jax"}),
    TORCH: ("_step_torch", {}),
    "jax_reference": ("_step_jax", {"moe": "jax"}),
}
SOURCES = pathlib.Path(__file__).parent
# Of what a process wrote to its standard error, shown where it failed.
SHOWN_LINES = 40


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process is told.

    Attributes:
      impl: one of IMPLEMENTATIONS.
      config: of `training_config.to_dict`: the model and the step.
      batches: a .npy of int32 [steps, batch, seq + 1].
      num_devices: the first ones.
      parameters: a folder of the parameters before the first step, float32, a .npy each by its
        path in the model of `jax_megamoe.models.qwen3_moe`: written by a run in JAX, read by one in
        PyTorch; None: not written, or drawn by PyTorch.
      first_measured: the first step whose time counts, from 1.
      peer_rows: of a peer over several GPUs, as `_step_peers.RaggedMoE` takes it.
      peers_path: a directory of packages that only peers need; None: none.
    """

    impl: str
    config: dict[str, Any]
    batches: str
    num_devices: int
    parameters: str | None
    first_measured: int
    peer_rows: float
    peers_path: str | None


def learning_rate(config: dict[str, Any], step: int) -> float:
    """Of a step, from 1, as `training.make_optimizer` has it: a linear rise, then a cosine."""
    count, warmup = step - 1, config["warmup"]
    if count < warmup:
        return config["learning_rate"] * count / warmup
    decay = max(config["steps"], warmup + 1) - warmup
    share = min((count - warmup) / decay, 1.0)
    return config["learning_rate"] * 0.5 * (1 + math.cos(math.pi * share))


def run(module: str, job: Job, folder: pathlib.Path, timeout: float) -> Result:
    """What the module's `main` finds out of the job in a new process; `error` where it fails.

    folder: for the files between the two.
    timeout: seconds after which it and all that it started are ended.
    """
    told, answer, log = (folder / name for name in ("job.json", "result.json", "log.txt"))
    told.write_text(json.dumps(dataclasses.asdict(job)))
    answer.unlink(missing_ok=True)
    command = [sys.executable, str(SOURCES / f"{module}.py"), str(told), str(answer)]
    # Later rounds take what the first has compiled.
    environment = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), **os.environ}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout)
            error = f"the process ended with {status}: {_last_line(log)}"
        except subprocess.TimeoutExpired:
            error = f"TimeoutError: it did not end within {timeout:.0f} s"
        finally:
            # All of its session: ranks that wait for one that failed, compilers.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result = json.loads(answer.read_text()) if answer.exists() else {"error": error[:500]}
    if "error" in result:
        shown = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        print("\n".join([f"{job.impl} failed:", *shown]), file=sys.stderr, flush=True)
    return result


def answer(find_out: Callable[[Job], Result | None], arguments: list[str]) -> None:
    """The program of such a process; None: another process answers."""
    told, path = map(pathlib.Path, arguments)
    job = Job(**json.loads(told.read_text()))
    try:
        result = find_out(job)
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:500]}
    if result is not None:
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(result))
        unfinished.replace(path)


def _last_line(log: pathlib.Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"
