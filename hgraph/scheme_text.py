"""Schemes as text, read back: `tp2`, `tp4.cp2.pp2`, `tp1.pp2(3,1)`, `tp3+tp1(2,1)`, `tp2.pp2:gpipe`.

`str(scheme)` writes it; this is the other direction.
"""

from __future__ import annotations

import re

from hgraph.errors import InvalidInput
from hgraph.strategy import Override, Scheme, Stage

__all__ = ["parse_scheme"]

_DEGREES = r"tp[1-9]\d*(?:\.cp[1-9]\d*)?"
_SCHEME = re.compile(
    rf"(?P<stages>{_DEGREES}(?:\+{_DEGREES})*)(?:\.pp(?P<pp>[1-9]\d*))?"
    r"(?:\((?P<layers>\d+(?:,\d+)*)\))?(?P<gpipe>:gpipe)?(?P<overrides>\[.*\])?",
    re.DOTALL,
)
_EXPECTED = "a scheme such as tp2, tp4.cp2.pp2, tp1.pp2(3,1) or tp3+tp1(2,1)"
_MOST_STAGES = 4096


def parse_scheme(text: str) -> Scheme:
    """Returns the scheme whose text is `text`; raises `InvalidInput` for anything that no scheme is written as."""
    match = _SCHEME.fullmatch(text)
    if match is None:
        raise InvalidInput(f"scheme: expected {_EXPECTED}, got {text!r}")
    degrees = [_degrees(part) for part in match["stages"].split("+")]
    pp = int(match["pp"] or 1)
    if pp > _MOST_STAGES:
        raise InvalidInput(f"scheme: expected at most {_MOST_STAGES} stages, got {text!r}")
    layers = [int(part) for part in match["layers"].split(",")] if match["layers"] else None
    stages = degrees if len(degrees) > 1 else degrees * pp
    if layers is not None and len(layers) != len(stages):
        raise InvalidInput(f"scheme: expected {len(stages)} layer counts, one per stage, got {text!r}")
    counts: list[int | None] = [None] * len(stages) if layers is None else [*layers]
    scheme = Scheme(
        tuple(Stage(tp, count, cp) for (tp, cp), count in zip(stages, counts, strict=True)),
        "gpipe" if match["gpipe"] else "1f1b",
        _overrides(match["overrides"] or "", text),
    )
    if str(scheme) != text:
        raise InvalidInput(f"scheme: expected {_EXPECTED}, got {text!r}; did you mean {str(scheme)!r}?")
    return scheme


def _degrees(text: str) -> tuple[int, int]:
    tp, _, cp = text.partition(".cp")
    return int(tp.removeprefix("tp")), int(cp or 1)


def _overrides(text: str, whole: str) -> tuple[Override, ...]:
    """Returns the overrides of `[pattern=annotation][...]`; annotations have brackets of their own."""
    found, start, depth = [], 0, 0
    for position, letter in enumerate(text):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth:
            continue
        pattern, equals, annotation = text[start + 1 : position].partition("=")
        if letter != "]" or not equals:
            raise InvalidInput(f"scheme: expected overrides such as [layers.1.mlp=0-1[S(0)]], got {whole!r}")
        found.append(Override(pattern, annotation))
        start = position + 1
    return tuple(found)
