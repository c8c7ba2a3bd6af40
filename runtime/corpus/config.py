"""What a corpus is made of, and what came out: values alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from hgraph.data.policy import LengthPolicy, PolicyReport
from hgraph.errors import InvalidInput

__all__ = ["SMALLEST_VOCABULARY", "CorpusConfig", "CorpusKind", "CorpusReport", "Documents"]

CorpusKind: TypeAlias = Literal["stdlib", "jsonl", "text", "tokens"]

SMALLEST_VOCABULARY = 257
"""One entry for each byte and one for the end of a document."""


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """Where the documents come from and how they become sequences of token ids.

    `kind`: `stdlib` (functions and classes of Python's own standard library), or files of the user: `jsonl` (one
    object a line, its text under `text_field`), `text` (documents separated by blank lines), `tokens` (one object a
    line with the token ids under `tokens` and, where wanted, targets under `labels`). `paths` are files or folders of
    such files. `vocab_size`: entries of the trained tokenizer, at most; with `tokens`, the vocabulary that the ids
    belong to. `max_length` in tokens, None for no limit; `policy` is for longer documents (`docs/data.md`). `cache`
    is a folder.
    """

    kind: CorpusKind = "stdlib"
    paths: tuple[str, ...] = ()
    vocab_size: int = 4000
    max_length: int | None = 4096
    policy: LengthPolicy = "cut"
    cache: str = ".cache/hydraulis"
    text_field: str = "text"

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(str(path) for path in self.paths))
        if self.kind not in get_args(CorpusKind):
            raise InvalidInput(f"corpus: expected a kind of {', '.join(get_args(CorpusKind))}, got {self.kind!r}")
        if self.kind == "stdlib" and self.paths:
            raise InvalidInput("corpus: the kind stdlib takes no paths; use jsonl, text or tokens for your own files")
        if self.kind != "stdlib" and not self.paths:
            raise InvalidInput(f"corpus: the kind {self.kind} needs at least one path")
        smallest = 1 if self.kind == "tokens" else SMALLEST_VOCABULARY
        if self.vocab_size < smallest:
            raise InvalidInput(f"corpus: expected vocab_size of {smallest} or more, got {self.vocab_size}")
        if self.policy not in get_args(LengthPolicy):
            raise InvalidInput(f"corpus: expected a policy of {', '.join(get_args(LengthPolicy))}, got {self.policy!r}")
        if self.max_length is not None and self.max_length < 1:
            raise InvalidInput(f"corpus: expected max_length of 1 token or more, got {self.max_length}")


@dataclass(frozen=True, slots=True)
class Documents:
    """Texts with the name of each (`json/decoder.py:JSONDecoder`, `notes.jsonl:3`), in an order that never varies.

    `skipped` are the files that could not be read as Python, with the reason.
    """

    names: tuple[str, ...]
    texts: tuple[str, ...] = field(repr=False)
    num_files: int = 1
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """What `build_dataset` made. `fingerprint` is equal on two machines exactly where lengths and tokens are."""

    num_files: int
    skipped: tuple[str, ...]
    vocab_size: int
    policy: PolicyReport
    fingerprint: str
    cached: bool

    def __str__(self) -> str:
        skipped = f", {len(self.skipped)} files skipped" if self.skipped else ""
        cached = ", from the cache" if self.cached else ""
        return (
            f"{self.policy.num_documents} documents of {self.num_files} files{skipped}, "
            f"{self.policy.num_tokens} tokens, vocabulary of {self.vocab_size}{cached}; {self.policy}"
        )
