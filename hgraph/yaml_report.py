"""YAML with line numbers, typed checks, and every fault of a file in one report.

`read_document` turns text into plain data and remembers the line of each key and item. `validate` builds a checked
dataclass from a part of it (pydantic does the checking) and says what is wrong in words of the file's user: where it
is, what was expected, what was got, and the nearest known word for a misspelt one.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from hgraph.errors import FileErrors, InvalidInput, Problem

__all__ = [
    "STRICT",
    "Document",
    "Key",
    "Report",
    "describe",
    "key_text",
    "nearest",
    "problems_of",
    "read_document",
    "read_text",
    "validate",
]

Key: TypeAlias = tuple[str | int, ...]
"""Where a value is in a document: keys of mappings and positions (from 0) in lists, from the top."""

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""For pydantic dataclasses that describe files: no unknown keys, no silent conversion, finite numbers."""

Checked = TypeVar("Checked")


@dataclass(frozen=True, slots=True)
class Document:
    """The plain data of a YAML file (mappings have text keys) and the line, from 1, of each key and item."""

    path: str
    data: Any
    lines: Mapping[Key, int]

    def line(self, key: Key) -> int:
        """Returns the line of `key`, or of the nearest thing around it that the file does hold."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, 1)


@dataclass(slots=True)
class Report:
    """Collects faults, and raises them all at once."""

    document: Document
    problems: list[Problem] = field(default_factory=list)

    def add(self, key: Key, message: str) -> None:
        """Notes a fault at `key`."""
        self.problems.append(Problem(self.document.line(key), key_text(key), message))

    def check(self, kind: type[Checked], data: object, key: Key) -> Checked | None:
        """Returns `data`, which lies at `key`, as a checked `kind`, or None after noting what is wrong with it."""
        try:
            return validate(kind, data)
        except ValidationError as error:
            for at, message in problems_of(error, kind):
                self.add((*key, *at), message)
            return None

    def raise_if_any(self) -> None:
        """Raises `FileErrors` with everything noted, if anything was."""
        if self.problems:
            raise FileErrors(self.document.path, self.problems)


def key_text(key: Key) -> str:
    """Returns a key as text: `strategies[0].replicas[1].tp`; keys that are no plain words are quoted."""
    text = ""
    for part in key:
        if isinstance(part, int) or not re.fullmatch(r"[\w-]+", part):
            text += f"[{part!r}]"
        else:
            text += f".{part}" if text else part
    return text


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the known words nearest to `word` (three at most), or an empty text."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def describe(value: object) -> str:
    """Returns what a value of a file is, for "got ..."."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"text {value!r}"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence):
        return "a list"
    return str(value)


