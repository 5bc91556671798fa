"""Weights of other layouts: independent formulas on one side, the op on the other."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_megamoe import MegaMoEConfig, layouts, mega_moe, presets
from jax_megamoe.layouts import Layout, Stored
from jax_megamoe.nnx import MegaMoE
from jax_megamoe.weights import Computed, export_weights, import_weights, tensor_names
from tests import foreign, refusals
from tests.foreign import FAMILIES, PREFIX, E, H, I, S

LAYOUTS = {
    "qwen3_moe": layouts.QWEN3_MOE,
    "qwen2_moe": layouts.QWEN2_MOE,
    "deepseek_v3": layouts.DEEPSEEK_V3,
    "mixtral": layouts.MIXTRAL,
    "transformers_stacked": layouts.TRANSFORMERS_STACKED,
    "gpt_oss": layouts.GPT_OSS,
    "maxtext": layouts.MAXTEXT,
    "megablocks": layouts.MEGABLOCKS,
    "up_first": Layout(
        w_up=Stored("{e}/up_gate", part="first"),
        w_gate=Stored("{e}/up_gate", part="second"),
        w_down=Stored("{e}/down"),
    ),
    "interleaved_rows": Layout(
        w_up=Stored("gu", transposed=True, flat=True, part="even"),
        w_gate=Stored("gu", transposed=True, flat=True, part="odd"),
        w_down=Stored("d", transposed=True, flat=True),
    ),
}
BF16 = np.dtype(jnp.bfloat16)


def sizes(family: str, hidden: int = H, inner: int = I) -> dict[str, Any]:
    shared = S if LAYOUTS[family].shared_w_gate is not None else 0
    return {
        "num_experts": E,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "shared_intermediate_size": shared,
        "prefix": PREFIX,
    }


def tensors_of(family: str, dtype: Any = np.float32, **sides: int) -> dict[str, Any]:
    return foreign.tensors(FAMILIES[family](**sides)[0], dtype)


def imported(family: str, tensors: Any = None) -> Computed:
    tensors = tensors_of(family) if tensors is None else tensors
    return import_weights(tensors, LAYOUTS[family], **sizes(family))


def test_every_family_has_a_layout_and_every_layout_a_family() -> None:
    published = [value for value in vars(layouts).values() if isinstance(value, Layout)]
    assert set(LAYOUTS) == set(FAMILIES)
    assert all(any(layout is one for one in LAYOUTS.values()) for layout in published)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inner", [I, H], ids=["oblong", "square"])
def test_the_op_gives_what_the_other_code_gives(family: str, inner: int) -> None:
    shapes, expert = FAMILIES[family](inner=inner)
    tensors = foreign.tensors(shapes)
    got = import_weights(tensors, LAYOUTS[family], **sizes(family, inner=inner))
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, H)).astype(np.float32)
    ids = np.stack([rng.permutation(E)[:2] for _ in x]).astype(np.int32)
    w = rng.random(ids.shape).astype(np.float32)
    right = [sum(w[t, k] * expert(tensors, x[t], ids[t, k]) for k in range(2)) for t in range(5)]
    weights = (got[name] for name in ("w_gate", "w_up", "w_down"))
    options: dict[str, Any] = {name: got[name] for name in got if name.startswith("b_")}
    if family == "gpt_oss":
        assert len(options) == 3
        options["activation"] = presets.GPT_OSS_ACTIVATION
    found = mega_moe(x, ids, w, *weights, precision="float32", backend="reference", **options)
    np.testing.assert_allclose(np.asarray(found), right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("qwen3_moe", "gate.weight", "linear"),
        ("mixtral", "gate.weight", "linear"),
        ("gpt_oss", "router.weight", "linear"),
        ("megablocks", "router.layer.weight", "linear"),
        ("maxtext", "gate/kernel", "kernel"),
    ],
)
def test_router(family: str, name: str, kind: str) -> None:
    tensors = tensors_of(family)
    x = np.random.default_rng(1).standard_normal(H).astype(np.float32)
    weight = tensors[PREFIX + name]
    right = weight @ x if kind == "linear" else np.einsum("h,he->e", x, weight)
    np.testing.assert_allclose(x @ imported(family, tensors)["router"], right, rtol=1e-5)


def test_a_layer_of_gpt_oss() -> None:
    """The module with parameters of a checkpoint: router, biases, clamps; and all out again."""
    tensors = tensors_of("gpt_oss")
    config = MegaMoEConfig(precision="float32", activation=presets.GPT_OSS_ACTIVATION)
    options: dict[str, Any] = {"router_config": presets.GPT_OSS, "expert_bias": True}
    layer = MegaMoE(H, I, E, 2, config=config, **options, rngs=nnx.Rngs(0))
    for name, value in imported("gpt_oss", tensors).items():
        getattr(layer, name)[...] = jnp.asarray(value)
    x = 4 * np.random.default_rng(1).standard_normal((20, H)).astype(np.float32)
    gate_up = np.einsum("th,ehi->tei", x, tensors[PREFIX + "experts.gate_up_proj"])
    assert np.mean(gate_up > 7) > 0.1 and np.mean(gate_up < -7) > 0.1
    right = np.zeros_like(x)
    expert = FAMILIES["gpt_oss"]()[1]
    logits = x @ tensors[PREFIX + "router.weight"].T + tensors[PREFIX + "router.bias"]
    for t, chosen in enumerate(np.argsort(-logits, axis=1)[:, :2]):
        weights = np.exp(logits[t, chosen]) / np.exp(logits[t, chosen]).sum()
        right[t] = sum(w * expert(tensors, x[t], e) for w, e in zip(weights, chosen, strict=True))
    np.testing.assert_allclose(layer(jnp.asarray(x))[0], right, rtol=1e-4, atol=1e-4)
    mine = {name: value[...] for name, value in nnx.to_pure_dict(nnx.state(layer)).items()}
    back = export_weights(mine, layouts.GPT_OSS, **sizes("gpt_oss"))
    assert set(back) == set(tensors)
    for name, a in tensors.items():
        np.testing.assert_array_equal(back[name], a)


def test_router_bias_of_gpt_oss() -> None:
    tensors = tensors_of("gpt_oss")
    found = imported("gpt_oss", tensors)["router_bias"]
    np.testing.assert_array_equal(found, tensors[PREFIX + "router.bias"])


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
def test_shared_experts_and_what_balances(family: str) -> None:
    tensors = tensors_of(family)
    got = imported(family, tensors)
    name = "shared_experts" if family == "deepseek_v3" else "shared_expert"
    x = np.random.default_rng(1).standard_normal(H).astype(np.float32)
    gate, up, down = (tensors[f"{PREFIX}{name}.{n}_proj.weight"] for n in ("gate", "up", "down"))
    right = down @ (foreign.silu(gate @ x) * (up @ x))
    found = foreign.silu(x @ got["shared_w_gate"]) * (x @ got["shared_w_up"])
    np.testing.assert_allclose(found @ got["shared_w_down"], right, rtol=1e-4, atol=1e-5)
    if family == "deepseek_v3":
        bias = tensors[PREFIX + "gate.e_score_correction_bias"]
        np.testing.assert_array_equal(got["selection_bias"], bias)
    else:
        right = tensors[PREFIX + "shared_expert_gate.weight"] @ x
        np.testing.assert_allclose(x @ got["shared_router"], right, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trips_are_bitwise(family: str, library: Any, dtype: np.dtype) -> None:
    tensors = {n: library.asarray(a) for n, a in tensors_of(family, dtype).items()}
    got = imported(family, tensors)
    back = export_weights(dict(got), LAYOUTS[family], **sizes(family))
    assert (
        set(back)
        == set(tensors)
        == tensor_names(
            LAYOUTS[family],
            num_experts=E,
            shared_intermediate_size=sizes(family)["shared_intermediate_size"],
            prefix=PREFIX,
        )
    )
    again = import_weights(back, LAYOUTS[family], **sizes(family))
    kind = np.ndarray if library is np else jax.Array
    for first, second in ((tensors, back), (got, again)):
        assert len(first) == len(second)
        for name, a in second.items():
            assert isinstance(a, kind) and a.dtype == dtype and a.shape == first[name].shape
            assert np.asarray(a).tobytes() == np.asarray(first[name]).tobytes()
    assert all(np.asarray(a).flags.c_contiguous for a in back.values())


class Recorded(Mapping[str, Any]):
    """A mapping that loads on access, as files do."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        self.held = held
        self.loaded: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.loaded.append(name.removeprefix(PREFIX))
        return self.held[name]

    def __contains__(self, name: object) -> bool:
        return name in self.held

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def test_only_what_is_taken_is_loaded() -> None:
    file = Recorded(tensors_of("qwen3_moe"))
    got = imported("qwen3_moe", file)
    assert list(got) == ["w_gate", "w_up", "w_down", "router"] and file.loaded == []
    got["w_up"]
    assert file.loaded == [f"experts.{e}.up_proj.weight" for e in range(E)]
    held = Recorded(dict(got))
    back = export_weights(held, LAYOUTS["qwen3_moe"], **sizes("qwen3_moe"))
    assert held.loaded == []
    back[f"{PREFIX}experts.2.down_proj.weight"]
    assert held.loaded == ["w_down"]


