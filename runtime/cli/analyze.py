"""`hgraph analyze`: how long the sequences of a corpus are, and what batches of them are like."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hgraph.errors import InvalidInput
from runtime.cli.options import check_folder, json_option, out, print_json, table, working

if TYPE_CHECKING:
    from strategies.length_data import LengthData
    from strategies.length_statistics import BatchStatistics, LengthStatistics, Spread

__all__ = ["command"]

_CLASS_HEADERS = ("tokens", "sequences", "share", "of tokens", "of quadratic work")
_SPREAD_HEADERS = ("per batch", "least", "10 %", "median", "90 %", "greatest", "mean")


@click.command(name="analyze")
@click.argument("corpus")
@click.option("--tokenizer", default="bytes", show_default=True, help="bytes, whitespace or a tokenizer.json file.")
@click.option("--text-field", default="text", show_default=True, help="Where a line of JSONL has its text.")
@click.option("--whole-files", is_flag=True, help="A text file is one document, in place of its paragraphs.")
@click.option("--tokens", type=int, default=200_000, show_default=True, help="Tokens of a sampled batch.")
@click.option("--longest", type=int, help="Cut longer sequences to so many tokens in batches. Default: no cut.")
@click.option("--batches", "num_batches", type=int, default=200, show_default=True, help="Batches to sample.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampled batches.")
@click.option("--figure", metavar="FILE.svg|.png", help="Draw it as well.")
@click.option("--save", metavar="FILE.json", help="Write the lengths, for hgraph propose.")
@json_option
def command(
    corpus: str,
    tokenizer: str,
    text_field: str,
    whole_files: bool,
    tokens: int,
    longest: int | None,
    num_batches: int,
    seed: int,
    figure: str | None,
    save: str | None,
    as_json: bool,
) -> None:
    """Show how long the sequences of CORPUS are, and how much batches of them differ.

    CORPUS is a .jsonl file (token ids under `tokens`, or text), a text file or a folder of them, a .json file of
    lengths, or the name of lengths that come along: commoncrawl-like, github-like, python-source, web-docs. See
    docs/lengths.md.

    \b
    Examples:
      hgraph analyze web-docs --tokens 200000 --longest 32768
      hgraph analyze docs --tokenizer whitespace --tokens 4000 --batches 50 --save lengths.json
      hgraph analyze python-source --figure lengths.svg
      hgraph analyze github-like --json
    """
    from strategies.length_data import above_longest, sample_batches
    from strategies.length_statistics import batch_statistics, length_statistics

    if num_batches < 1:
        raise InvalidInput(f"--batches: expected 1 or more, got {num_batches}")
    _check_outputs(figure, save)
    data, num_empty = _lengths(corpus, tokenizer, text_field, whole_files)
    kept = longest if longest is not None else int(data.lengths.max())
    batches = sample_batches(data, tokens=tokens, longest=kept, count=num_batches, seed=seed)
    statistics, spreads = length_statistics(data.lengths), batch_statistics(batches)
    if save is not None:
        Path(save).write_text(_length_file(data), encoding="utf-8")
    if figure is not None:
        from runtime.length_figures import write_length_figure

        write_length_figure(figure, statistics, data.lengths, batches)
    above = above_longest(data, kept)
    if as_json:
        print_json(_as_data(data, statistics, spreads, num_empty, asdict(above), seed))
        return
    _show_lengths(data, statistics, num_empty)
    _show_batches(spreads, seed, str(above))


def _check_outputs(figure: str | None, save: str | None) -> None:
    """Refuses what could not be written, before the work begins."""
    if figure is not None:
        from runtime.length_figures import check_figure_path

        check_figure_path(figure)
    for path in (figure, save):
        if path is not None:
            check_folder(Path(path).parent)


def _lengths(corpus: str, tokenizer: str, text_field: str, whole_files: bool) -> tuple[LengthData, int]:
    from strategies.length_data import known_lengths, read_lengths

    if corpus in known_lengths() or corpus.endswith(".json"):
        # Nothing here reads text, so nothing waits for torch.
        return read_lengths(corpus), 0
    with working("loading"):
        from runtime.corpus.lengths import corpus_lengths
    return corpus_lengths(
        corpus, tokenizer=tokenizer, text_field=text_field, whole_files=whole_files, progress=sys.stderr.isatty()
    )


def _length_file(data: LengthData) -> str:
    """Returns the text of a length file, a few lengths a line."""
    lengths = data.lengths.tolist()
    rows = ",\n    ".join(", ".join(map(str, lengths[at : at + 20])) for at in range(0, len(lengths), 20))
    return f'{{\n  "version": 1,\n  "source": {json.dumps(data.source)},\n  "lengths": [\n    {rows}\n  ]\n}}\n'


def _show_lengths(data: LengthData, statistics: LengthStatistics, num_empty: int) -> None:
    empty = f"; {num_empty:,} empty ones left out" if num_empty else ""
    click.echo(data.source)
    click.echo(
        f"{statistics.num_sequences:,} sequences, {statistics.num_tokens:,} tokens, mean {statistics.mean:,.0f}, "
        f"longest {statistics.longest:,}{empty}"
    )
    click.echo("percentiles: " + ", ".join(f"{at:g} %: {value:,}" for at, value in statistics.percentiles))
    rows = [
        [
            f"{own.above + 1:,} to {own.up_to:,}",
            f"{own.num_sequences:,}",
            f"{own.num_sequences / statistics.num_sequences:.1%}",
            f"{own.token_share:.1%}",
            f"{own.quadratic_share:.1%}",
        ]
        for own in statistics.classes
    ]
    out().print(table("Lengths", _CLASS_HEADERS, rows, numbers=(0, 1, 2, 3, 4)))


def _show_batches(spreads: BatchStatistics, seed: int, above: str) -> None:
    rows = [
        _spread_row("sequences", spreads.num_sequences, ",.0f"),
        _spread_row("longest sequence, tokens", spreads.longest, ",.0f"),
        _spread_row("quadratic work, over the mean", spreads.quadratic, ".2f"),
    ]
    title = f"{spreads.num_batches:,} batches of {spreads.tokens:,} tokens, seed {seed}; {above}"
    out().print(table(title, _SPREAD_HEADERS, rows, numbers=(1, 2, 3, 4, 5, 6)))
    classes = ", ".join(f"{up_to:,}: {share:.0%}" for up_to, share in spreads.longest_classes)
    click.echo(f"batches by the longest sequence, up to tokens: {classes}")


def _spread_row(name: str, spread: Spread, form: str) -> list[str]:
    values = (spread.least, spread.low, spread.median, spread.high, spread.greatest, spread.mean)
    return [name, *(format(value, form) for value in values)]


def _as_data(
    data: LengthData,
    statistics: LengthStatistics,
    spreads: BatchStatistics,
    num_empty: int,
    above: dict[str, Any],
    seed: int,
) -> dict[str, Any]:
    return {
        "source": data.source,
        "empty": num_empty,
        **asdict(statistics),
        "percentiles": {f"{at:g}": value for at, value in statistics.percentiles},
        "above_longest": above,
        "batches": {
            **asdict(spreads),
            "seed": seed,
            "longest_classes": {str(up_to): share for up_to, share in spreads.longest_classes},
        },
    }
