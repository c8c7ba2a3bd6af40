"""Places clusters on a grid and routes the lines between them through the gutters, so that no line crosses a node.

A line leaves its cluster at the bottom, turns into the gutter below, changes column in a vertical gutter where it must,
and enters its target from the gutter above. Every line has its own track in each gutter that it uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hgraph.pictures.svg import Point

__all__ = ["Cell", "Grid", "Net", "Route", "make_grid", "route_nets"]

_GUTTER = 26.0
_TRACK = 9.0


@dataclass(frozen=True, slots=True)
class Cell:
    """A cluster on the grid and the size of its frame."""

    column: int
    row: int
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Net:
    """A line from the bottom of cell `source`, at `exit_x` in its frame, to the top of cell `target`, at `entry_x`."""

    source: str
    target: str
    exit_x: float
    entry_x: float


@dataclass(frozen=True, slots=True)
class Route:
    """The (gutter, track) of a line below its source and, where needed, in a column and above its target."""

    below: tuple[int, int]
    column: tuple[int, int] | None
    above: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Grid:
    """Left and top of each cell, left of each column gutter, top of each row gutter, and the size of the whole."""

    cells: Mapping[str, Cell]
    origin: Mapping[str, Point]
    column_gutter_x: tuple[float, ...]
    row_gutter_y: tuple[float, ...]
    width: float
    height: float

    def points(self, net: Net, route: Route) -> list[Point]:
        """Returns the corners of a line."""
        source, target = self.origin[net.source], self.origin[net.target]
        start = (source[0] + net.exit_x, source[1] + self.cells[net.source].height)
        end = (target[0] + net.entry_x, target[1])
        below_y = self._row_y(route.below)
        if route.column is None or route.above is None:
            return [start, (start[0], below_y), (end[0], below_y), end]
        column_x = self.column_gutter_x[route.column[0]] + _GUTTER / 2 + route.column[1] * _TRACK
        above_y = self._row_y(route.above)
        down = [start, (start[0], below_y), (column_x, below_y)]
        return [*down, (column_x, above_y), (end[0], above_y), end]

    def _row_y(self, place: tuple[int, int]) -> float:
        return self.row_gutter_y[place[0]] + _GUTTER / 2 + place[1] * _TRACK


def route_nets(cells: Mapping[str, Cell], nets: Sequence[Net]) -> list[Route]:
    """Returns gutters and tracks for every line."""
    used: Counter[tuple[str, int]] = Counter()

    def track(kind: str, gutter: int) -> tuple[int, int]:
        used[kind, gutter] += 1
        return gutter, used[kind, gutter] - 1

    routes = []
    for net in nets:
        source, target = cells[net.source], cells[net.target]
        below = track("row", source.row + 1)
        if target.row == source.row + 1:
            routes.append(Route(below, None, None))
            continue
        gutter = target.column if target.column > source.column else target.column + 1
        routes.append(Route(below, track("column", gutter), track("row", target.row)))
    return routes


def make_grid(cells: Mapping[str, Cell], routes: Sequence[Route]) -> Grid:
    """Returns the places of cells, each centred in its column, with gutters as wide as their tracks need."""
    num_columns = max((cell.column for cell in cells.values()), default=-1) + 1
    num_rows = max((cell.row for cell in cells.values()), default=-1) + 1
    column_tracks = Counter(route.column[0] for route in routes if route.column)
    row_tracks = Counter(place[0] for route in routes for place in (route.below, route.above) if place)
    widths = [
        max((c.width for c in cells.values() if c.column == column), default=0.0) for column in range(num_columns)
    ]
    heights = [max((c.height for c in cells.values() if c.row == row), default=0.0) for row in range(num_rows)]
    gutter_x, column_x, width = _stack(widths, column_tracks)
    gutter_y, row_y, height = _stack(heights, row_tracks)
    origin = {
        name: (column_x[cell.column] + (widths[cell.column] - cell.width) / 2, row_y[cell.row])
        for name, cell in cells.items()
    }
    return Grid(cells, origin, tuple(gutter_x), tuple(gutter_y), width, height)


def _stack(sizes: Sequence[float], tracks: Counter[int]) -> tuple[list[float], list[float], float]:
    """Returns where each gutter and each band between gutters begins, and where the last gutter ends."""
    gutters, bands, place = [], [], 0.0
    for index in range(len(sizes) + 1):
        gutters.append(place)
        outer_and_empty = index in (0, len(sizes)) and not tracks[index]
        place += 0.0 if outer_and_empty else _GUTTER + max(tracks[index] - 1, 0) * _TRACK
        if index < len(sizes):
            bands.append(place)
            place += sizes[index]
    return gutters, bands, place
