"""What a strategy file can be checked against: the few facts of a model that do not need the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hgraph.errors import InvalidInput

__all__ = ["ModelFacts"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Counts and names of a model; names are as in `named_parameters()` and `named_modules()`.

    Invariants: counts are 1 or more; shapes are given for parameters that exist. Shapes may be left out.
    """

    num_layers: int
    num_query_heads: int
    parameter_names: tuple[str, ...]
    module_names: tuple[str, ...] = ()
    parameter_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameter_names", tuple(self.parameter_names))
        object.__setattr__(self, "module_names", tuple(self.module_names))
        if self.num_layers < 1 or self.num_query_heads < 1:
            raise InvalidInput(
                "model facts: expected at least one layer and one query head, "
                f"got num_layers={self.num_layers}, num_query_heads={self.num_query_heads}"
            )
        if unknown := sorted(set(self.parameter_shapes) - set(self.parameter_names)):
            raise InvalidInput(f"model facts: expected shapes of parameters only, got one for {unknown[0]!r}")
