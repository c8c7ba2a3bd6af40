"""The least possible greatest load of a sender, a receiver or a link, for bundles on a cluster: a linear program.

What every plan must lay on whom are the demands of `strategies/load_demands.py`: demand j asks the members A_j of a
kind of resource (ranks, network ports, nodes; sending or receiving) for d_j elements, of each at most u_j. Then

    minimise z
    y_jm >= 0, y_jm = 0 unless m in A_j     `borne`: what member m bears of demand j
    y_jm <= u_j                             `within_caps`
    sum_m y_jm = d_j                        `met`
    sum_j y_jm <= z                         `loads`

**It is a lower bound.** A plan of the kind considered meets every demand by transfers of its own (load_demands proves
it), so y = what each member bears of them satisfies all rows with z = the plan's greatest load: the optimum cannot be
above that. Plans that cut a bundle and send its parts by different ways are covered too, rows being convex.

**A solver is not believed.** For any weights w_m >= 0 that add up to 1, z is at least the mean of the loads under w,
and so at least

    sum_j min { sum_m w_m y_jm : 0 <= y_jm <= u_j, sum_m y_jm = d_j }                     `certificate`

where each minimum fills the members of A_j from the least weight upwards. The number returned is that certificate, for
the weights that the program's duals give (its optimum then, by duality) or equal weights where the solver failed. A
solver that errs weakens the bound and cannot make it wrong. Members that no demand ties together are separate programs,
and z is the greatest of theirs. Programs of more than `MAX_PAIRS` (demand, member) pairs are not solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hgraph.bundles import Bundle
from hgraph.lower_bound import LowerBound
from hgraph.topology import Topology
from strategies.load_demands import Demand, Demands, find_demands
from strategies.solver import solve_with_highs

__all__ = ["MAX_PAIRS", "LeastLoad", "certificate", "greatest_load", "least_loads"]

MAX_PAIRS = 100_000
TOLERANCE = 1e-9

Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LeastLoad:
    """No plan's greatest load is below `num_elements`; `is_optimum` says that the program was solved to the end."""

    num_elements: float
    is_optimum: bool


def least_loads(bundles: Sequence[Bundle], topology: Topology, least: LowerBound | None = None) -> dict[str, LeastLoad]:
    """Returns the least greatest load of each resource in elements, by the names of `hgraph.traffic.Traffic.loads`.

    Each number is the least for that resource by itself. `least` is `lower_bound(bundles, topology)`, if it is known.
    """
    demands = find_demands(bundles, topology, least)
    ranks = list(range(topology.num_ranks))
    ports, nodes = topology.port_of().tolist(), list(topology.node_of)

    def least_of(found: Demands, member_of: Sequence[int]) -> LeastLoad:
        return greatest_load(found.on(member_of))

    return {
        "network sender": least_of(demands.network_out, ranks),
        "network receiver": least_of(demands.network_in, ranks),
        "port sender": least_of(demands.network_out, ports),
        "port receiver": least_of(demands.network_in, ports),
        "node sender": least_of(demands.network_out, nodes),
        "node receiver": least_of(demands.network_in, nodes),
        "local sender": least_of(demands.local_out, ranks),
        "local receiver": least_of(demands.local_in, ranks),
    }


def greatest_load(demands: Sequence[Demand]) -> LeastLoad:
    """Returns the least greatest load of a member under `demands`: the greatest over programs that share no member.

    A program whose demands, spread evenly, load nobody more than what is proven for another one is left out.
    """
    parts = sorted(map(_Part, _parts(demands)), key=lambda part: -part.at_least)
    proven = max((part.at_least for part in parts), default=0.0)
    is_optimum = True
    for part in parts:
        if part.at_most > proven * (1 + TOLERANCE):
            found = _solve(part)
            proven = max(proven, found.num_elements)
            is_optimum &= found.is_optimum
    return LeastLoad(proven, is_optimum)


def _parts(demands: Sequence[Demand]) -> list[list[Demand]]:
    """Returns `demands` in parts that share no member."""
    first: dict[int, int] = {}

    def root(member: int) -> int:
        while first.setdefault(member, member) != member:
            first[member] = member = first[first[member]]
        return member

    for demand in demands:
        for member in demand.members[1:]:
            first[root(member)] = root(demand.members[0])
    parts: dict[int, list[Demand]] = {}
    for demand in demands:
        parts.setdefault(root(demand.members[0]), []).append(demand)
    return list(parts.values())


class _Part:
    """Demands as a table: row j may load the columns (members) of `allowed[j]`, `caps[j]` each, `amounts[j]` in all."""

    def __init__(self, demands: Sequence[Demand]) -> None:
        members = sorted({member for demand in demands for member in demand.members})
        column = {member: at for at, member in enumerate(members)}
        self.allowed = np.zeros((len(demands), len(members)), dtype=bool)
        for row, demand in enumerate(demands):
            self.allowed[row, [column[member] for member in demand.members]] = True
        self.amounts = np.array([demand.amount for demand in demands], dtype=np.float64)
        self.caps = np.array([demand.cap for demand in demands], dtype=np.float64)
        self.at_least = self.certificate(np.ones(len(members)))

    @property
    def at_most(self) -> float:
        """The greatest load where each demand is spread evenly, which no cap forbids."""
        return float((self.amounts / self.allowed.sum(axis=1) @ self.allowed).max())

    def certificate(self, weights: Floats) -> float:
        return certificate(self.allowed, self.amounts, self.caps, weights)


def _solve(part: _Part) -> LeastLoad:
    if part.allowed.size > MAX_PAIRS:
        return LeastLoad(part.at_least, False)
    weights, is_optimum = _LoadProgram(part).weights()
    if weights is None:
        return LeastLoad(part.at_least, False)
    return LeastLoad(max(part.at_least, part.certificate(weights)), is_optimum)


def certificate(allowed: NDArray[np.bool_], amounts: Floats, caps: Floats, weights: Floats) -> float:
    """Returns the bound that any non-negative `weights` of the members prove; 0 where all are 0."""
    total = weights.sum()
    if not total > 0:
        return 0.0
    bound = 0.0
    order = np.argsort(weights, kind="stable")
    sorted_weights = weights[order] / total
    for row, amount, cap in zip(allowed[:, order], amounts, caps, strict=True):
        costs = sorted_weights[row]
        filled = np.clip(amount - cap * np.arange(len(costs)), 0, cap)
        bound += float(filled @ costs)
    return bound


class _LoadProgram:
    """The linear program of one part, in units of its greatest demand."""

    def __init__(self, part: _Part) -> None:
        import cvxpy as cp

        unit = float(part.amounts.max())
        self.greatest = cp.Variable()
        self.borne = cp.Variable(part.allowed.shape, nonneg=True)
        self.loads = cp.sum(self.borne, axis=0) <= self.greatest
        within_caps = self.borne <= part.allowed * (part.caps / unit)[:, None]
        met = cp.sum(self.borne, axis=1) == part.amounts / unit
        constraints = [within_caps, met, self.loads]
        self.program = cp.Problem(cp.Minimize(self.greatest), constraints)

    def weights(self) -> tuple[Floats | None, bool]:
        """Returns the duals of the loads, which are the weights of the bound, and whether they are optimal."""
        import cvxpy as cp

        try:
            solve_with_highs(self.program)
        except (cp.error.SolverError, ValueError, ArithmeticError):
            return None, False
        if self.program.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE) or self.loads.dual_value is None:
            return None, False
        duals = np.clip(np.nan_to_num(np.asarray(self.loads.dual_value, dtype=np.float64)), 0, None)
        return duals, self.program.status == cp.OPTIMAL
