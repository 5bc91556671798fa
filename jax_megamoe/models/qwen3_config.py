"""What a Qwen3-MoE model is: its sizes and choices, by the names that Hugging Face gives them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax_megamoe.config import INT32_MAX, MAX_CHOICES, MAX_EXPERTS
from jax_megamoe.validation import check_flag, check_size, refuse

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"

# Fields of a Hugging Face config that may have these values and no other: what they would switch
# on is not here.
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": (MODEL_TYPE,),
    "architectures": ([ARCHITECTURE], None),
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "use_sliding_window": (False,),
    "rope_scaling": (None,),
    "quantization_config": (None,),
}
# Fields that change no number that the model computes of given tokens: ids of special tokens, of
# outputs and caches of transformers, and of the window that `use_sliding_window` keeps off.
_WITHOUT_EFFECT = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "output_router_logits",
    "sliding_window",
    "max_window_layers",
}


# What the rotary frequencies are powers of.
_ABOVE_0 = {"rope_theta"}


def _check_number(name: str, value: Any, *, may_be_0: bool) -> None:
    allowed = f"a finite number {'at least' if may_be_0 else 'above'} 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(TypeError, name, f"{value!r} ({type(value).__name__})", allowed)
    if not 0 <= value < math.inf or (value == 0 and not may_be_0):
        refuse(ValueError, name, repr(value), allowed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig:
    """The sizes and choices of a Qwen3-MoE model; hashable. Its fields are those of the Hugging
    Face config of the same names, and those with defaults have the defaults of transformers.

    `dataclasses.replace(QWEN3_30B_A3B, num_hidden_layers=4)` is the published model with fewer
    layers; any other size is overridden likewise.

    Attributes:
      vocab_size: V, rows of the embedding.
      hidden_size: H.
      num_hidden_layers: how many layers.
      num_attention_heads: heads of the queries, a multiple of `num_key_value_heads`.
      num_key_value_heads: heads of keys and values, each shared by a group of heads of queries.
      head_dim: of one head, even; H need not be heads times this.
      intermediate_size: of the MLP of a layer without experts.
      moe_intermediate_size: I, of one expert.
      num_experts: E.
      num_experts_per_tok: K.
      norm_topk_prob: divide a token's K weights by their sum.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: added to each mean square.
      initializer_range: standard deviation of the matrices and the embedding at first.
      decoder_sparse_step: layer n, counted from 0, has experts where n + 1 is a multiple of it;
      mlp_only_layers: except these, which have an MLP as all others.
      tie_word_embeddings: the logits are products with the embedding; there is no other matrix.
      attention_bias: the four linear maps of the attention have biases.
      router_aux_loss_coef: factor of a load-balance loss, kept for who trains: no call applies it.
      max_position_embeddings: positions that a checkpoint was made for, kept for the checkpoint:
        no call looks at it.

    Raises (when it is made):
      TypeError, ValueError: a field of another type or value than it may have, and a model without
        any layer with experts.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    rope_theta: float
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    router_aux_loss_coef: float = 0.001
    max_position_embeddings: int = 32768

    def __post_init__(self) -> None:
        most = {"num_experts": MAX_EXPERTS, "num_experts_per_tok": MAX_CHOICES}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                check_size(field.name, value, most.get(field.name, INT32_MAX))
            elif field.type is bool:
                check_flag(field.name, value)
            elif field.type is float:
                _check_number(field.name, value, may_be_0=field.name not in _ABOVE_0)
        check_size("num_experts_per_tok", self.num_experts_per_tok, self.num_experts)
        check_size("head_dim", self.head_dim, INT32_MAX, multiple=2)
        groups = self.num_key_value_heads
        check_size("num_attention_heads", self.num_attention_heads, INT32_MAX, multiple=groups)
        if not isinstance(self.mlp_only_layers, tuple):
            was = f"a {type(self.mlp_only_layers).__name__}"
            refuse(TypeError, "mlp_only_layers", was, "a tuple of ints")
        for layer in self.mlp_only_layers:
            check_size("mlp_only_layers", layer, self.num_hidden_layers - 1, least=0)
        if not any(self.has_experts):
            refuse(
                ValueError,
                "mlp_only_layers and decoder_sparse_step",
                f"{self.mlp_only_layers} and {self.decoder_sparse_step}",
                f"what leaves at least one of {self.num_hidden_layers} layers its experts",
            )

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Of each layer, whether it has experts or one MLP."""
        return tuple(
            (n + 1) % self.decoder_sparse_step == 0 and n not in self.mlp_only_layers
            for n in range(self.num_hidden_layers)
        )


# Of https://huggingface.co/Qwen/Qwen3-30B-A3B, its config.json.
QWEN3_30B_A3B = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    rope_theta=1_000_000.0,
    max_position_embeddings=40960,
)

# Of https://huggingface.co/Qwen/Qwen3-235B-A22B, its config.json.
QWEN3_235B_A22B = Qwen3MoeConfig(
    vocab_size=151936,
    hidden_size=4096,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    rope_theta=1_000_000.0,
    max_position_embeddings=40960,
)


def from_hugging_face(fields: Mapping[str, Any]) -> Qwen3MoeConfig:
    """The config that a Hugging Face config describes.

    Args:
      fields: what its config.json holds, of transformers 4 or 5.

    Raises:
      TypeError: no mapping, or a field of another type.
      ValueError: a field that is missing, or of no known name, or with a value that asks for what
        the model does not do: sliding windows, scaled rotary frequencies, dropout, another
        activation, quantised weights. It is named; none is ignored but those that change no number
        the model computes.
    """
    if not isinstance(fields, Mapping):
        refuse(TypeError, "fields", f"a {type(fields).__name__}", "a mapping of names to values")
    left = dict(fields)
    for name, allowed in _ONLY.items():
        if name in left and (value := left.pop(name)) not in allowed:
            refuse(ValueError, name, repr(value), " or ".join(map(repr, allowed)))
    if "rope_parameters" in left:
        left["rope_theta"] = _rope_theta(left.pop("rope_parameters"))
    if "num_local_experts" in left:
        left["num_experts"] = left.pop("num_local_experts")
    divided = ("hidden_size", "num_attention_heads")
    if left.get("head_dim") is None and set(divided) <= set(left):
        for name in divided:
            check_size(name, left[name], INT32_MAX)
        left["head_dim"] = left["hidden_size"] // left["num_attention_heads"]
    layers = left.pop("mlp_only_layers", None)
    if not isinstance(layers, list | tuple | None):
        refuse(TypeError, "mlp_only_layers", repr(layers), "a list of ints")
    left["mlp_only_layers"] = tuple(layers or ())
    known = dataclasses.fields(Qwen3MoeConfig)
    for field in known:
        if field.default is dataclasses.MISSING and field.name not in left:
            refuse(ValueError, field.name, f"missing, among {sorted(left)}", "a field")
    names = {field.name for field in known}
    for name, value in left.items():
        if name not in names | _WITHOUT_EFFECT:
            refuse(ValueError, name, repr(value), "left out: the model has no such choice")
    return Qwen3MoeConfig(**{name: value for name, value in left.items() if name in names})


def to_hugging_face(config: Qwen3MoeConfig) -> dict[str, Any]:
    """The fields of a config.json that transformers makes the same model of."""
    fields = dataclasses.asdict(config) | {"mlp_only_layers": list(config.mlp_only_layers)}
    return {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "rope_scaling": None,
    } | fields


def _rope_theta(parameters: Any) -> Any:
    """What transformers 5 keeps in `rope_parameters`."""
    allowed = "a mapping of rope_theta, and of rope_type, 'default', at most"
    if not isinstance(parameters, Mapping) or not set(parameters) <= {"rope_type", "rope_theta"}:
        refuse(ValueError, "rope_parameters", repr(parameters), allowed)
    if parameters.get("rope_type", "default") != "default" or "rope_theta" not in parameters:
        refuse(ValueError, "rope_parameters", repr(parameters), allowed)
    return parameters["rope_theta"]
