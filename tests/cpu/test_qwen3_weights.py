"""Checkpoints of Qwen3-MoE: in, out again, bit for bit, and refused by name; and their files."""

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_megamoe.models import qwen3_weights, safetensors
from jax_megamoe.models.qwen3_moe import Qwen3Moe, from_hugging_face
from jax_megamoe.models.qwen3_weights import (
    export_weights,
    first_layers,
    load_weights,
    tensor_names,
)
from tests.golden import qwen3_tensors
from tests.qwen3_golden import make_model
from tests.refusals import refusal

BF16 = jnp.dtype(jnp.bfloat16)
QUERY = "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.1.mlp.experts.3.up_proj.weight"
NORM = "model.norm.weight"


def abstract(name: str = "published") -> Qwen3Moe:
    config = from_hugging_face(qwen3_tensors.CASES[name])
    return nnx.eval_shape(lambda: Qwen3Moe(config, rngs=nnx.Rngs(0)))


def assert_same(found: Any, expected: Any) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("name", qwen3_tensors.CASES)
def test_comes_out_as_it_went_in(name: str) -> None:
    expected = qwen3_tensors.tensors(name)
    assert tensor_names(from_hugging_face(qwen3_tensors.CASES[name])) == set(expected)
    assert_same(export_weights(make_model(name)), expected)


def test_bfloat16_comes_out_as_it_went_in() -> None:
    model = abstract()
    expected = {n: a.astype(BF16) for n, a in qwen3_tensors.tensors("published").items()}
    load_weights(model, expected)
    assert model.embedding[...].dtype == jnp.float32
    assert_same(export_weights(model, dtype=jnp.bfloat16), expected)


def test_takes_arrays_of_jax_and_gives_what_a_file_takes(tmp_path: Path) -> None:
    expected = qwen3_tensors.tensors("published")
    model = abstract()
    load_weights(model, {name: jnp.asarray(a) for name, a in expected.items()})
    safetensors.write(tmp_path, export_weights(model), shard_bytes=40_000)
    found = safetensors.read(tmp_path)
    assert_same(found, expected)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    again = abstract()
    load_weights(again, found)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (again, model)), strict=True):
        np.testing.assert_array_equal(a, b)


def aligned(a: np.ndarray) -> np.ndarray:
    """A copy that lies as JAX takes it for its own on a CPU."""
    memory = np.zeros(a.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + a.nbytes].view(a.dtype).reshape(a.shape)
    copy[...] = a
    return copy


def test_parameters_are_not_the_memory_of_the_tensors() -> None:
    tensors = {name: aligned(a) for name, a in qwen3_tensors.tensors("published").items()}
    model = abstract()
    load_weights(model, tensors)
    for a in tensors.values():
        a[...] = 0
    assert_same(export_weights(model), qwen3_tensors.tensors("published"))


class CountingNumpy:
    """NumPy, which counts what it takes from devices."""

    def __init__(self) -> None:
        self.num_taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def asarray(self, a: Any) -> np.ndarray:
        self.num_taken += 1
        return np.asarray(a)


def test_a_parameter_of_a_layer_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = export_weights(make_model("published"))
    counting = CountingNumpy()
    monkeypatch.setattr(qwen3_weights, "np", counting)
    for name in exported:
        assert isinstance(exported[name], np.ndarray)
    # Three of the model; of either layer eight beside the experts, the router and three of these.
    assert counting.num_taken == 3 + 2 * (8 + 4)


def test_a_drawn_model_is_filled_where_it_is() -> None:
    config = from_hugging_face(qwen3_tensors.CASES["published"])
    model = nnx.jit(lambda: Qwen3Moe(config, dtype=BF16, rngs=nnx.Rngs(0)))()
    load_weights(model, qwen3_tensors.tensors("published"))
    assert_same(export_weights(model), qwen3_tensors.tensors("published"))


