"""Figures of sequence lengths: PNG or SVG by the file's ending, the same bytes for the same data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hgraph.errors import InvalidInput
from strategies.length_statistics import LengthStatistics

__all__ = ["check_figure_path", "write_length_figure"]

FORMATS = (".png", ".svg")
SEQUENCES, TOKENS, WORK = "#4c78a8", "#f58518", "#54a24b"


def check_figure_path(path: str) -> None:
    """Raises `InvalidInput` unless the ending says PNG or SVG."""
    if Path(path).suffix not in FORMATS:
        raise InvalidInput(f"--figure {path}: expected a name that ends in .png or .svg")


def write_length_figure(
    path: str, statistics: LengthStatistics, lengths: NDArray[np.int64], batches: Sequence[Sequence[int]]
) -> None:
    """Writes shares by class, the distribution, and of each batch its longest sequence and quadratic work."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    check_figure_path(path)
    is_svg = path.endswith(".svg")
    # Identifiers in an SVG are random, and both kinds carry a date or version, unless told otherwise.
    with matplotlib.rc_context({"svg.hashsalt": "hydraulis", "svg.fonttype": "none", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(10.0, 7.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 2)
        _draw_classes(axes[0, 0], statistics)
        _draw_distribution(axes[0, 1], lengths)
        _draw_longest(axes[1, 0], batches)
        _draw_quadratic(axes[1, 1], batches)
        metadata = {"Date": None, "Creator": None} if is_svg else {"Software": None}
        figure.savefig(path, dpi=120, metadata=metadata)


def _draw_classes(axes: Any, statistics: LengthStatistics) -> None:
    classes = statistics.classes
    position = np.arange(len(classes))
    bars = (
        ("sequences", SEQUENCES, [own.num_sequences / statistics.num_sequences for own in classes]),
        ("tokens", TOKENS, [own.token_share for own in classes]),
        ("quadratic work", WORK, [own.quadratic_share for own in classes]),
    )
    for number, (name, colour, shares) in enumerate(bars):
        axes.bar(position + (number - 1) * 0.27, np.array(shares) * 100, 0.27, label=name, color=colour)
    axes.set_xticks(position, [_short(own.up_to) for own in classes], rotation=45)
    axes.set(title="Shares by length", xlabel="tokens, up to", ylabel="%")
    axes.legend()


def _draw_distribution(axes: Any, lengths: NDArray[np.int64]) -> None:
    ordered = np.sort(lengths)
    share = np.arange(1, len(ordered) + 1) / len(ordered) * 100
    axes.plot(ordered, share, color=SEQUENCES, label="sequences")
    axes.plot(ordered, np.cumsum(ordered) / ordered.sum() * 100, color=TOKENS, label="tokens")
    axes.set_xscale("log", base=2)
    axes.set(title="In sequences of at most so many tokens", xlabel="tokens", ylabel="%")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_longest(axes: Any, batches: Sequence[Sequence[int]]) -> None:
    longest = np.array([max(batch) for batch in batches], dtype=np.float64)
    axes.hist(longest, bins=min(30, max(5, len(batches) // 4)), color=SEQUENCES)
    axes.set(title=f"Longest sequence of each of {len(batches)} batches", xlabel="tokens", ylabel="batches")


def _draw_quadratic(axes: Any, batches: Sequence[Sequence[int]]) -> None:
    work = np.array([float((np.asarray(batch, dtype=np.float64) ** 2).sum()) for batch in batches])
    axes.hist(work / work.mean(), bins=min(30, max(5, len(batches) // 4)), color=WORK)
    axes.set(title="Quadratic work of each batch over their mean", xlabel="times the mean", ylabel="batches")


def _short(value: int) -> str:
    return f"{value // 1024}K" if value >= 1024 else str(value)
