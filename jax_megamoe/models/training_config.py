"""What a training run of Qwen3-MoE is: a value, of a file, a command line or Python."""

import argparse
import dataclasses
import json
import math
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from jax_megamoe.config import (
    BACKENDS,
    FP8_GROUP,
    INT32_MAX,
    PRECISIONS,
    RANK_COUNTS,
    MegaMoEConfig,
)
from jax_megamoe.models.qwen3_config import (
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    Qwen3MoeConfig,
    from_hugging_face,
)
from jax_megamoe.models.qwen3_layers import ATTENTIONS
from jax_megamoe.validation import check_choice, check_size, refuse

MOES = ("megamoe", "jax")
REMATS = ("full", "gate_up", "none")
BALANCES = ("bias", "loss", "none")
MODELS = {"qwen3-30b-a3b": QWEN3_30B_A3B, "qwen3-235b-a22b": QWEN3_235B_A22B}
# Positions whose logits are made at a time, unless a sequence has fewer.
LOSS_CHUNK = 512


def _option(default: Any, meaning: str, *choices: str) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning, "choices": choices})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """A training run; hashable. Each field is an option of the command line, too, and says there
    what it is.

    Attributes:
      model: which model it is.

    Raises (when it is made):
      TypeError, ValueError: a field of another type or value than it may have.
    """

    model: Qwen3MoeConfig
    seq: int = _option(4096, "tokens of a sequence")
    batch: int = _option(8, "sequences of a step, over all devices and microbatches")
    microbatches: int = _option(1, "parts of a step's batch, whose gradients are added up")
    data_parallel: int = _option(1, "devices along the mesh axis data")
    fsdp: int = _option(0, "devices along the mesh axis fsdp; 0: all that the others leave")
    expert_parallel: int = _option(1, "devices that share the experts: 1, 2, 4 or 8")
    moe: str = _option("megamoe", "the layer: this package's, or its reference in plain JAX", *MOES)
    backend: str = _option("auto", "of the layer megamoe, as docs/op.md says", *BACKENDS)
    precision: str = _option("bf16", "of the experts; all else is bf16 or float32", *PRECISIONS)
    attention: str = _option("xla", "any platform, or a GPU's fused one", *ATTENTIONS)
    remat: str = _option("full", "keep a layer's input; and its g and u; or all of it", *REMATS)
    loss_chunk: int = _option(LOSS_CHUNK, "positions whose logits are in memory at a time")
    balance: str = _option("bias", "the load, by a selection bias or a loss", *BALANCES)
    bias_speed: float = _option(1e-3, "by which a selection bias moves in a step")
    loss_factor: float = _option(1e-3, "of the load-balance loss")
    z_factor: float = _option(0.0, "of the router's z loss")
    steps: int = _option(1000, "of the run; the learning rate falls to 0 behind the last")
    warmup: int = _option(100, "steps in which the learning rate rises from 0")
    learning_rate: float = _option(3e-4, "at most")
    weight_decay: float = _option(0.1, "of matrices of the layers, relative to the learning rate")
    gradient_norm: float = _option(1.0, "to which a larger gradient is scaled down")
    seed: int = _option(0, "of the parameters, and of the order of the data")

    def __post_init__(self) -> None:
        if not isinstance(self.model, Qwen3MoeConfig):
            refuse(TypeError, "model", f"a {type(self.model).__name__}", "a Qwen3MoeConfig")
        for field in options():
            value, least = getattr(self, field.name), int(field.name not in _MAY_BE_0)
            if field.metadata["choices"]:
                check_choice(field.name, value, field.metadata["choices"])
            elif field.type is int:
                check_size(field.name, value, INT32_MAX, least=least)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                was = f"{value!r} ({type(value).__name__})"
                refuse(TypeError, field.name, was, "a number")
            elif not 0 <= value < math.inf or (least and not value):
                may_be = f"finite and {'above' if least else 'at least'} 0"
                refuse(ValueError, field.name, repr(value), may_be)
        if self.expert_parallel not in RANK_COUNTS:
            refuse(ValueError, "expert_parallel", self.expert_parallel, f"one of {RANK_COUNTS}")
        check_size(
            "model.num_experts", self.model.num_experts, INT32_MAX, multiple=self.expert_parallel
        )
        for name, by, part in (
            ("batch", "microbatches", self.microbatches),
            ("seq", "loss_chunk", self.positions_at_a_time),
        ):
            if (size := getattr(self, name)) % part:
                refuse(ValueError, name, size, f"a multiple of {by} = {part}")
        if self.precision == "fp8_block":
            for name in ("hidden_size", "moe_intermediate_size"):
                size = getattr(self.model, name)
                check_size(f"model.{name}", size, INT32_MAX, multiple=FP8_GROUP)
        if self.attention == "cudnn" and self.precision == "float32":
            refuse(ValueError, "attention", "'cudnn' with precision='float32'", "'xla' there")

    @property
    def positions_at_a_time(self) -> int:
        """Of a sequence, whose logits are made at a time."""
        return min(self.loss_chunk, self.seq)

    @property
    def experts(self) -> MegaMoEConfig:
        """The choices of the layer; with moe="jax" the reference, which is JAX alone."""
        return MegaMoEConfig(
            precision=self.precision,
            backend=self.backend if self.moe == "megamoe" else "reference",
            save="gate_up" if self.remat == "gate_up" else "none",
        )


