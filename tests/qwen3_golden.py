"""What `tests/golden/make_qwen3_golden.py` writes, and how `Qwen3Moe` is held to it."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_megamoe import _layer
from jax_megamoe.models.qwen3_moe import Qwen3Moe, from_hugging_face
from jax_megamoe.models.qwen3_weights import load_weights
from jax_megamoe.router import Routing, route
from tests.golden import qwen3_tensors

MAKER = Path(__file__).parent / "golden" / "make_qwen3_golden.py"
GOLDEN = MAKER.with_name("qwen3.npz")
# Of logits of the size of 1, float32 in another order of summation.
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """One model of transformers: the fields of its Hugging Face config, its arrays by name."""

    name: str
    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]


def read(path: Path) -> tuple[dict[str, str], dict[str, Case]]:
    """The versions that made a file, and its cases by name."""
    with np.load(path) as file:
        about = json.loads(str(file["about"]))
        arrays = dict(file)
    cases = {}
    for name, fields in about["configs"].items():
        own = {k.removeprefix(f"{name}/"): a for k, a in arrays.items() if k.startswith(f"{name}/")}
        cases[name] = Case(name, fields, own)
    return about["versions"], cases


def make_model(name: str, fields: dict[str, Any] | None = None, **options: Any) -> Qwen3Moe:
    """The model of a case with its weights; fields: of another config than the case's own."""
    config = from_hugging_face(fields or qwen3_tensors.CASES[name])
    model = nnx.eval_shape(lambda: Qwen3Moe(config, **options, rngs=nnx.Rngs(0)))
    load_weights(model, qwen3_tensors.tensors(name))
    return model


def apply(
    model: Qwen3Moe, tokens: jax.Array, segment_ids: jax.Array
) -> tuple[jax.Array, list[Routing]]:
    """Logits, and what the router of each layer decided, of a model of which nothing is scanned
    nor rematerialised, so that all of it is in one trace."""
    routed = []

    def recorded(*args: Any, **options: Any) -> Routing:
        routed.append(route(*args, **options))
        return routed[-1]

    with mock.patch.object(_layer, "route", recorded):
        return model(tokens, segment_ids)[0], routed


def check(case: Case) -> None:
    """Asserts that the model chooses the same experts, and gives the same logits, for each token
    that is no padding."""
    model = make_model(case.name, case.fields, scan=False, remat=False)
    tokens, is_real = qwen3_tensors.batch(case.name)
    segment_ids = jnp.asarray(is_real, jnp.int32)
    logits, routed = nnx.jit(apply)(model, jnp.asarray(tokens), segment_ids)
    expert_idx, expert_weight = (
        np.stack([np.asarray(getattr(r, name)) for r in routed])[:, is_real]
        for name in ("expert_idx", "expert_weight")
    )
    np.testing.assert_array_equal(expert_idx, case.arrays["expert_idx"][:, is_real])
    expected = case.arrays["expert_weight"][:, is_real]
    np.testing.assert_allclose(expert_weight, expected, rtol=0, atol=TOLERANCE)
    expected = case.arrays["logits"][is_real]
    np.testing.assert_allclose(np.asarray(logits)[is_real], expected, rtol=0, atol=TOLERANCE)
