"""Proves routes, whoever made them, by running them on symbols: each rank has a multiset of a bundle's terms.

Nothing here knows how `find_routes` works. The properties are the invariants of `hgraph/route_plan.py`; a message names
the broken one: *ordered*, *carried*, *held*, *complete*, *crossing once* or *one level per pair*.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

from hgraph.bundles import Bundle
from hgraph.errors import PlanError
from hgraph.route_plan import SCRATCH, SOURCE, TARGET, Routes
from hgraph.topology import Topology

__all__ = ["check_routes"]

_NAMES = {SOURCE: "source", TARGET: "target", SCRATCH: "scratch"}


class _Transfer(NamedTuple):
    level: int
    sender: int
    receiver: int
    origin: int
    combines: bool


def check_routes(routes: Routes, bundles: Sequence[Bundle], topology: Topology) -> None:
    """Proves that `routes` give every receiver of every bundle its value; raises `PlanError` on a broken property."""
    order = list(zip(routes.level.tolist(), routes.bundle.tolist(), strict=True))
    if order != sorted(order):
        raise PlanError("routes are not ordered: expected transfers in ascending order of level, then of bundle")
    columns = (routes.level, routes.sender, routes.receiver, routes.origin, routes.combines)
    transfers: dict[int, list[_Transfer]] = {}
    for bundle, *fields in zip(routes.bundle.tolist(), *(column.tolist() for column in columns), strict=True):
        transfers.setdefault(bundle, []).append(_Transfer(*fields))
    for number, bundle in enumerate(bundles):
        check = _Check(number, bundle, int(routes.roots[number]), topology)
        check.run(transfers.get(number, []))
        check.complete()
    _check_levels_of_pairs(routes)


def _check_levels_of_pairs(routes: Routes) -> None:
    levels: dict[tuple[bool, int, int], int] = {}
    columns = (routes.level, routes.sender, routes.receiver)
    for level, sender, receiver in zip(*(column.tolist() for column in columns), strict=True):
        known = levels.setdefault((level < 2, sender, receiver), level)
        if known != level:
            kind = "sums" if level < 2 else "copies"
            raise PlanError(
                f"routes are not one level per pair: expected {kind} from rank {sender} to rank {receiver} in one "
                f"level, got levels {known} and {level}"
            )


class _Check:
    """What the ranks have of one bundle: by rank, the terms in the source, target and scratch buffer."""

    def __init__(self, number: int, bundle: Bundle, root: int, topology: Topology) -> None:
        self.number, self.bundle, self.root, self.topology = number, bundle, root, topology
        self.whole = tuple(range(len(bundle.terms)))
        own: dict[int, tuple[int, ...]] = {rank: (term,) for term, ranks in enumerate(bundle.terms) for rank in ranks}
        self.has: dict[int, dict[int, tuple[int, ...]]] = {SOURCE: own, TARGET: {}, SCRATCH: {}}
        if bundle.in_target:
            self.has = {SOURCE: {}, TARGET: own, SCRATCH: {}}
        elif bundle.is_copy:
            self.has[TARGET] = {rank: own[rank] for rank in bundle.receivers if rank in own}
        elif root in own:
            self.has[TARGET] = {root: own[root]}

    def fail(self, name: str, message: str) -> NoReturn:
        raise PlanError(f"routes are not {name}: {message}; bundle {self.number} is {self.bundle}")

    def run(self, transfers: Sequence[_Transfer]) -> None:
        carriers = {*itertools.chain(*self.bundle.terms), *self.bundle.receivers}
        for transfer in transfers:
            if not carriers.issuperset((transfer.sender, transfer.receiver)):
                self.fail("carried by holders and receivers alone", f"{transfer}")
        self._check_crossings(transfers)
        for _, level in itertools.groupby(transfers, key=lambda transfer: transfer.level):
            self._run_level(list(level))

    def _run_level(self, transfers: Iterable[_Transfer]) -> None:
        values = [(transfer, self._value(transfer)) for transfer in transfers]
        for transfer, value in values:
            into = SCRATCH if transfer.level == 0 and transfer.receiver != self.root else TARGET
            buffer = self.has[into]
            if into == SCRATCH and transfer.receiver in self.has[SOURCE]:
                buffer.setdefault(transfer.receiver, self.has[SOURCE][transfer.receiver])
            before = buffer.get(transfer.receiver)
            if (before is not None) != transfer.combines:
                there = "nothing" if before is None else f"terms {before}"
                self.fail("complete", f"{transfer} meets {there} in the {_NAMES[into]} buffer of its receiver")
            buffer[transfer.receiver] = tuple(sorted((*(before or ()), *value)))

    def _value(self, transfer: _Transfer) -> tuple[int, ...]:
        value = self.has[transfer.origin].get(transfer.sender)
        if value is None:
            self.fail("held", f"the sender of {transfer} has nothing in its {_NAMES[transfer.origin]} buffer")
        return value

    def complete(self) -> None:
        """Checks what the receivers have at the end."""
        for rank in self.bundle.receivers:
            found = self.has[TARGET].get(rank, ())
            if found != self.whole:
                self.fail("complete", f"expected terms {self.whole} once on rank {rank}, got {found}")

    def _check_crossings(self, transfers: Sequence[_Transfer]) -> None:
        node_of = self.topology.node_of
        network = [t for t in transfers if node_of[t.sender] != node_of[t.receiver]]
        into = Counter(node_of[t.receiver] for t in network if t.level > 1)
        into.update({node_of[rank] for rank in (self.bundle.terms[0] if self.bundle.is_copy else (self.root,))})
        out_of = Counter(node_of[t.sender] for t in network if t.level < 2)
        for node, count in into.items():
            if count > 1:
                self.fail("crossing once", f"copies cross {count} times into node {node}, or it has the value itself")
        for node, count in out_of.items():
            if count > 1 and not self.bundle.direct:
                self.fail("crossing once", f"node {node} sends {count} sums to the root")
