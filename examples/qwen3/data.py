"""Packed text: documents as one array of tokens, and the rows of it that each step sees.

A document is its tokens and an end. Rows are cut from the array one behind the other, S + 1 tokens
with one shared, so they hold parts of several documents, which are told apart by segment ids. Which
rows a step sees depends on the seed and the step alone.
"""

import collections
import importlib
import itertools
import pathlib
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from lm.data import DataError, read_texts

BYTES = "bytes"
NUM_BYTES = 256
# What is held out where nobody says: this share, and at most so many tokens.
HELD_OUT_SHARE, HELD_OUT_MOST = 0.01, 2**20
DOCUMENTS_AT_A_TIME = 256


class Tokenizer(NamedTuple):
    """encode: texts -> ids of each; end: the id behind a document; size: of the vocabulary."""

    encode: Callable[[list[str]], list[list[int]]]
    end: int
    size: int


class Text(NamedTuple):
    """tokens: int32 [N], of documents that end with `end`; `source`: where they are from."""

    tokens: np.ndarray
    end: int
    source: str


def load_tokenizer(name: str) -> Tokenizer:
    """Bytes, or the tokenizer of a Hugging Face model by its name or folder.

    Raises:
      DataError: transformers is not installed, or has no such tokenizer, or that knows no end.
    """
    if name == BYTES:
        return Tokenizer(lambda texts: [[*t.encode()] for t in texts], NUM_BYTES, NUM_BYTES + 1)
    transformers = need_package("transformers", f"--tokenizer {name}")
    try:
        found = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(f"--tokenizer {name} cannot be loaded: {error}.") from error
    if found.eos_token_id is None:
        raise DataError(f"--tokenizer {name} has no token for the end of a text.")

    def encode(texts: list[str]) -> list[list[int]]:
        return found(texts, add_special_tokens=False, verbose=False)["input_ids"]

    return Tokenizer(encode, found.eos_token_id, len(found))


