"""Checkpoints in the safetensors format, read without a copy and written shard by shard.

The format (https://huggingface.co/docs/safetensors): 8 bytes, the length of the header, little
endian; the header, JSON of each tensor's dtype, shape and place behind it; the bytes of the
tensors. A checkpoint is one file, model.safetensors, or several, which
model.safetensors.index.json lists. The safetensors library (0.8) reads and writes bf16 as arrays of
a framework on its device, but not as NumPy's, and this package needs neither copy.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_megamoe.validation import check_array, check_size, refuse

SHARD_BYTES = 5 * 10**9
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Headers of the format are at most this long.
_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT_BYTES = 8
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, by name: read-only views of mapped files, whose bytes are read
    as they are used.

    Args:
      path: a .safetensors file, or a folder with model.safetensors or the index of several files.

    Raises:
      FileNotFoundError: there is none, or a file that the index lists is missing.
      ValueError: a file that is not of the format, is cut off or has a dtype that NumPy and JAX do
        not have, or files that have other tensors than the index lists.
    """
    path = pathlib.Path(path)
    if path.is_file():
        return _read_file(path)
    index = path / _INDEX
    if not index.exists():
        return _read_file(path / _SINGLE)
    file_of = _file_of(index)
    arrays: dict[str, np.ndarray] = {}
    for file in sorted(set(file_of.values())):
        found = _read_file(path / file)
        listed = {name for name, its_file in file_of.items() if its_file == file}
        if different := sorted(listed ^ set(found)):
            where = f"{different[0]!r} in one of them alone"
            refuse(ValueError, f"{file} and {_INDEX}", where, "with the same tensors")
        arrays |= found
    return arrays


def write(
    folder: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a checkpoint, which has its names once it is whole.

    Args:
      folder: made if it is not there; it may not have .safetensors files yet.
      tensors: numpy or jax arrays by name, in that order, each taken once; those of one file are
        in memory together.
      shard_bytes: of the tensors of a file, at most, unless a single one is larger.

    Raises:
      FileExistsError: a checkpoint lies in the folder.
      TypeError, ValueError: a tensor that is no array or of a dtype that the format does not have,
        no tensors, or another argument of another type or value.
    """
    folder = pathlib.Path(folder)
    check_size("shard_bytes", shard_bytes, 2**63 - 1)
    if not isinstance(tensors, Mapping):
        refuse(TypeError, "tensors", f"a {type(tensors).__name__}", "a mapping of arrays by name")
    if not tensors:
        refuse(ValueError, "tensors", "empty", "a mapping of at least one array")
    folder.mkdir(parents=True, exist_ok=True)
    if there := sorted(folder.glob("*.safetensors")):
        refuse(FileExistsError, "folder", f"one with {there[0].name}", "one without a checkpoint")
    shards: list[tuple[pathlib.Path, list[str]]] = []
    num_bytes = 0
    for arrays in _sharded(tensors, shard_bytes):
        part = folder / f"{len(shards) + 1}.part"
        _write_file(part, arrays)
        shards.append((part, list(arrays)))
        num_bytes += sum(a.nbytes for a in arrays.values())
    if len(shards) == 1:
        shards[0][0].rename(folder / _SINGLE)
        return
    file_of = {}
    for number, (part, names) in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        part.rename(folder / file)
        file_of |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _file_of(index: pathlib.Path) -> dict[str, str]:
    """The file of each tensor, beside the index."""
    try:
        file_of = json.loads(index.read_text())["weight_map"]
        if any(pathlib.Path(file).name != file for file in file_of.values()):
            raise ValueError("a file that is not beside it")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{index}: was no index that can be read: {error!r}") from error
    return file_of


def _sharded(tensors: Mapping[str, Any], shard_bytes: int) -> Iterable[dict[str, np.ndarray]]:
    held: dict[str, np.ndarray] = {}
    held_bytes = 0
    for name in tensors:
        value = tensors[name]
        check_array(name, value)
        if np.dtype(value.dtype) not in _NAMES:
            refuse(TypeError, name, f"of dtype {value.dtype}", f"of {', '.join(map(str, _NAMES))}")
        if held and held_bytes + value.nbytes > shard_bytes:
            yield held
            held, held_bytes = {}, 0
        held[name] = np.asarray(value)
        held_bytes += value.nbytes
    yield held


def _write_file(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
    # As transformers writes it, which refuses files that do not say of which framework they are.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, a in arrays.items():
        place = [end, end := end + a.nbytes]
        header[name] = {"dtype": _NAMES[a.dtype], "shape": list(a.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for a in arrays.values():
            file.write(np.ascontiguousarray(a).reshape(-1).view(np.uint8))


def _read_file(path: pathlib.Path) -> dict[str, np.ndarray]:
    if path.stat().st_size < 8:
        refuse(ValueError, str(path), f"of {path.stat().st_size} bytes", "a safetensors file")
    data = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > min(_MAX_HEADER_BYTES, data.size - 8):
        refuse(ValueError, str(path), f"with a header of {length} bytes", "a safetensors file")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        return {name: _view(data[8 + length :], **entry) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: was no safetensors file that can be read: {error!r}") from error


def _view(data: np.ndarray, dtype: str, shape: list[int], data_offsets: list[int]) -> np.ndarray:
    """One tensor; raises KeyError or ValueError for a dtype or a place that is not there."""
    start, end = data_offsets
    num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if not 0 <= start <= end <= data.size or end - start != num_bytes:
        raise ValueError(f"bytes {data_offsets} of {data.size} for {dtype} {shape}")
    return np.asarray(data[start:end]).view(_DTYPES[dtype]).reshape(shape)