def test_an_unfused_tensor_of_numpy_is_no_copy() -> None:
    tensors = tensors_of("transformers_stacked")
    got = imported("transformers_stacked", tensors)
    stored = tensors[PREFIX + "experts.gate_up_proj"]
    assert np.shares_memory(got["w_gate"], stored) and np.shares_memory(got["w_up"], stored)


def test_under_jit() -> None:
    tensors = {n: jnp.asarray(a) for n, a in tensors_of("gpt_oss").items()}
    found = jax.jit(lambda t: dict(imported("gpt_oss", t)))(tensors)
    for name, a in imported("gpt_oss", tensors).items():
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(a))


def test_into_a_module_and_out_again() -> None:
    layer = MegaMoE(H, I, E, 2, rngs=nnx.Rngs(0))
    tensors = tensors_of("mixtral")
    for name, value in imported("mixtral", tensors).items():
        getattr(layer, name)[...] = jnp.asarray(value)
    parameters = {name: getattr(layer, name)[...] for name in imported("mixtral", tensors)}
    back = export_weights(parameters, layouts.MIXTRAL, **sizes("mixtral"))
    for name, a in tensors.items():
        np.testing.assert_array_equal(np.asarray(back[name]), a)


def changed(family: str, name: str, value: Any) -> dict[str, Any]:
    tensors = tensors_of(family)
    if value is None:
        del tensors[PREFIX + name]
    else:
        tensors[PREFIX + name] = value
    return tensors


