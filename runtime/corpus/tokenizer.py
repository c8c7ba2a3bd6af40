"""A byte-level BPE tokenizer, trained on the spot in seconds and kept, and documents turned into token ids with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from hgraph.data.dataset import MemmapDataset
from hgraph.errors import InvalidInput
from runtime.corpus.cache import content_key, locked, written_file, written_folder
from runtime.corpus.config import SMALLEST_VOCABULARY

__all__ = ["END_OF_DOCUMENT", "load_tokenizer", "tokenize_corpus", "tokenizer_name", "train_tokenizer"]

END_OF_DOCUMENT = "<|end|>"
"""The entry, always id 0, that ends every document. The same characters inside a document are ordinary text."""

MAX_TRAINING_CHARACTERS = 20_000_000
"""Merges settle long before; of a larger corpus, evenly spaced documents up to about so many characters are used."""

CHUNK = 256


def train_tokenizer(
    documents: Sequence[str], vocab_size: int = 4000, folder: str | Path = ".cache/hydraulis", *, progress: bool = False
) -> Tokenizer:
    """Returns a byte-level BPE tokenizer of at most `vocab_size` entries, trained on the documents.

    It is kept in `folder`, named by documents and size, and loaded from there the next time. A small corpus may not
    have enough merges to fill the vocabulary: ask the tokenizer for its size.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise InvalidInput(f"tokenizer: expected vocab_size of {SMALLEST_VOCABULARY} or more, got {vocab_size}")
    if not any(documents):
        raise InvalidInput("tokenizer: expected at least one document with text to train on, got none")
    path = Path(folder) / tokenizer_name(documents, vocab_size)
    with locked(path):
        if path.is_file():
            return load_tokenizer(path)
        tokenizer = _trained(documents, vocab_size, progress)
        with written_file(path) as temporary:
            tokenizer.save(str(temporary))
        return tokenizer


def tokenizer_name(documents: Sequence[str], vocab_size: int) -> str:
    """Returns the name of the file that `train_tokenizer` keeps for these documents."""
    return f"tokenizer-{content_key([f'bpe {vocab_size}', *documents])}.json"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Returns the tokenizer of a file that `train_tokenizer` wrote."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def tokenize_corpus(
    documents: Sequence[str], tokenizer: Tokenizer, folder: str | Path = ".cache/hydraulis", *, progress: bool = False
) -> MemmapDataset:
    """Returns the documents as token ids, each ended by `END_OF_DOCUMENT`; an empty text stays empty.

    It is kept in `folder`, named by documents and tokenizer. Nothing is cut here: see `hgraph/data/policy.py`.
    """
    path = Path(folder) / f"tokens-{content_key([tokenizer.to_str(), *documents])}"
    with locked(path):
        if not path.is_dir():
            with written_folder(path) as temporary:
                MemmapDataset.write(temporary, _encoded(documents, tokenizer, progress))
    return MemmapDataset(path)


def _trained(documents: Sequence[str], vocab_size: int, progress: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stride = -(-sum(map(len, documents)) // MAX_TRAINING_CHARACTERS)
    sample = documents[::stride]
    tokenizer.train_from_iterator(
        tqdm(sample, desc="training the tokenizer", unit="document", leave=False, disable=not progress), trainer
    )
    tokenizer.encode_special_tokens = True
    return tokenizer


def _encoded(documents: Sequence[str], tokenizer: Tokenizer, progress: bool) -> list[np.ndarray]:
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    rows: list[np.ndarray] = []
    with tqdm(total=len(documents), desc="tokenizing", unit="document", leave=False, disable=not progress) as bar:
        for begin in range(0, len(documents), CHUNK):
            chunk = list(documents[begin : begin + CHUNK])
            for text, encoding in zip(chunk, tokenizer.encode_batch_fast(chunk), strict=True):
                rows.append(np.array([*encoding.ids, end] if text else [], dtype=np.int64))
            bar.update(len(chunk))
    return rows
