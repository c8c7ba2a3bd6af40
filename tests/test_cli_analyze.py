"""`hgraph analyze`: what it counts in files of each kind, what it prints, draws and saves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from hgraph.errors import InvalidInput
from runtime.corpus.lengths import corpus_lengths
from strategies.length_data import read_lengths
from strategies.length_statistics import batch_statistics, length_statistics
from tests.command_line import hgraph, message


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def analyzed(*arguments: str) -> dict[str, Any]:
    result = hgraph("analyze", *arguments, "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


# Statistics


def test_statistics_by_hand() -> None:
    statistics = length_statistics(np.array([1, 2, 3, 4, 6], dtype=np.int64))
    assert (statistics.num_sequences, statistics.num_tokens, statistics.longest) == (5, 16, 6)
    assert dict(statistics.percentiles)[50] == 3
    classes = {(own.above, own.up_to): own for own in statistics.classes}
    assert {key: own.num_sequences for key, own in classes.items()} == {(0, 1): 1, (1, 2): 1, (2, 4): 2, (4, 8): 1}
    assert classes[4, 8].token_share == 6 / 16
    assert classes[2, 4].quadratic_share == pytest.approx(25 / 66)


def test_spread_of_batches_by_hand() -> None:
    statistics = batch_statistics([(4, 4), (8,), (2, 2, 2, 2)])
    assert (statistics.num_batches, statistics.tokens) == (3, 8)
    assert (statistics.longest.least, statistics.longest.median, statistics.longest.greatest) == (2, 4, 8)
    assert statistics.num_sequences.mean == pytest.approx(7 / 3)
    mean = (32 + 64 + 16) / 3
    assert statistics.quadratic.greatest == pytest.approx(64 / mean)
    assert statistics.longest_classes == ((2, 1 / 3), (4, 1 / 3), (8, 1 / 3))


def test_nothing_to_describe() -> None:
    with pytest.raises(InvalidInput, match="at least one sequence"):
        length_statistics(np.array([], dtype=np.int64))
    with pytest.raises(InvalidInput, match="at least one batch"):
        batch_statistics([])


# Kinds of files


def test_jsonl_with_text() -> None:
    Path("a.jsonl").write_text('{"text": "one two  three"}\n\n{"text": ""}\n{"text": "größer"}\n')
    data, num_empty = corpus_lengths("a.jsonl", tokenizer="whitespace")
    assert data.lengths.tolist() == [3, 1] and num_empty == 1
    assert corpus_lengths("a.jsonl")[0].lengths.tolist() == [14, 8]
    assert data.source == "a.jsonl; tokenizer whitespace"


def test_jsonl_with_token_ids() -> None:
    Path("a.jsonl").write_text('{"tokens": [7, 8, 200000]}\n{"tokens": [1]}\n')
    assert corpus_lengths("a.jsonl")[0].lengths.tolist() == [3, 1]


def test_text_files_by_paragraph_and_whole(folder: Path) -> None:
    (folder / "texts").mkdir()
    Path("texts/b.txt").write_text("one two\nthree\n\nfour\n")
    Path("texts/a.md").write_text("five six\n")
    assert corpus_lengths("texts", tokenizer="whitespace")[0].lengths.tolist() == [2, 3, 1]
    assert corpus_lengths("texts", tokenizer="whitespace", whole_files=True)[0].lengths.tolist() == [2, 4]


def test_a_tokenizer_file() -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save("words.json")
    Path("a.txt").write_text("one two-one\n")
    assert corpus_lengths("a.txt", tokenizer="words.json")[0].lengths.tolist() == [4]


def test_what_cannot_be_counted() -> None:
    Path("a.txt").write_text("one\n")
    Path("bad.json").write_text("{}")
    Path("blank.txt").write_text("\n\n")
    assert "expected bytes, whitespace or a tokenizer.json file" in message("analyze", "a.txt", "--tokenizer", "x")
    assert "expected a file of the tokenizers library" in message("analyze", "a.txt", "--tokenizer", "bad.json")
    assert "no such file or folder" in message("analyze", "none.txt")
    assert "expected at least one document, found none" in message("analyze", "blank.txt")
    assert "expected a list of lengths" in message("analyze", "bad.json")


# The command


def test_json_and_table_say_the_same() -> None:
    data = analyzed("github-like", "--longest", "32768", "--batches", "20")
    text = hgraph("analyze", "github-like", "--longest", "32768", "--batches", "20").stdout
    assert data["num_sequences"] == 5000 and data["batches"]["longest"]["greatest"] == 32768
    assert f"{data['num_tokens']:,} tokens" in text
    assert f"{data['above_longest']['num_above']} of 5,000 sequences exceed 32,768 tokens and are cut" in " ".join(
        text.split()
    )
    assert f"50 %: {data['percentiles']['50']:,}" in text


def test_what_is_saved_reads_back() -> None:
    Path("a.txt").write_text("one two\n\nthree\n")
    analyzed("a.txt", "--tokenizer", "whitespace", "--tokens", "5", "--save", "lengths.json")
    data = read_lengths("lengths.json")
    assert data.lengths.tolist() == [2, 1] and data.source == "a.txt; tokenizer whitespace"
    assert analyzed("lengths.json", "--tokens", "5")["num_tokens"] == 3


@pytest.mark.parametrize("name", ["one.svg", "one.png"])
def test_figures_are_the_same_bytes_each_time(name: str) -> None:
    arguments = ("web-docs", "--batches", "10", "--longest", "32768", "--figure")
    analyzed(*arguments, name)
    analyzed(*arguments, f"again-{name}")
    first = Path(name).read_bytes()
    assert first == Path(f"again-{name}").read_bytes() and len(first) > 5000
    if name.endswith(".svg"):
        assert b"quadratic work" in first


def test_outputs_are_refused_before_the_work() -> None:
    assert "expected a name that ends in .png or .svg" in message("analyze", "web-docs", "--figure", "a.gif")
    Path("file").write_text("")
    assert "expected a folder to write to" in message("analyze", "web-docs", "--save", "file/a.json")
    assert "--batches: expected 1 or more, got 0" in message("analyze", "web-docs", "--batches", "0")


def test_length_files_do_not_wait_for_torch() -> None:
    code = (
        "import sys; from runtime.cli import main\n"
        "main(['analyze', 'web-docs', '--batches', '2'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
