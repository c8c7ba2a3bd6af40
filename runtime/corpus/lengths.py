"""Sequence lengths of a user's own corpus: JSONL with text or token ids, text files, or a file of lengths."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from hgraph.errors import InvalidInput
from runtime.corpus.files import input_files, jsonl_documents, text_documents, token_sequences
from strategies.length_data import LengthData, known_lengths, read_lengths

__all__ = ["corpus_lengths"]

CHUNK = 256
ANY_ID = 2**62
"""A vocabulary large enough for any token id: only the number of tokens is of interest."""


def corpus_lengths(
    path: str, *, tokenizer: str = "bytes", text_field: str = "text", whole_files: bool = False, progress: bool = False
) -> tuple[LengthData, int]:
    """Returns (lengths, number of empty documents, which are left out) of what `path` names.

    `path`: a length file (`.json`) or the name of one that comes with this package; a `.jsonl` file with token ids
    under `tokens` or text under `text_field`; a text file or a folder of such, whose documents stand between blank
    lines or, with `whole_files`, are the files. `tokenizer`: `bytes`, `whitespace`, or a file for the `tokenizers`
    library.
    """
    if path in known_lengths() or path.endswith(".json"):
        return read_lengths(path), 0
    count = _counter(tokenizer)
    kind = _kind(path)
    if kind == "tokens":
        counts: Iterable[int] = (len(tokens) for tokens, _ in token_sequences([path], ANY_ID))
        how = "token ids as they are"
    else:
        texts = _texts(path, kind, text_field, whole_files)
        counts = _counted(texts, count, progress)
        how = f"tokenizer {Path(tokenizer).name}"
    lengths = np.fromiter(counts, dtype=np.int64)
    kept = lengths[lengths > 0]
    if not kept.size:
        raise InvalidInput(f"{path}: expected at least one document that is not empty, got {lengths.size} empty ones")
    return LengthData(kept, f"{path}; {how}"), int(lengths.size - kept.size)


def _kind(path: str) -> str:
    """Returns `tokens`, `jsonl` or `text`; JSONL is told by its first line."""
    if Path(path).is_dir():
        return "jsonl" if not _has_text(path) else "text"
    if not path.endswith(".jsonl"):
        return "text"
    file = input_files([path], "jsonl")[0]
    with file.open(encoding="utf-8", errors="replace") as stream:
        first = next((line for line in stream if line.strip()), "")
    try:
        value = json.loads(first)
    except json.JSONDecodeError:
        return "jsonl"  # which names the line that is wrong
    return "tokens" if isinstance(value, dict) and "tokens" in value else "jsonl"


def _has_text(folder: str) -> bool:
    return any(file.suffix in (".txt", ".md", ".text") for file in Path(folder).rglob("*"))


def _texts(path: str, kind: str, text_field: str, whole_files: bool) -> Sequence[str]:
    if kind == "jsonl":
        return jsonl_documents([path], text_field).texts
    if not whole_files:
        return text_documents([path]).texts
    texts = []
    for file in input_files([path], "text"):
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{file}: expected UTF-8, got another byte at position {error.start}") from None
    return texts


def _counter(tokenizer: str) -> Callable[[Sequence[str]], list[int]]:
    """Returns what counts the tokens of several texts."""
    if tokenizer == "bytes":
        return lambda texts: [len(text.encode("utf-8", "surrogatepass")) for text in texts]
    if tokenizer == "whitespace":
        return lambda texts: [len(text.split()) for text in texts]
    if not Path(tokenizer).is_file():
        raise InvalidInput(f"tokenizer {tokenizer!r}: expected bytes, whitespace or a tokenizer.json file, got neither")
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(tokenizer)
    except Exception as error:  # the library raises nothing narrower
        raise InvalidInput(f"{tokenizer}: expected a file of the tokenizers library, got: {error}") from None
    return lambda texts: [len(encoding.ids) for encoding in loaded.encode_batch_fast(list(texts))]


def _counted(texts: Sequence[str], count: Callable[[Sequence[str]], list[int]], progress: bool) -> Iterable[int]:
    with tqdm(total=len(texts), desc="counting tokens", unit="document", leave=False, disable=not progress) as bar:
        for begin in range(0, len(texts), CHUNK):
            chunk = texts[begin : begin + CHUNK]
            yield from count(chunk)
            bar.update(len(chunk))
