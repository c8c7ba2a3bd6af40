"""Routes as values: which rank sends each bundle to which, in which order.

Four levels run one after another:

0. sums inside a node; 1. sums to the root; 2. copies from holders and roots; 3. copies inside a node.

Levels 1 and 2 cross the network, or lead between a root or holder and the rank beside it that sums or copies for it (a
*relay*, `hgraph/route_chains.py`). The *root* of a bundle is the receiver where its terms meet. Planned by
`find_routes`, proved by `check_routes`.

Invariants
----------
- Transfers are in ascending order of level, then of bundle.
- All copies that one rank sends another go in one level, and so do all sums.
- Only holders and receivers of a bundle carry it.
- A sender has what it sends: its own term or value, a sum of an earlier level, or a value that came earlier.
- Every term reaches the root once; every receiver gets the value once, and none that holds it.
- A copy crosses into a node at most once, and not into a node that has it; a node sends one sum of a bundle to the
  root, if the bundle is not direct.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy

__all__ = ["NUM_LEVELS", "SCRATCH", "SOURCE", "TARGET", "Integers", "Routes"]

Integers: TypeAlias = numpy.ndarray
NUM_LEVELS = 4
SOURCE, TARGET, SCRATCH = 0, 1, 2
"""Where a sender reads: its source buffer, its target buffer, or what it has summed for others."""


@dataclass(frozen=True, slots=True)
class Routes:
    """Transfers between ranks, one per entry of the arrays.

    `bundle`, `sender`, `receiver`, `level`, `origin` (`SOURCE`, `TARGET` or `SCRATCH`) and `combines` (whether it adds
    to what the receiver has) have one value per transfer. A receiver of level 0 adds to its scratch buffer, which has
    its own term, or to its target where it is the bundle's root (`roots`, -1 where nothing is summed); level 1 adds to
    the root's target; levels 2 and 3 write the target. Transfers that combine take effect in the order of the arrays.
    """

    bundle: Integers
    sender: Integers
    receiver: Integers
    level: Integers
    origin: Integers
    combines: Integers
    roots: Integers

    def __len__(self) -> int:
        return len(self.bundle)

    @property
    def into_scratch(self) -> Integers:
        """Per transfer, whether the receiver sums in its scratch buffer."""
        return (self.level == 0) & (self.receiver != self.roots[self.bundle])
