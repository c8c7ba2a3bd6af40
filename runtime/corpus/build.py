"""From a `CorpusConfig` to a data set: documents, tokenizer, token ids, length policy, each kept in the cache."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from hgraph.data.dataset import Dataset, MemmapDataset, PieceDataset, target_counts
from hgraph.data.packed import shifted_labels
from hgraph.data.policy import apply_length_policy
from runtime.corpus.cache import content_key, files_key, locked, written_file, written_folder
from runtime.corpus.config import CorpusConfig, CorpusReport, Documents
from runtime.corpus.files import input_files, jsonl_documents, text_documents, token_sequences
from runtime.corpus.standard_library import stdlib_documents, stdlib_files
from runtime.corpus.tokenizer import load_tokenizer, tokenize_corpus, tokenizer_name, train_tokenizer

__all__ = ["build_dataset"]

FORMAT = "corpus 1"
"""Part of every name in the cache; it changes with what is made from the same files."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the cache holds for one source: file names within the cache folder."""

    tokens: str
    tokenizer: str | None
    num_files: int
    skipped: tuple[str, ...]


def build_dataset(config: CorpusConfig, *, progress: bool = False) -> tuple[Dataset, Tokenizer | None, CorpusReport]:
    """Returns (data set, tokenizer, report) of a corpus; the tokenizer is None for files of token ids.

    The length policy is applied. What was made before from the same bytes is loaded; where several processes
    ask at once, one works and the others wait for it. `progress` shows bars.

    Raises `FileErrors` with every fault of a file, and `InvalidInput` for files that are missing or empty.
    """
    cache = Path(config.cache)
    index = cache / f"corpus-{_source_key(config)}.json"
    entry = _read_entry(index)
    cached = entry is not None
    if entry is None:
        entry = _entry(index, config, progress)
    whole = MemmapDataset(cache / entry.tokens)
    tokenizer = None if entry.tokenizer is None else load_tokenizer(cache / entry.tokenizer)
    policy = apply_length_policy(whole.lengths, config.max_length, config.policy)
    changed = policy.cut_ids or policy.split_ids or policy.dropped_ids
    dataset: Dataset = PieceDataset(whole, policy) if changed else whole
    policy = policy.with_target_counts(target_counts(dataset))
    vocab_size = config.vocab_size if tokenizer is None else tokenizer.get_vocab_size()
    fingerprint = content_key([entry.tokens, str(config.max_length), config.policy])
    return dataset, tokenizer, CorpusReport(entry.num_files, entry.skipped, vocab_size, policy, fingerprint, cached)


def _source_key(config: CorpusConfig) -> str:
    """Returns a name for the bytes the corpus is made from and the settings that shape them."""
    files = stdlib_files() if config.kind == "stdlib" else input_files(config.paths, config.kind)
    # What `ast` accepts, and so the documents, may differ between versions of Python.
    settings = [FORMAT, platform.python_version(), config.kind, str(config.vocab_size), config.text_field]
    return content_key([*settings, files_key(files)])


def _read_entry(index: Path) -> _Entry | None:
    """Returns what the cache holds, or None where it holds nothing or its files are gone."""
    if not index.is_file():
        return None
    fields = json.loads(index.read_text(encoding="utf-8"))
    entry = _Entry(fields["tokens"], fields["tokenizer"], fields["num_files"], tuple(fields["skipped"]))
    names = [entry.tokens, entry.tokenizer] if entry.tokenizer is not None else [entry.tokens]
    return entry if all((index.parent / name).exists() for name in names) else None


def _entry(index: Path, config: CorpusConfig, progress: bool) -> _Entry:
    """Returns the entry that this process makes, or that another one made while this one waited for it."""
    with locked(index):
        entry = _read_entry(index)
        if entry is not None:
            return entry
        entry = _made_entry(config, index.parent, progress)
        with written_file(index) as temporary:
            temporary.write_text(json.dumps(asdict(entry)), encoding="utf-8")
        return entry


def _made_entry(config: CorpusConfig, cache: Path, progress: bool) -> _Entry:
    if config.kind == "tokens":
        folder = _written_tokens(config, cache)
        return _Entry(folder.name, None, len(input_files(config.paths, config.kind)), ())
    documents = _documents(config, progress)
    tokenizer = train_tokenizer(documents.texts, config.vocab_size, cache, progress=progress)
    dataset = tokenize_corpus(documents.texts, tokenizer, cache, progress=progress)
    name = tokenizer_name(documents.texts, config.vocab_size)
    return _Entry(dataset.folder.name, name, documents.num_files, documents.skipped)


def _documents(config: CorpusConfig, progress: bool) -> Documents:
    if config.kind == "stdlib":
        return stdlib_documents(progress=progress)
    if config.kind == "jsonl":
        return jsonl_documents(config.paths, config.text_field)
    return text_documents(config.paths)


def _written_tokens(config: CorpusConfig, cache: Path) -> Path:
    """Returns the folder of a data set with the token ids, and the labels where any line gives some, of all files."""
    rows = token_sequences(config.paths, config.vocab_size)
    labels = None
    if any(given is not None for _, given in rows):
        labels = [shifted_labels(torch.from_numpy(tokens)).numpy() if own is None else own for tokens, own in rows]
    tokens = [tokens for tokens, _ in rows]
    parts: list[str | bytes] = [
        FORMAT,
        *(row.tobytes() for row in tokens),
        "labels",
        *(row.tobytes() for row in labels or ()),
    ]
    folder = cache / f"tokens-{content_key(parts)}"
    if not folder.is_dir():
        with written_folder(folder) as temporary:
            MemmapDataset.write(temporary, tokens, labels)
    return folder
