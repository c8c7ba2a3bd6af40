"""Draws the ladder: mean step time of each system with its interval, and speed-up over the static baseline."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hgraph.errors import InvalidInput

if TYPE_CHECKING:
    from strategies.ladder import LadderResult

__all__ = ["draw_ladder"]

_RUNG, _BESIDE = "#3b74c0", "#8393a3"


def draw_ladder(path: str | os.PathLike[str], result: LadderResult, title: str) -> None:
    """Writes the picture to `path`; its ending chooses the format (`.png`, `.svg` or `.pdf`)."""
    if os.path.splitext(os.fspath(path))[1] not in (".png", ".svg", ".pdf"):
        raise InvalidInput(f"{os.fspath(path)}: expected a picture's ending, .png, .svg or .pdf")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from strategies.ladder import REFERENCE

    systems = result.systems
    figure = Figure(figsize=(10, 0.45 * len(systems) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    means = [one.mean() for one in systems]
    places = range(len(systems))
    errors = [[mean.value - mean.low for mean in means], [mean.high - mean.value for mean in means]]
    colours = [_RUNG if one.is_rung else _BESIDE for one in systems]
    axes.barh(places, [mean.value for mean in means], xerr=errors, color=colours, error_kw={"elinewidth": 1.2})
    axes.set_yticks(places, [one.title for one in systems])
    axes.invert_yaxis()
    if REFERENCE in {one.key for one in systems}:
        for place, one, mean in zip(places, systems, means, strict=True):
            speed = result.speed_up(one.key)
            axes.text(mean.high, place, f"  {speed.value:.2f}x", va="center", fontsize=9)
    axes.margins(x=0.12)
    axes.set_xlabel("mean step time [ms] with 95 % interval; blue: the ladder")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, metadata={"Date": None} if os.fspath(path).endswith(".svg") else None)
