"""Corpora: documents of the standard library or of the user's files, a tokenizer trained on the spot, and data sets."""

from hgraph.lazy_front import lazy_front

_MODULE_OF = {
    "END_OF_DOCUMENT": "tokenizer",
    "CorpusConfig": "config",
    "CorpusReport": "config",
    "Documents": "config",
    "build_dataset": "build",
    "jsonl_documents": "files",
    "load_tokenizer": "tokenizer",
    "stdlib_documents": "standard_library",
    "text_documents": "files",
    "token_sequences": "files",
    "tokenize_corpus": "tokenizer",
    "train_tokenizer": "tokenizer",
    "unigram_entropy": "entropy",
}

__all__ = [*_MODULE_OF]
__getattr__ = lazy_front(__name__, _MODULE_OF)