def read_text(path: str) -> str:
    """Returns the text of a file; `InvalidInput` where there is none or it is not text."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: expected text in UTF-8, got other bytes at position {error.start}") from None
    except OSError as error:
        raise InvalidInput(f"{path}: expected a file that can be read, got: {error.strerror}") from None


def read_document(text: str, path: str) -> Document:
    """Returns the data and lines of YAML `text`; `path` is what messages call it.

    Raises `FileErrors` for an empty text, bad syntax, and keys that appear twice (all of them).
    """
    loader = YAML(typ="safe", pure=True)
    try:
        root = loader.compose(text)
    except MarkedYAMLError as error:
        raise FileErrors(path, [_syntax_problem(error)]) from None
    except YAMLError as error:
        raise FileErrors(path, [Problem(1, "", f"YAML syntax: {str(error).splitlines()[0]}")]) from None
    if root is None:
        raise FileErrors(path, [Problem(1, "", "expected a mapping, got an empty file")])
    reader = _Reader(loader)
    data = reader.read(root, ())
    if reader.problems:
        raise FileErrors(path, reader.problems)
    return Document(path, data, reader.lines)


def _syntax_problem(error: MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    text = f"YAML syntax, column {column}: {error.problem or error.context}"
    if error.problem and error.context and error.context_mark is not None:
        text += f" ({error.context} that starts on line {error.context_mark.line + 1})"
    return Problem(line, "", text + "; check brackets, quotes, and that items of one list start in one column")


class _Reader:
    """Turns YAML nodes into plain data; keeps lines and faults."""

    def __init__(self, loader: YAML) -> None:
        self.loader = loader
        self.lines: dict[Key, int] = {}
        self.problems: list[Problem] = []
        self.open_nodes: list[Node] = []

    def read(self, node: Node, key: Key) -> Any:
        self.lines.setdefault(key, node.start_mark.line + 1)
        if isinstance(node, ScalarNode):
            return self.read_scalar(node)
        if any(node is other for other in self.open_nodes):
            message = "expected an alias of something else, got one of what it lies in"
            self.problems.append(Problem(self.lines[key], key_text(key), message))
            return None
        self.open_nodes.append(node)
        result = self.read_mapping(node, key) if isinstance(node, MappingNode) else self.read_list(node, key)
        self.open_nodes.pop()
        return result

    def read_scalar(self, node: ScalarNode) -> Any:
        try:
            return self.loader.constructor.construct_object(node)
        except MarkedYAMLError as error:
            self.problems.append(_syntax_problem(error))
            return None

    def read_list(self, node: Node, key: Key) -> list[Any]:
        return [self.read(item, (*key, position)) for position, item in enumerate(node.value)]

    def read_mapping(self, node: MappingNode, key: Key) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode):
                self.problems.append(Problem(line, key_text(key), "expected a plain key, got a list or mapping"))
                continue
            name = str(key_node.value)
            if name in result:
                message = f"the key appears twice; the first is on line {self.lines[*key, name]}"
                self.problems.append(Problem(line, key_text((*key, name)), message))
                continue
            self.lines[*key, name] = line
            result[name] = self.read(value_node, (*key, name))
        return result


def validate(kind: type[Checked], data: object) -> Checked:
    """Returns plain data as a checked `kind`, a dataclass; raises pydantic's `ValidationError`.

    The data goes through JSON, whose rules fit files: lists may become tuples, but text never becomes a number.
    """
    return TypeAdapter(kind).validate_json(json.dumps(data, default=str))


def problems_of(error: ValidationError, kind: type) -> list[tuple[Key, str]]:
    """Returns where (within the value) and what each fault is that pydantic found while it built a `kind`."""
    return [
        (tuple(fault["loc"]), _message(fault, kind)) for fault in error.errors(include_url=False, include_input=True)
    ]


_EXPECTED = {
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "string_type": "text",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ("gt", "a value above {}"),
    "greater_than_equal": ("ge", "a value of {} or more"),
    "less_than": ("lt", "a value below {}"),
    "less_than_equal": ("le", "a value of {} or less"),
    "literal_error": ("expected", "{}"),
    "string_pattern_mismatch": ("pattern", "text that matches {}"),
    "string_too_short": ("min_length", "text of {} or more characters"),
    "too_long": ("max_length", "a list of {} or fewer items"),
    "too_short": ("min_length", "a list of {} or more items"),
}


def _message(fault: Any, kind: type) -> str:
    name, got, context = fault["type"], fault["input"], fault.get("ctx", {})
    last = fault["loc"][-1] if fault["loc"] else ""
    if name in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _keys_at(kind, fault["loc"][:-1])
        return f"unknown key; the keys here are {', '.join(known)}{nearest(str(last), known)}"
    if name == "missing":
        return "expected a value, got nothing; the key is missing" if isinstance(last, str) else "expected a value here"
    if name == "value_error":
        return str(context["error"])
    if name in _BOUNDS:
        entry, text = _BOUNDS[name]
        hint = nearest(got, _quoted_words(context[entry])) if name == "literal_error" and isinstance(got, str) else ""
        bound = f"{context[entry]:g}" if isinstance(context[entry], float) else context[entry]
        return f"expected {text.format(bound)}, got {_size_or_value(name, got)}{hint}"
    if name in _EXPECTED:
        return f"expected {_EXPECTED[name]}, got {describe(got)}{_quotes_hint(name, got)}"
    return f"{fault['msg'][:1].lower()}{fault['msg'][1:]}, got {describe(got)}"


def _size_or_value(name: str, got: object) -> str:
    if name in ("too_long", "too_short") and isinstance(got, Sequence):
        return str(len(got))
    return describe(got)


def _quotes_hint(name: str, got: object) -> str:
    if name not in ("int_type", "float_type") or not isinstance(got, str):
        return ""
    try:
        float(got)
    except ValueError:
        return ""
    return "; write it without quotes"


def _quoted_words(text: str) -> list[str]:
    return text.split("'")[1::2]


def _keys_at(kind: Any, at: Key) -> list[str]:
    """Returns the field names of the dataclass that lies at `at` within `kind`."""
    for part in at:
        if isinstance(part, str) and dataclasses.is_dataclass(kind):
            kind = _dataclass_in(typing.get_type_hints(kind)[part])
    return [item.name for item in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _dataclass_in(hint: Any) -> Any:
    """Returns the dataclass that a hint such as `X | None` or `tuple[X, ...]` speaks of, or the hint."""
    if dataclasses.is_dataclass(hint):
        return hint
    inner = [found for part in typing.get_args(hint) if dataclasses.is_dataclass(found := _dataclass_in(part))]
    return inner[0] if inner else hint
