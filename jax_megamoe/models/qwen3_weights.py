"""Weights of Qwen3-MoE checkpoints, into the model and out again, by the names of Hugging Face.

    load_weights(model, safetensors.read(folder))
    safetensors.write(folder, export_weights(model))

Matrices of a checkpoint are [output, input], each layer's and each expert's by itself; those of the
model are [input, output], stacked over experts and layers. Values are moved, never changed.
"""

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from jax_megamoe import weights
from jax_megamoe.layouts import EXPERT, QWEN3_MOE, Stored
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
        names are asked at once. Then one parameter after the other is made, for each device of this
        process its part, of the tensors that have some of it: a tensor that several devices share
        is asked for by each of them.

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

    for variable, names, transposed in _places(model):
        _fill(variable, names, tensors, transposed)


def first_layers(tensors: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The tensors of a checkpoint but those of its layers behind the first `num_layers`."""
    of_a_layer = re.compile(r"model\.layers\.(\d+)\.")
    found = {name: of_a_layer.match(name) for name in tensors}
    return {n: tensors[n] for n, layer in found.items() if not layer or int(layer[1]) < num_layers}


def export_weights(model: Qwen3Moe, *, dtype: DTypeLike = jnp.float32) -> weights.Computed:
    """The tensors of a checkpoint, by name.

    Args:
      model: whose parameters they are; none is copied before a tensor of it is taken.
      dtype: of the tensors, float32 or bfloat16, to which values are rounded; those that came from
        a bfloat16 checkpoint are its bits.

    Returns:
      A mapping from names to numpy arrays. Each is made anew when it is taken; in the mapping's
      order each parameter of a layer is fetched once. Where several processes have the model, all
      of them must take the same tensors in the same order, and each gets the whole of them.

    Raises:
      TypeError: an argument of another type or dtype.
    """
    config = _config(model)
    check_float_dtype("dtype", dtype)

    # One for all layers, so that one layer's share of one parameter is held: E tensors need it.
    @functools.lru_cache(maxsize=1)
    def fetch(layer: _Layer, path: str) -> np.ndarray:
        return _on_host(operator.attrgetter(path)(layer.block)[...][layer.place])

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


def _places(model: Qwen3Moe) -> Iterator[tuple[nnx.Variable[Any], np.ndarray, bool]]:
    """Each parameter, and of which tensors it is stacked: their names, [], [layers] or [layers, E],
    and whether they are transposed."""
    config = model.config
    for path, stored in _of_the_model(config).items():
        yield getattr(model, path), np.array(stored.name), stored.transposed
    for layers in _runs(model):
        first = layers[0].block
        for path, stored in _of_a_layer(config, first.has_experts).items():
            names = np.array([layer.prefix + stored.name for layer in layers])
            yield operator.attrgetter(path)(first), names, stored.transposed
        for path, stored in QWEN3_MOE.parameters().items() if first.has_experts else ():
            ids = range(config.num_experts) if EXPERT in stored.name else (None,)
            of_each = [
                [f"{layer.prefix}mlp.{stored.name.replace(EXPERT, str(e))}" for e in ids]
                for layer in layers
            ]
            names = np.array(of_each) if EXPERT in stored.name else np.array(of_each)[:, 0]
            yield getattr(first.mlp, path), names, stored.transposed


def _fill(
    variable: nnx.Variable[Any], names: np.ndarray, tensors: Mapping[str, Any], transposed: bool
) -> None:
    """Each device gets its part, which is read for it alone."""
    value = variable.get_value()
    shape = value.shape[names.ndim :]

    def part(index: Any) -> np.ndarray:
        chosen = np.asarray(names[index[: names.ndim]])
        inner = index[names.ndim :]
        sizes = (len(range(*s.indices(n))) for s, n in zip(inner, shape, strict=True))
        # New memory, which on a CPU becomes the parameter.
        stacked = np.empty((*chosen.shape, *sizes), np.float32)
        for place in np.ndindex(chosen.shape):
            stacked[place] = _read(tensors, str(chosen[place]), shape, transposed)[inner]
        return stacked

    sharding = value.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    parts = [
        # One after the other: the host may not have room for two.
        jax.block_until_ready(jax.device_put(part(index), device))
        for device, index in sharding.addressable_devices_indices_map(value.shape).items()
    ]
    variable.set_value(jax.make_array_from_single_device_arrays(value.shape, sharding, parts))


def _read(
    tensors: Mapping[str, Any], name: str, shape: tuple[int, ...], transposed: bool
) -> np.ndarray:
    """A tensor, as the parameter has it."""
    value = tensors[name]
    check_array(name, value)
    if str(value.dtype) not in _DTYPES:
        refuse(TypeError, name, f"of dtype {value.dtype}", f"of {', '.join(_DTYPES)}")
    wanted = shape[::-1] if transposed else shape
    if value.shape != wanted:
        refuse(ValueError, name, f"of shape {value.shape}", f"of shape {wanted}")
    value = np.asarray(value)
    return value.T if transposed else value


def _on_host(a: jax.Array) -> np.ndarray:
    if a.is_fully_addressable:
        return np.asarray(a)
    return multihost_utils.process_allgather(a, tiled=True)


def _whole(variable: nnx.Variable[Any]) -> np.ndarray:
    return _on_host(variable[...])


def _put(take: Callable[[], np.ndarray], stored: Stored) -> np.ndarray:
    return np.ascontiguousarray(take().T if stored.transposed else take())


def _cast(make: Callable[[], Any], dtype: DTypeLike) -> np.ndarray:
    return make().astype(jnp.dtype(dtype))
