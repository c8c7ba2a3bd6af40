"""The schemes that a proposal may use, as arrays, and why the others may not be used.

A *layout* says how many replicas of each scheme a strategy has: a tuple of counts in the table's order, T of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hgraph.errors import InvalidInput
from hgraph.profile import SchemeCost
from hgraph.strategy import Scheme

__all__ = ["Floats", "Ints", "Layout", "SchemeLimits", "SchemeTable", "layout_text", "scheme_table"]

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Layout: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SchemeLimits:
    """What a scheme must respect besides memory; None where it is not known.

    `heads` and `layers` must be divisible by tp and pp. A stage of more than `ranks_per_node` ranks needs a cost in
    `across` (schemes measured across nodes). `with_cp` allows context parallelism, which can be planned but not trained
    yet.
    """

    heads: int | None = None
    layers: int | None = None
    ranks_per_node: int | None = None
    across: frozenset[str] = frozenset()
    with_cp: bool = False

    def fault(self, scheme: Scheme, num_ranks: int) -> str | None:
        """Returns why `scheme` may not be used on `num_ranks` ranks, or None where it may."""
        if scheme.num_ranks > num_ranks:
            return f"needs {scheme.num_ranks} ranks, there are {num_ranks}"
        widest = max(stage.num_ranks for stage in scheme.stages)
        if max(stage.cp for stage in scheme.stages) > 1 and not self.with_cp:
            return "context parallelism can be planned, but not trained yet"
        if self.heads is not None and any(self.heads % stage.tp for stage in scheme.stages):
            return f"{self.heads} attention heads are not divisible by its tp"
        if self.layers is not None and scheme.stages[0].layers is None and self.layers % scheme.pp:
            return f"{self.layers} layers are not divisible by pp={scheme.pp}"
        if self.ranks_per_node is not None and widest > self.ranks_per_node and str(scheme) not in self.across:
            return f"a stage of {widest} ranks spans nodes of {self.ranks_per_node}, and that was not measured"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class SchemeTable:
    """Schemes with their costs, in one order: ranks of a replica, pp, a, b, c [ms], tokens per micro-batch."""

    schemes: tuple[Scheme, ...]
    size_T: Ints
    pp_T: Ints
    a_T: Floats
    b_T: Floats
    c_T: Floats
    limit_T: Ints

    def __len__(self) -> int:
        return len(self.schemes)

    def homogeneous(self, num_ranks: int) -> list[Layout]:
        """Returns the layouts of equal replicas that leave no rank idle."""
        unit = np.eye(len(self), dtype=np.int64)
        return [
            tuple((unit[t] * (num_ranks // size)).tolist())
            for t, size in enumerate(self.size_T.tolist())
            if num_ranks % size == 0
        ]

    def floors_ms(self, layouts: Sequence[Layout], length: int) -> Floats:
        """Returns what a sequence takes alone in each layout, in ms: pp (f + c) on the best scheme it has."""
        alone_T = self.pp_T * ((self.a_T * length + self.b_T) * length + self.c_T)
        able_ST = (np.array(layouts) > 0) & (self.limit_T >= length)
        return np.asarray(np.where(able_ST, alone_T, np.inf).min(axis=1))

    def num_ranks(self, layout: Layout) -> int:
        """Returns the ranks of all replicas of a layout."""
        return int(self.size_T @ np.array(layout))

    def holds(self, layout: Layout) -> int:
        """Returns the longest sequence that a layout can hold."""
        return int((self.limit_T * (np.array(layout) > 0)).max())


def scheme_table(
    schemes: Mapping[Scheme, SchemeCost], num_ranks: int, limits: SchemeLimits
) -> tuple[SchemeTable, dict[str, str]]:
    """Returns the table of what may be used on `num_ranks` ranks, small replicas first, and why the rest may not.

    Raises `InvalidInput` where nothing is left.
    """
    faults = {str(scheme): limits.fault(scheme, num_ranks) for scheme in schemes}
    left_out = {name: fault for name, fault in faults.items() if fault is not None}
    used = sorted(
        (scheme for scheme in schemes if faults[str(scheme)] is None),
        key=lambda scheme: (scheme.num_ranks, scheme.pp, str(scheme)),
    )
    if not used:
        reasons = "; ".join(f"{name}: {fault}" for name, fault in left_out.items()) or "the profile has none that fits"
        raise InvalidInput(f"propose: expected at least one scheme that can be used, got none ({reasons})")
    costs = [schemes[scheme] for scheme in used]
    table = SchemeTable(
        tuple(used),
        np.array([scheme.num_ranks for scheme in used], dtype=np.int64),
        np.array([scheme.pp for scheme in used], dtype=np.int64),
        np.array([cost.a for cost in costs]),
        np.array([cost.b for cost in costs]),
        np.array([cost.c for cost in costs]),
        np.array([cost.max_tokens for cost in costs], dtype=np.int64),
    )
    return table, left_out


def layout_text(schemes: Sequence[Scheme], layout: Layout) -> str:
    """Returns a layout as a name: `tp8+tp4x14`, large replicas first."""
    used = sorted(
        ((scheme, count) for scheme, count in zip(schemes, layout, strict=True) if count),
        key=lambda item: (-item[0].num_ranks, item[0].pp, str(item[0])),
    )
    return "+".join(str(scheme) + (f"x{count}" if count > 1 else "") for scheme, count in used)
