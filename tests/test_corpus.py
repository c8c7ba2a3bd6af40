"""Corpora: documents, tokenizer, cache, and every fault of a user's file in one report."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest

import runtime.corpus.build
import runtime.corpus.tokenizer
from hgraph.data import MemmapDataset, PieceDataset, TokenDataset, apply_length_policy, global_batches
from hgraph.errors import FileErrors, HydraulisError, InvalidInput
from runtime.corpus import (
    CorpusConfig,
    build_dataset,
    jsonl_documents,
    stdlib_documents,
    text_documents,
    token_sequences,
    tokenize_corpus,
    train_tokenizer,
    unigram_entropy,
)
from runtime.corpus.cache import content_key, locked, written_file, written_folder
from runtime.corpus.standard_library import stdlib_files

SOURCE = '''\
"""Module."""
import functools

CONSTANT = 1


@functools.cache
@functools.wraps(
    print
)
def first(x):
    """\x0c"""
    def inner():
        return x
    return inner


class Second:
    def method(self): pass
async def third(): ...
'''

TEXTS = [f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(50)]


def written(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


# Documents of the standard library


def test_functions_and_classes_at_the_top_with_their_decorators(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE, encoding="utf-8")
    documents = stdlib_documents(tmp_path)
    assert documents.names == ("module.py:first", "module.py:Second", "module.py:third")
    first, second, third = documents.texts
    assert first.startswith("@functools.cache\n@functools.wraps(") and first.endswith("    return inner\n")
    assert second == "class Second:\n    def method(self): pass\n"
    assert third == "async def third(): ...\n"


def test_files_are_sorted_and_folders_that_vary_are_left_out(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a/test/x.py", "site-packages/y.py", "test.py", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def {path.stem}(): pass\n")
    assert [path.relative_to(tmp_path).as_posix() for path in stdlib_files(tmp_path)] == ["a/z.py", "b.py", "test.py"]


def test_files_that_are_not_python_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("def f(): pass\n")
    (tmp_path / "old.py").write_text("def g(): print 'x'\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    documents = stdlib_documents(tmp_path)
    assert (len(documents), documents.num_files) == (1, 3)
    assert [entry.split(":")[0] for entry in documents.skipped] == ["latin.py", "old.py"]
    assert "SyntaxError" in documents.skipped[1]


def test_a_folder_without_documents_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"expected the \.py files of Python's standard library, found none"):
        stdlib_documents(tmp_path)
    (tmp_path / "constants.py").write_text("X = 1\n")
    with pytest.raises(InvalidInput, match="expected functions or classes in 1 files, found none"):
        stdlib_documents(tmp_path)


# Tokenizer and cache


def test_documents_come_back_from_their_tokens(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 300, tmp_path)
    assert tokenizer.get_vocab_size() == 300
    strange = "naïve ✓ \x00 <|end|> \r\n\tx"
    dataset = tokenize_corpus([*TEXTS, strange, ""], tokenizer, tmp_path)
    assert isinstance(dataset, MemmapDataset)
    assert dataset.lengths[-1] == 0
    tokens = dataset.tokens(50).tolist()
    # The end of a document is one entry; the same characters inside a document are text.
    assert tokens.count(0) == 1 and tokens[-1] == 0
    assert tokenizer.decode(tokens[:-1]) == strange


def test_a_tokenizer_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train_tokenizer(TEXTS, 300, tmp_path)
    dataset = tokenize_corpus(TEXTS, first, tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(runtime.corpus.tokenizer, "_trained", refuse)
    monkeypatch.setattr(runtime.corpus.tokenizer, "_encoded", refuse)
    second = train_tokenizer(TEXTS, 300, tmp_path)
    assert second.to_str() == first.to_str()
    assert second.encode("<|end|>").ids == first.encode("<|end|>").ids != [0]
    assert tokenize_corpus(TEXTS, second, tmp_path).folder == dataset.folder
    for other in ((TEXTS[1:], 300), (TEXTS, 301)):
        with pytest.raises(AssertionError, match="made again"):
            train_tokenizer(*other, tmp_path)


def test_training_twice_gives_the_same_tokenizer(tmp_path: Path) -> None:
    one, two = (train_tokenizer(TEXTS, 320, tmp_path / name) for name in ("one", "two"))
    assert one.to_str() == two.to_str()


def test_a_tokenizer_needs_text_and_room_for_bytes(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="tokenizer: expected vocab_size of 257 or more, got 256"):
        train_tokenizer(TEXTS, 256, tmp_path)
    with pytest.raises(InvalidInput, match="tokenizer: expected at least one document with text"):
        train_tokenizer(["", ""], 300, tmp_path)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    for opened in (written_file(tmp_path / "file"), written_folder(tmp_path / "folder")):
        with pytest.raises(KeyboardInterrupt), opened as temporary:
            target = temporary if temporary.name.startswith("file") else temporary / "part"
            target.write_text("half")
            raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_waiting_for_another_process_ends_and_says_for_what(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    message = r"waited 0\.1 s for another process to finish .*tokenizer\.json"
    with locked(path), pytest.raises(HydraulisError, match=message), locked(path, timeout_s=0.1):
        pass
    with locked(path, timeout_s=0.1):
        pass


def test_the_key_knows_where_parts_end() -> None:
    assert content_key(["ab", "c"]) != content_key(["a", "bc"])
    assert content_key(["ab"]) == content_key([b"ab"])


# Files of the user


def test_jsonl_texts(tmp_path: Path) -> None:
    path = written(tmp_path / "notes.jsonl", '{"text": "one", "id": 1}', "", '{"text": "two\\nlines"}')
    documents = jsonl_documents([path])
    assert documents.texts == ("one", "two\nlines")
    assert documents.names == (f"{path}:1", f"{path}:3")


def test_every_fault_of_a_jsonl_file_in_one_report(tmp_path: Path) -> None:
    path = written(
        tmp_path / "bad.jsonl",
        '{"text": "fine"}',
        '{"text": "cut',
        '["a", "list"]',
        '{"body": "no text"}',
        '{"text": 3}',
        b'{"text": "\xff"}',
    )
    with pytest.raises(FileErrors) as caught:
        jsonl_documents([path])
    assert str(caught.value) == "\n".join(
        [
            f"{path}: 5 problems",
            f"  {path}: line 2: not JSON: Unterminated string starting at at column 10",
            f'  {path}: line 3: expected a JSON object, got list ["a", "list"]',
            f"  {path}: line 4: text: expected a string, got nothing",
            f"  {path}: line 5: text: expected a string, got int 3",
            f"  {path}: line 6: not UTF-8: invalid start byte at byte 10 of the line",
        ]
    )


def test_a_report_stops_at_twenty(tmp_path: Path) -> None:
    path = written(tmp_path / "bad.jsonl", *["nonsense"] * 30)
    with pytest.raises(FileErrors) as caught:
        jsonl_documents([path])
    assert len(caught.value.problems) == 20
    assert str(caught.value).endswith("line 20: not JSON: Expecting value at column 1 (reading stopped here)")


def test_text_files_are_cut_at_blank_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"\xef\xbb\xbfone\r", "  still one", "", "\t", "two", "")
    documents = text_documents([path])
    assert documents.texts == ("one\n  still one\n", "two\n")
    assert documents.names == (f"{path}:1", f"{path}:5")


def test_token_files(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"tokens": [1, 2, 3]}', '{"tokens": [4, 5], "labels": [-100, 6]}')
    (first, none), (second, labels) = token_sequences([path], vocab_size=7)
    assert (first.tolist(), none) == ([1, 2, 3], None)
    assert second.tolist() == [4, 5]
    assert labels is not None and labels.tolist() == [-100, 6]


def test_every_fault_of_a_token_file_in_one_report(tmp_path: Path) -> None:
    path = written(
        tmp_path / "bad.jsonl",
        '{"tokens": [1, 9]}',
        '{"tokens": [1, true]}',
        '{"tokens": "1 2"}',
        '{"tokens": [1, 2], "labels": [2]}',
        '{"tokens": [-1]}',
    )
    with pytest.raises(FileErrors) as caught:
        token_sequences([path], vocab_size=9)
    assert [str(problem) for problem in caught.value.problems] == [
        "line 1: tokens: id 9 at position 1 is outside the vocabulary of 9 entries (vocab_size)",
        "line 2: tokens: expected token ids, got bool true at position 1",
        'line 3: tokens: expected a list of token ids, got str "1 2"',
        "line 4: labels: expected 2 targets, one per token, got 1",
        "line 5: tokens: id -1 at position 0 is outside the vocabulary of 9 entries (vocab_size)",
    ]


@pytest.mark.parametrize("kind", ["jsonl", "text", "tokens"])
def test_files_that_are_missing_or_hold_nothing_are_named(tmp_path: Path, kind: str) -> None:
    def build(path: Path) -> None:
        build_dataset(CorpusConfig(kind, (str(path),), cache=str(tmp_path / "cache")))  # type: ignore[arg-type]

    with pytest.raises(InvalidInput, match=r"nowhere\.jsonl: no such file or folder"):
        build(tmp_path / "nowhere.jsonl")
    with pytest.raises(
        InvalidInput, match=rf"empty\.jsonl: the file is empty; expected {kind} with at least one document"
    ):
        build(written(tmp_path / "empty.jsonl"))
    with pytest.raises(InvalidInput, match=r"blank\.jsonl: expected at least one document, found none"):
        build(written(tmp_path / "blank.jsonl", "", " ", ""))
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidInput, match=r"folder: expected files ending in \.\w+.*, found none"):
        build(tmp_path / "folder")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "parquet"}, "corpus: expected a kind of stdlib, jsonl, text, tokens, got 'parquet'"),
        ({"paths": ("a",)}, "corpus: the kind stdlib takes no paths"),
        ({"kind": "text"}, "corpus: the kind text needs at least one path"),
        ({"vocab_size": 100}, "corpus: expected vocab_size of 257 or more, got 100"),
        ({"policy": "trim"}, "corpus: expected a policy of error, cut, split, drop, got 'trim'"),
        ({"max_length": 0}, "corpus: expected max_length of 1 token or more, got 0"),
    ],
)
def test_each_invariant_of_a_configuration(options: dict, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        CorpusConfig(**options)


# From a configuration to a data set


def test_a_corpus_of_texts_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(
        tmp_path / "texts.jsonl", *(json.dumps({"text": text}) for text in [*TEXTS, "", " ".join(map(str, range(99)))])
    )
    config = CorpusConfig("jsonl", (str(path),), vocab_size=300, max_length=40, cache=str(tmp_path / "cache"))
    dataset, tokenizer, report = build_dataset(config)
    assert tokenizer is not None and report.vocab_size == tokenizer.get_vocab_size() == 300
    assert (report.policy.num_documents, report.policy.cut_ids, report.policy.empty_ids) == (52, (51,), (50,))
    assert report.policy.num_tokens_lost == report.policy.num_tokens - dataset.lengths.sum() > 0
    assert not report.cached and "1 cut: id 51" in str(report)

    monkeypatch.setattr(runtime.corpus.build, "_made_entry", None)
    again, _, second = build_dataset(config)
    assert second.cached and second.fingerprint == report.fingerprint
    assert all(again.tokens(i).tolist() == dataset.tokens(i).tolist() for i in range(52))
    longer = build_dataset(CorpusConfig("jsonl", (str(path),), vocab_size=300, cache=str(tmp_path / "cache")))
    assert longer[2].cached and longer[2].fingerprint != report.fingerprint


def test_a_cache_with_files_gone_is_made_again(tmp_path: Path) -> None:
    path = written(tmp_path / "texts.txt", *TEXTS)
    config = CorpusConfig("text", (str(path),), vocab_size=300, cache=str(tmp_path / "cache"))
    _, _, report = build_dataset(config)
    next((tmp_path / "cache").glob("tokenizer-*.json")).unlink()
    _, _, again = build_dataset(config)
    assert not again.cached and again.fingerprint == report.fingerprint


def test_processes_that_ask_at_once_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "texts.txt", *TEXTS)
    config = CorpusConfig("text", (str(path),), vocab_size=300, cache=str(tmp_path / "cache"))
    made = []
    make = runtime.corpus.build._made_entry

    def counted(*args: object) -> object:
        made.append(args)
        return make(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(runtime.corpus.build, "_made_entry", counted)
    fingerprints: list[str] = []
    # File locks hold between open files, so threads stand for processes here.
    threads = [
        threading.Thread(target=lambda: fingerprints.append(build_dataset(config)[2].fingerprint)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(made) == 1
    assert len(fingerprints) == 4 and len(set(fingerprints)) == 1


def test_a_corpus_of_tokens_keeps_its_labels(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"tokens": [1, 2, 3]}', '{"tokens": [4, 5], "labels": [-100, -100]}')
    config = CorpusConfig("tokens", (str(path),), vocab_size=7, cache=str(tmp_path / "cache"))
    dataset, tokenizer, report = build_dataset(config)
    assert tokenizer is None and report.vocab_size == 7
    assert report.policy.unlabelled_ids == (1,)
    (batch,) = global_batches(dataset, sequences_per_step=2, epochs=1, shuffle=False)
    labels = [batch.sequence(position)[1] for position in range(2)]
    assert [row.tolist() for row in labels if row is not None] == [[2, 3, -100], [-100, -100]]
    assert batch.num_targets == 2


def test_unigram_entropy_is_that_of_the_targets() -> None:
    # Targets: 2, 2, 3 and 3; the first tokens predict but are not predicted.
    dataset = TokenDataset([[9, 2, 2], [8, 3, 3], [7], []])
    assert unigram_entropy(dataset) == pytest.approx(math.log(2), rel=1e-12)
    labelled = TokenDataset([[1, 1, 1]], labels=[[5, 6, -100]])
    assert unigram_entropy(labelled) == pytest.approx(math.log(2), rel=1e-12)
    cut = PieceDataset(dataset, apply_length_policy(dataset.lengths, 2, "cut"))
    assert unigram_entropy(cut) == pytest.approx(math.log(2), rel=1e-12)
    with pytest.raises(InvalidInput, match="unigram entropy: expected at least one target"):
        unigram_entropy(TokenDataset([[1]]))


def test_the_standard_library_as_a_corpus(tmp_path: Path) -> None:
    dataset, tokenizer, report = build_dataset(CorpusConfig(cache=str(tmp_path)))
    assert tokenizer is not None and tokenizer.get_vocab_size() == 4000
    assert dataset.lengths.max() == 4096
    assert report.policy.policy == "cut" and report.policy.cut_ids
    batches = list(global_batches(dataset, tokens_per_step=8192, epochs=1))
    assert len(batches) > 100
    assert 15 < np.mean([len(batch) for batch in batches]) < 30
    longest = np.array([max(batch.lengths) for batch in batches])
    per_class = np.histogram(longest, bins=[0, 1024, 2048, 4096, 4097])[0]
    assert all(count > 0 for count in per_class)
    assert 5.0 < unigram_entropy(dataset) < math.log(4000)