@pytest.mark.parametrize(
    ("family", "name", "value", "message"),
    [
        (
            "mixtral",
            "experts.3.w2.weight",
            None,
            r"3\.w2\.weight: was missing, among 'm.* and 8 m",
        ),
        ("mixtral", "gate.weight", None, r"mlp\.gate\.weight: was missing"),
        (
            "mixtral",
            "experts.4.w1.weight",
            np.ones(1),
            r"4\.w1\.weight: was there; .*experts = 4",
        ),
        (
            "mixtral",
            "experts.1.w1.weight",
            np.ones((H, I), np.float32),
            r"experts\.1\.w1\.weight: was of shape \(6, 10\); it may be of shape \(10, 6\)",
        ),
        (
            "mixtral",
            "experts.1.w1.weight",
            np.ones((I, H), BF16),
            r"experts\.1\.w1\.weight: was of dtype bfloat16; .*experts\.0\.w1\.weight's dtype f",
        ),
        ("maxtext", "wo", np.ones((E, H, I)), r"wo: was of shape \(4, 6, 10\); .* \(4, 10, 6\)"),
        ("gpt_oss", "router.bias", np.ones((E, 1)), r"router\.bias: was of shape \(4, 1\)"),
        ("gpt_oss", "experts.gate_up_proj", np.ones((E, H, I)), r"may be of shape \(4, 6, 20\)"),
        ("megablocks", "experts.mlp.v1", np.ones((E, I, H)), r"may be of shape \(40, 6\)"),
    ],
)
def test_tensors_that_do_not_fit(family: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dict(imported(family, changed(family, name, value)))


def test_jax_arrays_of_two_dtypes_are_not_promoted() -> None:
    tensors = {n: jnp.asarray(a) for n, a in tensors_of("mixtral").items()}
    name = f"{PREFIX}experts.1.w1.weight"
    tensors[name] = tensors[name].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match=r"experts\.1\.w1\.weight: was of dtype bfloat16"):
        imported("mixtral", tensors)["w_gate"]


