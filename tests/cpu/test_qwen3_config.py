"""What a Qwen3-MoE model may be, and the Hugging Face configs that are one: refused by name."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_megamoe.models.qwen3_moe import (
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    Qwen3Moe,
    Qwen3MoeConfig,
    from_hugging_face,
    to_hugging_face,
)
from tests.golden import qwen3_tensors
from tests.refusals import refusal

FIELDS = qwen3_tensors.CASES["published"]
SMALL = from_hugging_face(FIELDS)
# As published, the part that says nothing of sizes.
OF_THE_FILE: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
}


def test_a_published_file_is_read_whole() -> None:
    expected = dataclasses.replace(SMALL, max_position_embeddings=40960)
    assert from_hugging_face(FIELDS | OF_THE_FILE) == expected


@pytest.mark.parametrize("config", [QWEN3_30B_A3B, QWEN3_235B_A22B, SMALL])
def test_a_config_comes_back(config: Qwen3MoeConfig) -> None:
    assert from_hugging_face(to_hugging_face(config)) == config
    other = dataclasses.replace(
        config, mlp_only_layers=(0,), decoder_sparse_step=2, attention_bias=True, rope_theta=5.0
    )
    assert from_hugging_face(to_hugging_face(other)) == other != config


def test_other_names_of_transformers_5() -> None:
    fields = {k: v for k, v in FIELDS.items() if k not in ("rope_theta", "num_experts")}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": FIELDS["rope_theta"]}}
    assert from_hugging_face(fields | rope | {"num_local_experts": FIELDS["num_experts"]}) == SMALL
    halved = {k: v for k, v in FIELDS.items() if k != "head_dim"}
    assert from_hugging_face(halved).head_dim == FIELDS["hidden_size"] // 4


def test_which_layers_have_experts() -> None:
    config = dataclasses.replace(
        SMALL, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=(3,)
    )
    assert config.has_experts == (False, True, False, False, False, True)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model_type": "qwen2_moe"}, "model_type"),
        ({"architectures": ["Qwen3MoeForTokenClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1e6, "factor": 4.0}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"shared_expert_intermediate_size": 128}, "shared_expert_intermediate_size"),
        ({"logit_scale": 2.0}, "logit_scale"),
    ],
)
def test_fields_that_ask_for_more_are_refused(fields: dict[str, Any], name: str) -> None:
    with refusal(ValueError, name, ".", "."):
        from_hugging_face(FIELDS | fields)


@pytest.mark.parametrize(
    "name", ["vocab_size", "num_key_value_heads", "norm_topk_prob", "rope_theta", "num_experts"]
)
def test_a_missing_field_is_refused(name: str) -> None:
    with refusal(ValueError, name, "missing", "a field"):
        from_hugging_face({k: v for k, v in FIELDS.items() if k != name})


def test_what_is_no_config_is_refused() -> None:
    with refusal(TypeError, "fields", "a list", "a mapping"):
        from_hugging_face([])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "error", "name", "was", "may_be"),
    [
        ({"num_attention_heads": 0}, ValueError, "num_attention_heads", "0", r"in 1\.\."),
        ({"num_attention_heads": "4"}, TypeError, "num_attention_heads", "'4'", "an int"),
        ({"hidden_size": None}, TypeError, "hidden_size", "None", "an int"),
        ({"mlp_only_layers": 3}, TypeError, "mlp_only_layers", "3", "a list of ints"),
        ({"mlp_only_layers": "01"}, TypeError, "mlp_only_layers", "'01'", "a list of ints"),
        ({"mlp_only_layers": ["0"]}, TypeError, "mlp_only_layers", "'0'", "an int"),
    ],
)
def test_fields_of_a_file_are_refused_by_name(
    fields: dict[str, Any], error: type[Exception], name: str, was: str, may_be: str
) -> None:
    """Also where the size of a head follows from them."""
    given = {k: v for k, v in FIELDS.items() if k != "head_dim"} | fields
    with refusal(error, name, was, may_be):
        from_hugging_face(given)


@pytest.mark.parametrize(
    ("fields", "error", "name", "was", "may_be"),
    [
        ({"vocab_size": 0}, ValueError, "vocab_size", "0", r"in 1\.\."),
        ({"hidden_size": 8.0}, TypeError, "hidden_size", r"8\.0", "an int"),
        ({"num_experts": 513}, ValueError, "num_experts", "513", r"in 1\.\.512"),
        ({"num_experts_per_tok": 17}, ValueError, "num_experts_per_tok", "17", r"in 1\.\.16"),
        ({"num_attention_heads": 3}, ValueError, "num_attention_heads", "3", "multiple of 2"),
        ({"head_dim": 15}, ValueError, "head_dim", "15", "multiple of 2"),
        ({"norm_topk_prob": 1}, TypeError, "norm_topk_prob", "1", "True or False"),
        ({"tie_word_embeddings": None}, TypeError, "tie_word_embeddings", "None", "True or"),
        ({"rope_theta": "1e6"}, TypeError, "rope_theta", "'1e6'", "a finite number"),
        ({"rope_theta": 0.0}, ValueError, "rope_theta", "0.0", "above 0"),
        ({"rms_norm_eps": -1.0}, ValueError, "rms_norm_eps", "-1.0", "a finite number"),
        ({"initializer_range": np.inf}, ValueError, "initializer_range", "inf", "a finite number"),
        ({"mlp_only_layers": [0]}, TypeError, "mlp_only_layers", "a list", "a tuple"),
        ({"mlp_only_layers": (2,)}, ValueError, "mlp_only_layers", "2", r"in 0\.\.1"),
        (
            {"mlp_only_layers": (0, 1)},
            ValueError,
            "mlp_only_layers and .*",
            r"\(0, 1\)",
            "at least",
        ),
        ({"decoder_sparse_step": 3}, ValueError, ".*decoder_sparse_step", "3", "at least"),
    ],
)
def test_sizes_are_refused_by_name(
    fields: dict[str, Any], error: type[Exception], name: str, was: str, may_be: str
) -> None:
    with refusal(error, name, was, may_be):
        dataclasses.replace(SMALL, **fields)


POLICY = jax.checkpoint_policies.everything_saveable
BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str, str, str]] = {
    "config": ({"config": FIELDS}, TypeError, "config", "a dict", "a Qwen3MoeConfig"),
    "dtype": ({"dtype": jnp.float16}, TypeError, "dtype", "float16", "one of"),
    "attention": ({"attention": "flash"}, ValueError, "attention", "'flash'", "'xla', 'cudnn'"),
    "cudnn": ({"attention": "cudnn"}, ValueError, "attention", "with float32", "dtype bfloat16"),
    "scan": ({"scan": 1}, TypeError, "scan", "1", "True or False"),
    "remat": ({"remat": None}, TypeError, "remat", "None", "True or False"),
    "policy": (
        {"remat": False, "remat_policy": POLICY},
        ValueError,
        "remat_policy",
        "with remat=False",
        "None",
    ),
    "rngs": ({"rngs": None}, TypeError, "rngs", "a NoneType", "a flax.nnx.Rngs"),
    "axes": ({"data_axes": ("data",)}, ValueError, "data_axes", "without", "beside"),
    "moe": ({"moe": "bf16"}, TypeError, "config", "str", "a MegaMoEConfig"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_arguments_of_the_model_are_refused_by_name(case: str) -> None:
    options, error, name, was, may_be = BAD_OPTIONS[case]
    with refusal(error, name, was, may_be):
        Qwen3Moe(**{"config": SMALL, "rngs": nnx.Rngs(0), **options})


@pytest.mark.parametrize(
    ("tokens", "segment_ids", "error", "name", "was"),
    [
        (np.zeros((2, 3), np.float32), None, TypeError, "tokens", "of dtype float32"),
        (np.zeros(3, int), None, ValueError, "tokens", r"of shape \(3,\)"),
        (np.zeros((2, 0), int), None, ValueError, "tokens", r"of shape \(2, 0\)"),
        ([[1, 2]], None, TypeError, "tokens", "a list"),
        (np.zeros((2, 3), int), np.zeros((1, 3), int), ValueError, "segment_ids", "of shape"),
        (np.zeros((2, 3), int), np.zeros((2, 3), bool), TypeError, "segment_ids", "of dtype bool"),
    ],
)
def test_tokens_are_refused_by_name(
    tokens: Any, segment_ids: Any, error: type[Exception], name: str, was: str
) -> None:
    model = nnx.eval_shape(lambda: Qwen3Moe(SMALL, rngs=nnx.Rngs(0)))
    with refusal(error, name, was, "."):
        model(tokens, segment_ids)
