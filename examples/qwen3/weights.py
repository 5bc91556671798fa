"""Checkpoints of Hugging Face: what a run starts from, and what it leaves."""

import argparse
import dataclasses
import json
import pathlib
from typing import Any

import jax.numpy as jnp
from lm.terminal import UsageError
from qwen3.processes import is_first

from jax_megamoe.models import safetensors
from jax_megamoe.models.qwen3_moe import (
    Qwen3Moe,
    Qwen3MoeConfig,
    from_hugging_face,
    to_hugging_face,
)
from jax_megamoe.models.qwen3_weights import export_weights, first_layers, load_weights
from jax_megamoe.models.training_config import read_table

DTYPES = ("float32", "bfloat16")
# What the weights do not depend on, and a run may have otherwise.
_OF_TRAINING = {"initializer_range", "router_aux_loss_coef", "max_position_embeddings"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints of Hugging Face, in the safetensors format")
    add = group.add_argument
    start = "a folder to start from, with its config.json; --layers takes its first layers"
    add("--weights", type=pathlib.Path, metavar="PATH", help=start)
    add("--export", type=pathlib.Path, metavar="PATH", help="a folder for the trained model")
    add("--export-dtype", choices=DTYPES, default=DTYPES[0], help="(%(default)s)")


def check_fits(path: pathlib.Path, model: Qwen3MoeConfig, layers: int | None) -> None:
    """Raises UsageError unless the checkpoint is one of that model; OSError, TypeError, ValueError
    where its config.json is none.

    layers: those of the command line, which may be fewer than the checkpoint has.
    """
    theirs = from_hugging_face(read_table(path / "config.json"))
    if layers is not None and layers <= theirs.num_hidden_layers:
        theirs = dataclasses.replace(theirs, num_hidden_layers=layers)
    for field in dataclasses.fields(model):
        was, may_be = getattr(theirs, field.name), getattr(model, field.name)
        if field.name in _OF_TRAINING or was == may_be:
            continue
        how = "; --layers takes the first ones" if field.name == "num_hidden_layers" else ""
        raise UsageError(
            f"--weights {path} has {field.name} = {was!r}, but the run's model has {may_be!r}{how}."
        )


def check_export(folder: pathlib.Path, balance: str) -> None:
    """Raises UsageError where a run could not leave its model there."""
    if balance == "bias":
        raise UsageError(
            "--export needs --balance loss or none: a checkpoint of Hugging Face has no place for"
            " the selection bias, without which the model would route otherwise."
        )
    if is_first():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--export {folder} is no folder: {error}.") from error
        if there := sorted(folder.glob("*.safetensors")):
            raise UsageError(f"--export {folder} has a checkpoint already: {there[0].name}.")


def load(model: Qwen3Moe, path: pathlib.Path) -> None:
    """Gives the model the parameters of the checkpoint's first layers."""
    try:
        tensors = first_layers(safetensors.read(path), model.config.num_hidden_layers)
        load_weights(model, tensors)
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"--weights {path}: {error}.") from error


def export(model: Qwen3Moe, folder: pathlib.Path, dtype: str) -> None:
    """Writes the model; all processes take part, and the first one writes."""
    tensors = export_weights(model, dtype=jnp.dtype(dtype))
    if not is_first():
        for name in tensors:
            tensors[name]
        return
    safetensors.write(folder, tensors)
    fields: dict[str, Any] = to_hugging_face(model.config)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
