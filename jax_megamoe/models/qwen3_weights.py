"""Weights of Qwen3-MoE checkpoints, into the model and out again, by the names of Hugging Face.

    load_weights(model, safetensors.read(folder))
    safetensors.write(folder, export_weights(model))

Matrices of a checkpoint are [output, input], each layer's and each expert's by itself; those of the
model are [input, output], stacked over experts and layers. Values are moved, never changed.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jax_megamoe import weights
from jax_megamoe.layouts import QWEN3_MOE, Stored
from jax_megamoe.models.qwen3_config import Qwen3MoeConfig
from jax_megamoe.models.qwen3_layers import Block
from jax_megamoe.models.qwen3_moe import Qwen3Moe
from jax_megamoe.validation import check_array, check_float_dtype, refuse

# Those that float32 holds exactly.
_DTYPES = ("float32", "bfloat16", "float16")

# Parameters by their paths, each in the tensor of that name.
_OF_THE_MODEL = {
    "embedding": Stored("model.embed_tokens.weight"),
    "norm": Stored("model.norm.weight"),
    "head": Stored("lm_head.weight", transposed=True),
}
# Behind the prefix of the layer; the experts' are those of `layouts.QWEN3_MOE`.
_OF_A_LAYER = {
    "attention_norm": Stored("input_layernorm.weight"),
    "attention.query": Stored("self_attn.q_proj.weight", transposed=True),
    "attention.key": Stored("self_attn.k_proj.weight", transposed=True),
    "attention.value": Stored("self_attn.v_proj.weight", transposed=True),
    "attention.out": Stored("self_attn.o_proj.weight", transposed=True),
    "attention.query_norm": Stored("self_attn.q_norm.weight"),
    "attention.key_norm": Stored("self_attn.k_norm.weight"),
    "mlp_norm": Stored("post_attention_layernorm.weight"),
}
_BIASES = {
    "attention.query_bias": Stored("self_attn.q_proj.bias"),
    "attention.key_bias": Stored("self_attn.k_proj.bias"),
    "attention.value_bias": Stored("self_attn.v_proj.bias"),
    "attention.out_bias": Stored("self_attn.o_proj.bias"),
}
_OF_AN_MLP = {
    "mlp.w_gate": Stored("mlp.gate_proj.weight", transposed=True),
    "mlp.w_up": Stored("mlp.up_proj.weight", transposed=True),
    "mlp.w_down": Stored("mlp.down_proj.weight", transposed=True),
}


class _Layer(NamedTuple):
    """A layer of the model: its number, and where in which run its parameters are stacked."""

    number: int
    block: Block
    place: int

    @property
    def prefix(self) -> str:
        return f"model.layers.{self.number}."


def tensor_names(config: Qwen3MoeConfig) -> frozenset[str]:
    """All tensors of a checkpoint of that model."""
    names = {stored.name for stored in _of_the_model(config).values()}
    for number, has_experts in enumerate(config.has_experts):
        prefix = f"model.layers.{number}."
        names |= {prefix + s.name for s in _of_a_layer(config, has_experts).values()}
        if has_experts:
            experts = {"num_experts": config.num_experts, "prefix": f"{prefix}mlp."}
            names |= weights.tensor_names(QWEN3_MOE, **experts)
    return frozenset(names)


def load_weights(model: Qwen3Moe, tensors: Mapping[str, Any]) -> None:
    """Gives every parameter of the model its value.

    Args:
      model: drawn, or abstract as `flax.nnx.get_abstract_model` makes it, which draws nothing. Each
        parameter is put where the one that it replaces is.
      tensors: by name, numpy or jax arrays, float32, bfloat16 or float16. It may load on access:
        names are asked at once, and then one parameter, stacked over its layers, is made after the
        other.

    Raises:
      TypeError: an argument of another type, or a tensor that is no array or of another dtype.
      ValueError: a tensor that is missing, that the model has no place for, or of a shape that does
        not fit. It is named; the first two before anything is loaded.
    """
    config = _config(model)
    if not isinstance(tensors, Mapping):
        refuse(TypeError, "tensors", f"a {type(tensors).__name__}", "a mapping of arrays by name")
    expected = tensor_names(config)
    for name in sorted(expected - set(tensors)):
        refuse(ValueError, name, f"missing among {len(tensors)} tensors", "there")
    for name in sorted(set(tensors) - expected):
        refuse(ValueError, name, "given", "left out: the model has no place for it")

    for path, stored in _of_the_model(config).items():
        variable = getattr(model, path)
        # A copy, since on a CPU the parameter may be the memory that it is made of.
        _place(variable, np.array(_read(tensors, stored, "", variable.shape), np.float32))
    for layers in _runs(model):
        first = layers[0].block
        for path, stored in _of_a_layer(config, first.has_experts).items():
            variable = operator.attrgetter(path)(first)
            shape = variable.shape[1:]
            parts = (_read(tensors, stored, layer.prefix, shape) for layer in layers)
            _place(variable, _stack(variable.shape, parts))
        if first.has_experts:
            imported = [_import_experts(config, tensors, layer) for layer in layers]
            for name in imported[0]:
                variable = getattr(first.mlp, name)
                _place(variable, _stack(variable.shape, (_checked(i, name) for i in imported)))


def export_weights(model: Qwen3Moe, *, dtype: DTypeLike = jnp.float32) -> weights.Computed:
    """The tensors of a checkpoint, by name.

    Args:
      model: whose parameters they are; none is copied before a tensor of it is taken.
      dtype: of the tensors, float32 or bfloat16, to which values are rounded; those that came from
        a bfloat16 checkpoint are its bits.

    Returns:
      A mapping from names to numpy arrays. Each is made anew when it is taken; in the mapping's
      order each parameter of a layer is fetched once.

    Raises:
      TypeError: an argument of another type or dtype.
    """
    config = _config(model)
    check_float_dtype("dtype", dtype)

    # One for all layers, so that one layer's share of one parameter is held: E tensors need it.
    @functools.lru_cache(maxsize=1)
    def fetch(layer: _Layer, path: str) -> np.ndarray:
        return np.asarray(operator.attrgetter(path)(layer.block)[...][layer.place])

    makes: dict[str, Callable[[], Any]] = {}
    for path, stored in _of_the_model(config).items():
        take = functools.partial(_whole, getattr(model, path))
        makes[stored.name] = functools.partial(_put, take, stored)
    for layer in (layer for layers in _runs(model) for layer in layers):
        for path, stored in _of_a_layer(config, layer.block.has_experts).items():
            take = functools.partial(fetch, layer, path)
            makes[layer.prefix + stored.name] = functools.partial(_put, take, stored)
        if layer.block.has_experts:
            takes = {n: functools.partial(fetch, layer, f"mlp.{n}") for n in QWEN3_MOE.parameters()}
            exported = weights.export_weights(
                weights.Computed(takes), QWEN3_MOE, **_expert_options(config, layer)
            )
            makes |= {name: functools.partial(exported.__getitem__, name) for name in exported}
    return weights.Computed({n: functools.partial(_cast, make, dtype) for n, make in makes.items()})


def _config(model: Any) -> Qwen3MoeConfig:
    if not isinstance(model, Qwen3Moe):
        refuse(TypeError, "model", f"a {type(model).__name__}", "a Qwen3Moe")
    return model.config


def _of_the_model(config: Qwen3MoeConfig) -> dict[str, Stored]:
    is_tied = config.tie_word_embeddings
    return {p: s for p, s in _OF_THE_MODEL.items() if not (is_tied and p == "head")}


def _of_a_layer(config: Qwen3MoeConfig, has_experts: bool) -> dict[str, Stored]:
    """All but the experts and their router."""
    biases = _BIASES if config.attention_bias else {}
    return _OF_A_LAYER | biases | ({} if has_experts else _OF_AN_MLP)


def _runs(model: Qwen3Moe) -> Iterator[list[_Layer]]:
    """The layers of each run, numbered over all of them."""
    number = 0
    for block in model.runs:
        num_layers = block.attention_norm.shape[0]
        yield [_Layer(number + place, block, place) for place in range(num_layers)]
        number += num_layers


def _expert_options(config: Qwen3MoeConfig, layer: _Layer) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.moe_intermediate_size,
        "prefix": f"{layer.prefix}mlp.",
    }


def _import_experts(
    config: Qwen3MoeConfig, tensors: Mapping[str, Any], layer: _Layer
) -> weights.Computed:
    return weights.import_weights(tensors, QWEN3_MOE, **_expert_options(config, layer))


def _read(
    tensors: Mapping[str, Any], stored: Stored, prefix: str, shape: tuple[int, ...]
) -> np.ndarray:
    """A parameter that has a tensor of its own."""
    name = prefix + stored.name
    value = _checked(tensors, name)
    wanted = shape[::-1] if stored.transposed else shape
    if value.shape != wanted:
        refuse(ValueError, name, f"of shape {value.shape}", f"of shape {wanted}")
    return value.T if stored.transposed else value


def _checked(arrays: Mapping[str, Any], name: str) -> np.ndarray:
    value = arrays[name]
    check_array(name, value)
    if str(value.dtype) not in _DTYPES:
        refuse(TypeError, name, f"of dtype {value.dtype}", f"of {', '.join(_DTYPES)}")
    return np.asarray(value)


def _stack(shape: tuple[int, ...], parts: Iterator[np.ndarray]) -> np.ndarray:
    stacked = np.empty(shape, np.float32)
    for place, part in enumerate(parts):
        stacked[place] = part
    return stacked


def _place(variable: nnx.Variable[Any], value: np.ndarray) -> None:
    placed = jax.device_put(value, variable.get_value().sharding)
    # Before the next one is made: the host may not have room for two.
    variable.set_value(jax.block_until_ready(placed))


def _whole(variable: nnx.Variable[Any]) -> np.ndarray:
    return np.asarray(variable[...])


def _put(take: Callable[[], np.ndarray], stored: Stored) -> np.ndarray:
    return np.ascontiguousarray(take().T if stored.transposed else take())


def _cast(make: Callable[[], Any], dtype: DTypeLike) -> np.ndarray:
    return make().astype(jnp.dtype(dtype))