def need_package(name: str, what: str) -> Any:
    """An optional package; DataError that names it, and who needs it, where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"{what} needs the package {name}: pip install {name} ({error})."
        ) from error


def documents(data: str | None, dataset: str | None, field: str) -> tuple[Iterator[str], str]:
    """The texts of files (None: Python's standard library), or of a Hugging Face data set
    NAME[,CONFIG], split train, in the order of its rows; and where they are from.

    Raises:
      DataError: no such file, data set or field, or the package datasets is not installed.
    """
    if dataset is None:
        texts, source = read_texts(data)
        return (text.decode(errors="replace") for text in texts), source
    datasets = need_package("datasets", f"--dataset {dataset}")
    try:
        rows = datasets.load_dataset(*dataset.split(","), split="train", streaming=True)
        if field not in next(iter(rows)):
            raise DataError(f"--text-field {field} is no field of --dataset {dataset}.")
    except (OSError, ValueError, StopIteration) as error:
        raise DataError(f"--dataset {dataset} cannot be loaded: {error!r}.") from error
    return (row[field] for row in rows if row[field]), dataset


def load_text(
    texts: Iterable[str], source: str, tokenizer: Tokenizer, most: int, cache: pathlib.Path | None
) -> Text:
    """At most `most` tokens, of the cache where it is there, and else put there for the next run.

    cache: a .npy file, which is read as it is needed.

    Raises:
      DataError: the cache cannot be made, or is no array of the tokenizer's tokens.
    """
    if cache is None or not cache.is_file():
        tokens = np.fromiter(
            itertools.islice(_all_tokens(texts, tokenizer), most), np.int32, count=-1
        )
        if cache is None:
            return Text(tokens, tokenizer.end, source)
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            # Another name, for a run that is stopped here, and of each process its own.
            unfinished = cache.with_suffix(f".{uuid.uuid4().hex}.part.npy")
            np.save(unfinished, tokens)
            unfinished.replace(cache)
        except OSError as error:
            raise DataError(f"--tokens {cache} cannot be written: {error}.") from error
    return Text(_kept(cache, tokenizer), tokenizer.end, f"{source}, kept in {cache}")


def hold_out(text: Text, amount: float | None, seq: int) -> tuple[Text, Text | None]:
    """What is trained on, and the end of the text, which is not.

    amount: how many tokens, or which share of all where it is below 1, or 0; None: HELD_OUT_SHARE,
      but at least a sequence and at most HELD_OUT_MOST. The part begins with a document where one
      begins in the first half of these.

    Raises:
      DataError: a part has no sequence of S = `seq`, or nothing is predicted of what is held out.
    """
    total = len(text.tokens)
    if amount == 0:
        _check_length(text, seq)
        return text, None
    if amount is None:
        count = min(max(int(HELD_OUT_SHARE * total), seq + 1), HELD_OUT_MOST)
    else:
        count = int(amount * total if amount < 1 else amount)
    if min(count, total - count) <= seq:
        raise DataError(
            f"too little text in {text.source}: {total} tokens, of which {count} are held out, but"
            f" a sequence of either part needs {seq + 1}. Give more text, or another --held-out, or"
            " lower --seq."
        )
    first = total - count
    ends = np.flatnonzero(text.tokens[first - 1 : first - 1 + count // 2] == text.end)
    first += int(ends[0]) if ends.size else 0
    if np.all(text.tokens[first:-1] == text.end):
        raise DataError(
            f"the last {total - first} tokens of {text.source} are ends of documents without any"
            " text, of which there is no loss. Give another text, or another --held-out."
        )
    return text._replace(tokens=text.tokens[:first]), text._replace(tokens=text.tokens[first:])


def held_out_batches(text: Text, batch: int, seq: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All of a text in its order: rows int32 [batch, seq + 1], and their segment ids, which are 0
    behind its end."""
    starts = range(0, len(text.tokens) - 1, seq)
    for of_batch in itertools.batched(starts, batch):
        rows = np.zeros((batch, seq + 1), np.int32)
        is_text = np.zeros(rows.shape, np.bool_)
        for place, start in enumerate(of_batch):
            row = text.tokens[start : start + seq + 1]
            rows[place, : len(row)] = row
            is_text[place, : len(row)] = True
        yield rows, np.where(is_text, segment_ids(rows, text.end), 0)


def rows_of_step(text: Text, seed: int, step: int, batch: int, seq: int) -> np.ndarray:
    """The rows of a step, counted from 1: int32 [batch, seq + 1], made anew at each call.

    Each pass over the text has all its rows once, in an order of its own.

    Raises:
      DataError: the text is shorter than a row.
    """
    _check_length(text, seq)
    num_rows = (len(text.tokens) - 1) // seq
    first = (step - 1) * batch
    passes = range(first // num_rows, (first + batch - 1) // num_rows + 1)
    order = np.concatenate([_order(seed, number, num_rows) for number in passes])
    begin = first - passes[0] * num_rows
    starts = order[begin : begin + batch] * seq
    return np.stack([text.tokens[start : start + seq + 1] for start in starts]).astype(np.int32)


def segment_ids(rows: np.ndarray, end: int) -> np.ndarray:
    """int32 [batch, seq + 1]: 1 for the document that a row begins with, then 2, and so on."""
    is_first = np.zeros(rows.shape, np.int32)
    is_first[:, 1:] = rows[:, :-1] == end
    return 1 + np.cumsum(is_first, axis=1, dtype=np.int32)


def prefetch[T](make: Callable[[int], T], steps: range, ahead: int = 2) -> Generator[T]:
    """make(step) of each step in order, made by a thread while the steps before it run."""
    waiting: collections.deque[Any] = collections.deque()
    left = iter(steps)
    with ThreadPoolExecutor(1, "prefetch") as pool:
        try:
            for step in itertools.islice(left, ahead):
                waiting.append(pool.submit(make, step))
            while waiting:
                ready = waiting.popleft().result()
                for step in itertools.islice(left, 1):
                    waiting.append(pool.submit(make, step))
                yield ready
        finally:
            pool.shutdown(cancel_futures=True)


def _check_length(text: Text, seq: int) -> None:
    """Raises DataError for a text that is shorter than a row."""
    if len(text.tokens) <= seq:
        raise DataError(
            f"too little text in {text.source}: {len(text.tokens)} tokens, but a sequence needs"
            f" {seq + 1}. Give more text, or lower --seq."
        )


def _kept(cache: pathlib.Path, tokenizer: Tokenizer) -> np.ndarray:
    try:
        tokens = np.load(cache, mmap_mode="r")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"--tokens {cache} cannot be read: {error}.") from error
    if not isinstance(tokens, np.ndarray):  # an archive, whatever its name ends in
        tokens.close()
        raise DataError(f"--tokens {cache} holds several arrays, and not integers [N].")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(
            f"--tokens {cache} holds {tokens.dtype} {tokens.shape}, and not integers [N]."
        )
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < tokenizer.size:
        raise DataError(
            f"--tokens {cache} holds {tokens.min()} to {tokens.max()}, but those of --tokenizer"
            f" are 0 to {tokenizer.size - 1}. Give another file for another tokenizer."
        )
    return tokens


def _all_tokens(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[int]:
    for part in itertools.batched(texts, DOCUMENTS_AT_A_TIME):
        for ids in tokenizer.encode(list(part)):
            yield from ids
            yield tokenizer.end


def _order(seed: int, number: int, num_rows: int) -> np.ndarray:
    """Of pass `number` over the text."""
    return np.random.default_rng((seed, number)).permutation(num_rows)
