"""Corpora: documents of the standard library or of the user's files, a tokenizer trained on the spot, and data sets."""

from runtime.corpus.build import build_dataset
from runtime.corpus.config import CorpusConfig, CorpusReport, Documents
from runtime.corpus.entropy import unigram_entropy
from runtime.corpus.files import jsonl_documents, text_documents, token_sequences
from runtime.corpus.standard_library import stdlib_documents
from runtime.corpus.tokenizer import END_OF_DOCUMENT, load_tokenizer, tokenize_corpus, train_tokenizer

__all__ = [
    "END_OF_DOCUMENT",
    "CorpusConfig",
    "CorpusReport",
    "Documents",
    "build_dataset",
    "jsonl_documents",
    "load_tokenizer",
    "stdlib_documents",
    "text_documents",
    "token_sequences",
    "tokenize_corpus",
    "train_tokenizer",
    "unigram_entropy",
]
