"""The user's own files as documents. Every fault of a file comes in one report, with line numbers (at most 20)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from hgraph.errors import FileErrors, InvalidInput, Problem
from runtime.corpus.config import Documents

__all__ = ["input_files", "jsonl_documents", "text_documents", "token_sequences"]

MAX_PROBLEMS = 20
SUFFIXES = {"jsonl": (".jsonl",), "tokens": (".jsonl",), "text": (".txt", ".md", ".text")}

Value = TypeVar("Value")
Line = tuple[int, str]
TokenRow = tuple[np.ndarray, np.ndarray | None]


class _Refused(Exception):
    """What is wrong with one line: the key and the message."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key
        self.message = message


def input_files(paths: Sequence[str | Path], kind: str) -> list[Path]:
    """Returns the files that `paths` name: a file itself, and of a folder all files below it with a suffix of the kind.

    Raises `InvalidInput` naming a path that is not there, a folder without such files, or an empty file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES[kind] and file.is_file())
            if not found:
                raise InvalidInput(f"{path}: expected files ending in {' or '.join(SUFFIXES[kind])}, found none")
            files.extend(found)
        elif path.is_file():
            files.append(path)
        else:
            raise InvalidInput(f"{path}: no such file or folder")
    for file in files:
        if not file.stat().st_size:
            raise InvalidInput(f"{file}: the file is empty; expected {kind} with at least one document")
    return files


def jsonl_documents(paths: Sequence[str | Path], text_field: str = "text") -> Documents:
    """Returns the texts of JSONL files: one object a line with a string under `text_field`; blank lines are skipped."""

    def text(line: Line) -> str:
        value = _object(line[1]).get(text_field)
        if not isinstance(value, str):
            raise _Refused(text_field, f"expected a string, got {_described(value)}")
        return value

    files = input_files(paths, "jsonl")
    found = [
        (f"{file}:{number}", value) for file in files for number, value in _checked(file, _filled_lines(file), text)
    ]
    return _documents(found, files)


def text_documents(paths: Sequence[str | Path]) -> Documents:
    """Returns the documents of text files (UTF-8): what stands between blank lines, line ends inside kept."""
    files = input_files(paths, "text")
    found = [(f"{file}:{number}", text) for file in files for number, text in _blocks(file)]
    return _documents(found, files)


def token_sequences(paths: Sequence[str | Path], vocab_size: int) -> list[TokenRow]:
    """Returns (tokens, labels or None) of each line `{"tokens": [...], "labels": [...]}`, int64 arrays.

    Labels are targets aligned to tokens, -100 for nothing. Ids outside `vocab_size` are refused by line.
    """

    def row(line: Line) -> TokenRow:
        value = _object(line[1])
        tokens = _id_array(value.get("tokens"), "tokens", vocab_size, ignored=False)
        if "labels" not in value:
            return tokens, None
        labels = _id_array(value["labels"], "labels", vocab_size, ignored=True)
        if labels.size != tokens.size:
            raise _Refused("labels", f"expected {tokens.size} targets, one per token, got {labels.size}")
        return tokens, labels

    files = input_files(paths, "tokens")
    rows = [value for file in files for _, value in _checked(file, _filled_lines(file), row)]
    if not rows:
        raise InvalidInput(f"{files[0]}: expected at least one document, found none")
    return rows


def _documents(found: Sequence[tuple[str, str]], files: Sequence[Path]) -> Documents:
    if not found:
        raise InvalidInput(f"{files[0]}: expected at least one document, found none")
    return Documents(tuple(name for name, _ in found), tuple(text for _, text in found), len(files))


def _checked(file: Path, lines: Iterator[Line], convert: Callable[[Line], Value]) -> list[tuple[int, Value]]:
    """Returns (line number, converted line) of every line, or raises all that was refused in one `FileErrors`."""
    values: list[tuple[int, Value]] = []
    problems: list[Problem] = []
    try:
        for line in lines:
            try:
                values.append((line[0], convert(line)))
            except _Refused as refused:
                problems.append(Problem(line[0], refused.key, refused.message))
            if len(problems) == MAX_PROBLEMS:
                last = problems[-1]
                problems[-1] = Problem(last.line, last.key, f"{last.message} (reading stopped here)")
                break
    except FileErrors as unreadable:
        problems.extend(unreadable.problems)
    if problems:
        raise FileErrors(str(file), problems)
    return values


def _lines(file: Path) -> Iterator[Line]:
    """Yields (number from 1, text without line end) of each line; a line that is not UTF-8 raises `FileErrors`."""
    with file.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                # A byte order mark is no part of the first line.
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                message = f"not UTF-8: {error.reason} at byte {error.start} of the line"
                raise FileErrors(str(file), [Problem(number, "", message)]) from error
            yield number, text.rstrip("\r\n")


def _filled_lines(file: Path) -> Iterator[Line]:
    return ((number, text) for number, text in _lines(file) if text.strip())


def _blocks(file: Path) -> Iterator[Line]:
    """Yields (number of its first line, text) of each run of lines that are not blank."""
    block: list[str] = []
    number = 0
    for number, text in _lines(file):
        if text.strip():
            block.append(text)
        elif block:
            yield number - len(block), "\n".join(block) + "\n"
            block = []
    if block:
        yield number - len(block) + 1, "\n".join(block) + "\n"


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Refused("", f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise _Refused("", "not JSON that can be read: nested too deeply") from error
    if not isinstance(value, dict):
        raise _Refused("", f"expected a JSON object, got {_described(value)}")
    return value


def _id_array(value: object, key: str, vocab_size: int, *, ignored: bool) -> np.ndarray:
    if not isinstance(value, list):
        raise _Refused(key, f"expected a list of token ids, got {_described(value)}")
    for position, entry in enumerate(value):
        if type(entry) is not int:
            raise _Refused(key, f"expected token ids, got {_described(entry)} at position {position}")
        if not 0 <= entry < vocab_size and not (ignored and entry == -100):
            raise _Refused(
                key, f"id {entry} at position {position} is outside the vocabulary of {vocab_size} entries (vocab_size)"
            )
    return np.array(value, dtype=np.int64)


def _described(value: object) -> str:
    if value is None:
        return "nothing"
    shown = json.dumps(value)
    return f"{type(value).__name__} {shown if len(shown) <= 40 else shown[:37] + '...'}"
