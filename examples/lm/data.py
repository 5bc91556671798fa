"""Byte-level text: which files, which of them are held out, and which bytes each step sees."""

import pathlib
import sysconfig
from typing import NamedTuple

import numpy as np

HELD_OUT_SHARE = 0.05
SPLIT_SEED = 0
SKIPPED_IN_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib"})


class DataError(Exception):
    """The text is missing or too short; the message says what to do."""


class Corpus(NamedTuple):
    """The bytes of both splits, uint8 [N], and what they came from."""

    train: np.ndarray
    held_out: np.ndarray
    source: str


def load_corpus(path: str | None, min_bytes: int) -> Corpus:
    """Reads a text and holds out 5 % of its bytes, whole files at a time.

    Args:
      path: a file, a directory (its text files, hidden and binary ones left out), or None for the
        source files of Python's standard library. A single file is split at 95 % of its length.
      min_bytes: the least that each split must hold.

    Raises:
      DataError: the path does not exist, or a split is shorter than `min_bytes`.
    """
    texts, source = read_texts(path)
    if len(texts) == 1:
        cut = int(len(texts[0]) * (1 - HELD_OUT_SHARE))
        train, held_out = texts[0][:cut], texts[0][cut:]
    else:
        train, held_out = _split_by_file(texts)
    for name, split in (("training", train), ("held-out", held_out)):
        if len(split) < min_bytes:
            raise DataError(
                f"too little text in {source}: the {name} part has {len(split)} bytes, but one"
                f" batch needs {min_bytes}. Give more text with --data, or lower --seq. (Binary and"
                " hidden files are left out.)"
            )
    count = "1 file" if len(texts) == 1 else f"{len(texts)} files"
    return Corpus(_as_array(train), _as_array(held_out), f"{source} ({count})")


def read_texts(path: str | None) -> tuple[list[bytes], str]:
    """The texts of a file, of a directory or, with None, of Python's standard library, and a name
    for where they come from; hidden, binary and empty files are left out.

    Raises:
      DataError: the path does not exist.
    """
    files = _stdlib_files() if path is None else _files_below(pathlib.Path(path))
    texts = [text for text in map(_read_text, files) if text]
    return texts, "the standard library of this Python" if path is None else path


def train_batch(corpus: Corpus, seed: int, step: int, batch: int, seq: int) -> np.ndarray:
    """The sequences of one step, int32 [batch, seq + 1]; depends on the arguments alone."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(corpus.train) - seq, size=batch)
    return _windows(corpus.train, starts, seq)


def held_out_batches(corpus: Corpus, num_batches: int, batch: int, seq: int) -> list[np.ndarray]:
    """The same evenly spaced held-out sequences at each call, int32 [batch, seq + 1] each."""
    starts = np.linspace(0, len(corpus.held_out) - seq - 1, num_batches * batch).astype(np.int64)
    windows = _windows(corpus.held_out, starts, seq)
    return list(windows.reshape(num_batches, batch, seq + 1))


def unigram_entropy(text: np.ndarray) -> float:
    """Entropy of the byte frequencies of uint8 `text`, in nats: the loss of the best model that
    knows how often each byte occurs and nothing else."""
    frequencies = np.bincount(text, minlength=256) / len(text)
    present = frequencies[frequencies > 0]
    return float(-np.sum(present * np.log(present)))


def _stdlib_files() -> list[pathlib.Path]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not SKIPPED_IN_STDLIB.intersection(path.relative_to(root).parts)
    )
    if not files:
        raise DataError(f"no *.py files in {root}; give a text with --data.")
    return files


def _files_below(path: pathlib.Path) -> list[pathlib.Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"--data {path}: no such file or directory.")
    return sorted(
        child
        for child in path.rglob("*")
        if child.is_file()
        and not any(part.startswith(".") for part in child.relative_to(path).parts)
    )


def _read_text(path: pathlib.Path) -> bytes:
    """The bytes of a file; none if they are not text, by the NUL that text does not hold."""
    content = path.read_bytes()
    return b"" if b"\0" in content else content


def _split_by_file(texts: list[bytes]) -> tuple[bytes, bytes]:
    target = HELD_OUT_SHARE * sum(map(len, texts))
    held_out: list[int] = []
    held_out_bytes = 0
    for i in np.random.default_rng(SPLIT_SEED).permutation(len(texts)):
        if held_out_bytes >= target:
            break
        held_out.append(int(i))
        held_out_bytes += len(texts[i])
    train = b"".join(text for i, text in enumerate(texts) if i not in held_out)
    return train, b"".join(texts[i] for i in sorted(held_out))


def _windows(text: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)


def _as_array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)