_METAVARS: dict[Any, str] = {int: "N", float: "X"}
_MAY_BE_0 = {"fsdp", "bias_speed", "loss_factor", "z_factor", "warmup", "weight_decay", "seed"}


def options() -> list[dataclasses.Field[Any]]:
    """The fields of `TrainingConfig` but the model."""
    return [field for field in dataclasses.fields(TrainingConfig) if field.name != "model"]


def from_dict(
    fields: Mapping[str, Any], *, folder: pathlib.Path = pathlib.Path()
) -> TrainingConfig:
    """A run of its fields by name.

    Args:
      fields: of `TrainingConfig`; those with defaults may be left out. `model` is a published one's
        name, a Hugging Face config.json or its folder, or a mapping with such a one in `base` and
        the fields of `Qwen3MoeConfig` that are otherwise, all of them without `base`.
      folder: that a path of a model is relative to.

    Raises:
      OSError: a config.json that cannot be read.
      TypeError, ValueError: a name that is none, or what the configs refuse.
    """
    left = dict(fields)
    if "model" not in left:
        refuse(ValueError, "model", "missing", f"one of {', '.join(MODELS)}, a path or a table")
    model = _model(left.pop("model"), folder)
    _refuse_others(left, [field.name for field in options()])
    return TrainingConfig(model=model, **left)


def to_dict(config: TrainingConfig) -> dict[str, Any]:
    """What `from_dict` makes it of, and JSON holds."""
    fields = dataclasses.asdict(config)
    return json.loads(json.dumps(fields))


def add_arguments(parser: argparse.ArgumentParser, *left_out: str) -> None:
    """An option for each field but those left out, a file that has them, and --layers."""
    parser.add_argument(
        "--config", type=pathlib.Path, metavar="FILE", help="options of a TOML or JSON file"
    )
    parser.add_argument(
        "--model", help=f"{', '.join(MODELS)}, or a Hugging Face config.json or its folder"
    )
    parser.add_argument("--layers", type=int, help="of the model (default: all of them)")
    for field in options():
        if field.name in left_out:
            continue
        choices = field.metadata["choices"] or None
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=field.type,
            choices=choices,
            metavar=None if choices else _METAVARS[field.type],
            help=f"{field.metadata['meaning']} (default: {field.default})",
        )


def from_arguments(args: argparse.Namespace) -> TrainingConfig:
    """The run of `add_arguments`; what the command line says goes before what the file says.

    Raises:
      OSError: a file that cannot be read.
      TypeError, ValueError: as `from_dict`, and for a file that is neither TOML nor JSON.
    """
    fields: dict[str, Any] = {} if args.config is None else read_table(args.config)
    folder = pathlib.Path() if args.config is None else args.config.parent
    if args.model is not None:
        fields["model"], folder = args.model, pathlib.Path()
    given = {field.name: getattr(args, field.name, None) for field in options()}
    fields |= {name: value for name, value in given.items() if value is not None}
    if args.layers is not None and "model" in fields:
        model = fields["model"]
        table = model if isinstance(model, Mapping) else {"base": model}
        fields["model"] = {**table, "num_hidden_layers": args.layers}
    return from_dict(fields, folder=folder)


def read_table(path: pathlib.Path) -> dict[str, Any]:
    """What a file holds, TOML where its name ends so and else JSON.

    Raises:
      OSError: it cannot be read.
      TypeError, ValueError: it holds something else, or is no such file; it is named.
    """
    form, parse = ("TOML", tomllib.loads) if path.suffix == ".toml" else ("JSON", json.loads)
    try:
        fields = parse(path.read_text())
    except ValueError as error:
        refuse(ValueError, str(path), f"no {form}: {error}", "a .toml or .json file")
    if not isinstance(fields, dict):
        refuse(TypeError, str(path), f"a {type(fields).__name__}", "a table of names and values")
    return fields


def _model(given: Any, folder: pathlib.Path) -> Qwen3MoeConfig:
    if isinstance(given, str):
        if given in MODELS:
            return MODELS[given]
        path = folder / given
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            refuse(ValueError, "model", repr(given), f"one of {', '.join(MODELS)}, or a path")
        return from_hugging_face(read_table(path))
    if not isinstance(given, Mapping):
        refuse(TypeError, "model", f"a {type(given).__name__}", "a name, a path or a table")
    changes = dict(given)
    names = [field.name for field in dataclasses.fields(Qwen3MoeConfig)]
    base = changes.pop("base", None)
    _refuse_others(changes, names, "model.")
    if isinstance(changes.get("mlp_only_layers"), list):
        changes["mlp_only_layers"] = tuple(changes["mlp_only_layers"])
    if base is not None:
        return dataclasses.replace(_model(base, folder), **changes)
    required = [
        field.name
        for field in dataclasses.fields(Qwen3MoeConfig)
        if field.default is dataclasses.MISSING
    ]
    for name in required:
        if name not in changes:
            refuse(ValueError, f"model.{name}", "missing without model.base", "there")
    return Qwen3MoeConfig(**changes)


def _refuse_others(given: Mapping[str, Any], names: list[str], prefix: str = "") -> None:
    for name in given:
        if name not in names:
            may_be = f"one of {', '.join(names)}"
            refuse(ValueError, f"{prefix}{name}", "given", f"left out; a field is {may_be}")