class Asked(dict[str, Any]):
    """Tensors, and how often each was asked for."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__(tensors)
        self.times = collections.Counter[str]()

    def __getitem__(self, name: str) -> Any:
        self.times[name] += 1
        return super().__getitem__(name)


def test_each_device_reads_its_own_part() -> None:
    """An expert lies on one of four devices; of what they share each reads its rows."""
    tensors = Asked(qwen3_tensors.tensors("published"))
    config = from_hugging_face(qwen3_tensors.CASES["published"])
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 4), ("fsdp", "expert"), axis_types=auto, devices=jax.devices()[:4])
    axes = {"expert_axis": "expert", "data_axes": ("fsdp",), "fsdp_axes": ("fsdp",)}
    with jax.set_mesh(mesh):
        make = lambda: Qwen3Moe(config, **axes, rngs=nnx.Rngs(0))  # noqa: E731
        model = nnx.merge(*nnx.get_abstract_model(make, mesh))
        load_weights(model, tensors)
    assert tensors.times[UP] == 1 and tensors.times[QUERY] == 4
    for a in (model.runs[0].mlp.w_up[...], model.runs[0].attention.query[...]):
        assert {4 * shard.data.size for shard in a.addressable_shards} == {a.size}
    assert_same(export_weights(model), qwen3_tensors.tensors("published"))


def test_the_first_layers_of_a_checkpoint() -> None:
    expected = qwen3_tensors.tensors("published")
    found = first_layers(expected, 1)
    config = dataclasses.replace(
        from_hugging_face(qwen3_tensors.CASES["published"]), num_hidden_layers=1
    )
    assert set(found) == tensor_names(config) and all(found[n] is expected[n] for n in found)
    assert set(first_layers(expected, 2)) == set(expected)


def changed(**tensors: Any) -> dict[str, Any]:
    """The checkpoint with these tensors; without those that are None."""
    all_of_them = qwen3_tensors.tensors("published") | tensors
    return {name: a for name, a in all_of_them.items() if a is not None}


@pytest.mark.parametrize(
    ("tensors", "error", "name", "was", "may_be"),
    [
        ({QUERY: None}, ValueError, QUERY, "missing among 116 tensors", "there"),
        ({UP: None}, ValueError, UP, "missing", "there"),
        ({"lm_head.weight": None}, ValueError, "lm_head.weight", "missing", "there"),
        ({"model.extra": np.zeros(1)}, ValueError, "model.extra", "given", "left out"),
        (
            {UP.replace(".3.", ".16."): np.zeros((24, 32))},
            ValueError,
            UP.replace(".3.", ".16."),
            "given",
            "left out",
        ),
        (
            {QUERY: np.zeros((32, 64), np.float32)},
            ValueError,
            QUERY,
            r"of shape \(32, 64\)",
            r"of shape \(64, 32\)",
        ),
        (
            {UP: np.zeros((32, 24), np.float32)},
            ValueError,
            UP,
            r"of shape \(32, 24\)",
            r"of shape \(24, 32\)",
        ),
        ({NORM: np.ones(32)}, TypeError, NORM, "of dtype float64", "float32, bfloat16"),
        ({NORM: [1.0] * 32}, TypeError, NORM, "a list", "a numpy.ndarray"),
    ],
)
def test_tensors_are_refused_by_name(
    tensors: Any, error: Any, name: str, was: str, may_be: str
) -> None:
    with refusal(error, name, was, may_be):
        load_weights(abstract(), changed(**tensors))


def test_arguments_are_refused_by_name() -> None:
    with refusal(TypeError, "model", "a dict", "a Qwen3Moe"):
        load_weights({}, {})  # pyright: ignore[reportArgumentType]
    with refusal(TypeError, "tensors", "a list", "a mapping"):
        load_weights(abstract(), [])  # pyright: ignore[reportArgumentType]
    with refusal(TypeError, "dtype", "int8", "one of"):
        export_weights(abstract(), dtype=jnp.int8)


def test_one_file_and_many_hold_the_same(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal(7).astype(BF16),
        "scalar": np.array(3, np.int64),
        "nothing": np.zeros((0, 2), np.float16),
        "flags": np.array([True, False]),
        "transposed": rng.standard_normal((4, 6)).astype(np.float32).T,
    }
    safetensors.write(tmp_path / "one", tensors)
    safetensors.write(tmp_path / "many", tensors, shard_bytes=1)
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in tensors.values())
    for source in ("one", "one/model.safetensors", "many"):
        assert_same(safetensors.read(tmp_path / source), tensors)
    assert not safetensors.read(tmp_path / "one")["a"].flags.writeable


def test_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    safetensors.write(tmp_path, {"a": np.zeros(1)})
    with refusal(FileExistsError, "folder", "model.safetensors", "without a checkpoint"):
        safetensors.write(tmp_path, {"a": np.ones(1)})
    assert safetensors.read(tmp_path)["a"] == 0


@pytest.mark.parametrize(
    ("options", "error", "name", "was", "may_be"),
    [
        ({"tensors": {}}, ValueError, "tensors", "empty", "at least one array"),
        ({"tensors": [1]}, TypeError, "tensors", "a list", "a mapping"),
        ({"tensors": {"a": 1}}, TypeError, "a", "a int", "a jax.Array or a numpy.ndarray"),
        ({"tensors": {"a": np.zeros(1, complex)}}, TypeError, "a", "complex128", "float32"),
        ({"shard_bytes": 0}, ValueError, "shard_bytes", "0", r"in 1\.\."),
    ],
)
def test_what_is_written_is_refused_by_name(
    tmp_path: Path, options: Any, error: Any, name: str, was: str, may_be: str
) -> None:
    with refusal(error, name, was, may_be):
        safetensors.write(**{"folder": tmp_path, "tensors": {"a": np.zeros(1)}, **options})
    assert not list(tmp_path.glob("*.safetensors"))


def file_with(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        (2**40).to_bytes(8, "little") + b"{}",
        file_with(b"{no json"),
        file_with([]),
        file_with({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"),
        file_with({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        file_with({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"1234"),
        file_with({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        file_with({"a": {"dtype": "F32", "shape": [1]}}, b"1234"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: was"):
        safetensors.read(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": "../model"}}']
)
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: was no index"):
        safetensors.read(tmp_path)


def test_an_index_that_lies_is_named(tmp_path: Path) -> None:
    safetensors.write(tmp_path, {"a": np.zeros(1), "b": np.zeros(1)}, shard_bytes=8)
    index = tmp_path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["c"] = listed["weight_map"].pop("b")
    index.write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=r"00002.*'b' in one of them alone"):
        safetensors.read(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="00002"):
        safetensors.read(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        safetensors.read(tmp_path / "elsewhere")