def test_what_is_no_array() -> None:
    tensors = changed("maxtext", "wo", [[1.0]])
    with pytest.raises(TypeError, match=r"mlp\.wo: was a list; it may be a jax.Array or a numpy"):
        imported("maxtext", tensors)["w_down"]


def test_parameters_that_do_not_fit() -> None:
    family = "gpt_oss"
    right = dict(imported(family))

    def export(**changes: Any) -> dict[str, Any]:
        parameters = {n: a for n, a in (right | changes).items() if a is not None}
        return dict(export_weights(parameters, LAYOUTS[family], **sizes(family)))

    with pytest.raises(ValueError, match="b_up: was missing, among 'w_gate'"):
        export(b_up=None)
    with pytest.raises(ValueError, match="selection_bias: was given; it may be left out"):
        export(selection_bias=right["router_bias"])
    with pytest.raises(ValueError, match=r"w_up: was of shape \(4, 10, 6\); .* \(4, 6, 10\)"):
        export(w_up=right["w_down"])
    with pytest.raises(ValueError, match="w_up: was of dtype bfloat16; it may be of w_gate's"):
        export(w_up=right["w_up"].astype(BF16))


@pytest.mark.parametrize(
    ("changes", "error", "was", "may_be"),
    [
        ({"num_experts": 0}, ValueError, "0", "in 1..512"),
        ({"hidden_size": 6.0}, TypeError, "6.0", "an int"),
        ({"intermediate_size": 0}, ValueError, "0", "in 1"),
        ({"shared_intermediate_size": -1}, ValueError, "-1", "in 0"),
        ({"shared_intermediate_size": 8}, ValueError, "8", "0: the layout has no shared experts"),
        ({"prefix": None}, TypeError, "a NoneType", "a str"),
        ({"layout": "mixtral"}, TypeError, "a str", "a jax_megamoe.layouts.Layout"),
        ({"tensors": [1]}, TypeError, "a list", "a mapping"),
    ],
)
def test_bad_arguments(
    changes: dict[str, Any], error: type[Exception], was: str, may_be: str
) -> None:
    arguments = {"tensors": {}, "layout": layouts.MIXTRAL} | sizes("mixtral") | changes
    with refusals.refusal(error, next(iter(changes)), was, may_be):
        import_weights(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"router": Stored("r", part="third")}, ValueError, "router.part: was 'third'; it may be"),
        ({"router": Stored("experts.{e}.r")}, ValueError, "without {e}: no parameter of an expert"),
        ({"router": Stored("r", flat=True)}, ValueError, "router.flat: was True; it may be False"),
        ({"router_bias": Stored("r", transposed=True)}, ValueError, "it is a vector"),
        ({"w_up": Stored("{e}.u", flat=True)}, ValueError, "flat, one tensor holds all experts"),
        ({"w_up": Stored("g")}, ValueError, "w_gate: was .* with w_up as .*; it may be alone"),
        ({"w_up": Stored("u", part="first")}, ValueError, "with nothing else; it may be with one"),
        (
            {"w_gate": Stored("g", part="first"), "w_up": Stored("g", part="even")},
            ValueError,
            "part='even'",
        ),
        (
            {
                "w_gate": Stored("g", part="first"),
                "w_up": Stored("g", part="second", transposed=True),
            },
            ValueError,
            "transposed=True",
        ),
    ],
)
def test_layouts_that_make_no_sense(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    plain = Layout(w_gate=Stored("g"), w_up=Stored("u"), w_down=Stored("d"))
    with pytest.raises(error, match=message):
        dataclasses.replace(plain, **changes)
