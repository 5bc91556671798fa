"""The programs of one of two processes that train together, each with two simulated devices:

python -m tests.training_programs PORT PROCESS PROGRAM ARGUMENT...

script ARGUMENT...    the Qwen3-MoE example with these arguments; says its exit status
weights FROM TO       loads a checkpoint, split over all devices, and writes it again
decide                says after which step the processes stop, rank 1 being asked to in step 3,
                      and what is refused where they have different texts
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jax_megamoe.models import qwen3_weights, safetensors
from jax_megamoe.models.qwen3_moe import Qwen3Moe, from_hugging_face
from tests import processes
from tests.golden import qwen3_tensors
from tests.processes import say

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
ASKED_IN_STEP = 3


def script(port: str, process: str, *arguments: str) -> None:
    meet = ("--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id", process)
    say(importlib.import_module("train_qwen3_moe").main([*arguments, *meet]))


def weights(port: str, process: str, source: str, target: str) -> None:
    example = importlib.import_module("qwen3.weights")
    processes.join(port, process)
    config = from_hugging_face(qwen3_tensors.CASES["published"])
    axes = {"expert_axis": "expert", "data_axes": ("fsdp",), "fsdp_axes": ("fsdp",)}
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("fsdp", "expert"), axis_types=auto)
    with jax.set_mesh(mesh):

        def make() -> Qwen3Moe:
            return Qwen3Moe(config, **axes, rngs=nnx.Rngs(0))

        model = nnx.merge(*nnx.get_abstract_model(make, mesh))
        qwen3_weights.load_weights(model, safetensors.read(source))
        parts = {len(a.addressable_shards) for a in jax.tree.leaves(nnx.state(model))}
        say(f"{parts} {model.embedding[...].is_fully_addressable}")
        example.export(model, Path(target), "float32")


def decide(port: str, process: str) -> None:
    example = importlib.import_module("qwen3.processes")
    rank = processes.join(port, process)
    asked: Any = types.SimpleNamespace(asked=False)
    stop = example.SharedStop(asked, jax.make_mesh((4,), ("data",)))
    step = 1
    while not stop.asked():
        step += 1
        asked.asked = rank == 1 and step >= ASKED_IN_STEP
    say(step)
    example.check_same("a text", "the same")
    try:
        example.check_same("a text", rank)
    except example.UsageError as error:
        say(error)


if __name__ == "__main__":
    port, process, program, *arguments = sys.argv[1:]
    {"script": script, "weights": weights, "decide": decide}[program](port, process, *arguments)
