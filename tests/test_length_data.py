"""Length files, the samples that come with the package, and batches drawn from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hgraph.errors import FileErrors, InvalidInput
from strategies.length_data import LengthData, above_longest, known_lengths, read_lengths, sample_batches

NAMES = ("commoncrawl-like", "github-like", "python-source", "web-docs")

MEANS = {"commoncrawl-like": 955.3, "github-like": 2111.0, "python-source": 3292.1, "web-docs": 2235.0}
"""Mean length in tokens of the sets that the samples stand for, cut at 32,768."""


def written(folder: Path, text: str) -> str:
    path = folder / "lengths.json"
    path.write_text(text)
    return str(path)


def fault(folder: Path, text: str) -> str:
    with pytest.raises(FileErrors) as caught:
        read_lengths(written(folder, text))
    return str(caught.value)


# Files


def test_shipped_samples() -> None:
    assert known_lengths() == NAMES
    for name in NAMES:
        data = read_lengths(name)
        assert len(data) == 5000 and data.lengths.min() >= 32
        assert data.source.startswith(("synthetic: lognormal", ".py files of 125 groups", "pages of 43 Debian 12"))


@pytest.mark.parametrize("name", NAMES)
def test_samples_keep_the_mean_of_their_sets(name: str) -> None:
    mean = np.minimum(read_lengths(name).lengths, 32_768).mean()
    assert mean == pytest.approx(MEANS[name], rel=0.001)


@pytest.mark.parametrize(
    ("text", "source"), [("[3, 1, 2]", None), ('{"lengths": [3, 1, 2], "source": "mine"}', "mine")]
)
def test_a_file_is_a_list_or_an_object(tmp_path: Path, text: str, source: str | None) -> None:
    path = written(tmp_path, text)
    data = read_lengths(path)
    assert data.lengths.tolist() == [3, 1, 2]
    assert data.source == (source or path)


def test_an_unknown_name_is_told_its_neighbours() -> None:
    with pytest.raises(InvalidInput, match="neither; did you mean 'web-docs'"):
        read_lengths("web-doc")


def test_a_missing_file() -> None:
    with pytest.raises(InvalidInput, match="none.json: expected a file that can be read"):
        read_lengths("none.json")


def test_faults_of_files(tmp_path: Path) -> None:
    assert "expected JSON, got an empty file" in fault(tmp_path, " \n")
    assert "line 2: JSON syntax" in fault(tmp_path, "[1,\n 2")
    assert "got an empty list" in fault(tmp_path, "[]")
    assert "got nothing" in fault(tmp_path, '{"length": [1]}')
    assert "got text 'x'" in fault(tmp_path, '"x"')


def test_every_wrong_length_is_named(tmp_path: Path) -> None:
    text = fault(tmp_path, '[5, 0, true, "7", 2.5, -1]')
    for position, got in ((1, "0"), (2, "true"), (3, "text '7'"), (4, "2.5"), (5, "-1")):
        assert f"lengths[{position}]: expected a length of 1 token or more, got {got}" in text
    assert "lengths[0]" not in text


def test_many_wrong_lengths_are_counted(tmp_path: Path) -> None:
    text = fault(tmp_path, json.dumps([0] * 1000))
    assert text.count("got 0") == 20
    assert "1,000 lengths are wrong; the first 20 are shown" in text


def test_values_that_cannot_be_built() -> None:
    with pytest.raises(InvalidInput, match="at least one length, got none"):
        LengthData(np.array([], dtype=np.int64), "empty")
    with pytest.raises(InvalidInput, match="got 0 at position 1"):
        LengthData(np.array([4, 0]), "zero")


def test_data_are_not_changed_from_outside() -> None:
    own = np.array([4, 5])
    data = LengthData(own, "mine")
    own[0] = 9
    assert data.lengths.tolist() == [4, 5]
    with pytest.raises(ValueError):
        data.lengths[0] = 9


# Above the longest


@pytest.mark.case(33)
@pytest.mark.case(50)
def test_what_is_cut_is_counted() -> None:
    """Lengths 4, 2, 3, 1 and a limit of 3: one sequence, one token of ten."""
    report = above_longest(LengthData(np.array([4, 2, 3, 1]), "case"), 3)
    assert (report.num_above, report.num_tokens_lost) == (1, 1)
    assert str(report) == "1 of 4 sequences exceed 3 tokens and are cut there: 1 of 10 tokens lost"


@pytest.mark.case(48)
def test_a_length_at_the_limit_is_not_above_it() -> None:
    data = LengthData(np.array([20, 21]), "case")
    assert above_longest(data, 20).num_above == 1
    assert str(above_longest(data, 21)) == "none of 2 sequences exceeds 21 tokens"
    assert max(sample_batches(data, tokens=1000, longest=20, count=1, seed=0)[0]) == 20


# Batches


def test_batches_hold_exactly_the_tokens() -> None:
    batches = sample_batches(read_lengths("web-docs"), tokens=50_000, longest=8192, count=20, seed=3)
    assert [sum(batch) for batch in batches] == [50_000] * 20
    assert max(map(max, batches)) == 8192
    assert min(map(min, batches)) >= 1


def test_batches_are_a_function_of_the_seed() -> None:
    data = read_lengths("github-like")
    first = sample_batches(data, tokens=30_000, longest=32_768, count=3, seed=1)
    assert first == sample_batches(data, tokens=30_000, longest=32_768, count=3, seed=1)
    assert first[:2] == sample_batches(data, tokens=30_000, longest=32_768, count=2, seed=1)
    assert len({*first, *sample_batches(data, tokens=30_000, longest=32_768, count=3, seed=2)}) == 6


def test_batches_have_the_mix_of_the_data() -> None:
    """Means over many batches are those of the data: drawn by sequence, not by token."""
    data = LengthData(np.array([1] * 9 + [91]), "mixed")
    drawn = np.concatenate([np.array(b) for b in sample_batches(data, tokens=10_000, longest=91, count=20, seed=0)])
    assert (drawn == 91).mean() == pytest.approx(0.1, abs=0.01)


def test_a_batch_smaller_than_any_sequence() -> None:
    assert sample_batches(LengthData(np.array([100]), "long"), tokens=7, longest=100, count=2, seed=0) == [(7,), (7,)]


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"longest": 0}, {"count": -1}, {"seed": -1}])
def test_settings_that_make_no_batch(wrong: dict[str, int]) -> None:
    settings = {"tokens": 10, "longest": 10, "count": 1, "seed": 0} | wrong
    name = next(iter(wrong))
    with pytest.raises(InvalidInput, match=f"sample batches: expected {name} of"):
        sample_batches(LengthData(np.array([1]), "one"), **settings)
