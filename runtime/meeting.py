"""Meetings: a collective call that some rank does not make ends in an error that names the rank, not in a hang."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch._C._distributed_c10d import PrefixStore

from hgraph.errors import RankFailed
from runtime.calls import Call
from runtime.cluster import Cluster, ProcessCluster

__all__ = ["meet"]

_POLL_S = 0.005
_ASK_S = 0.1
"""How often a waiting rank asks what the others do."""
_BEATS = 2
"""Signs of life in a collective before a rank counts as stuck there: at first it may be leaving an earlier one."""
_ADVICE = "it is collective: call it on every rank, not on rank 0 alone"


def meet(cluster: Cluster, what: str) -> None:
    """Enters the call `what`, and returns once every rank has entered it too.

    Raises `RankFailed` with the ranks that do not come: at once where one has entered another call, is in a collective
    of all ranks elsewhere, has ended or has failed, else after the cluster's timeout.
    """
    cluster.enter(what)
    if not isinstance(cluster, ProcessCluster):
        return
    with cluster.communicating(), cluster.calls.asking():
        _Meeting(cluster).wait()


class _Meeting:
    """One rank's wait for the others to enter its last call."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self.cluster, self.call = cluster, cluster.calls.last
        self._arrivals = PrefixStore("meetings", cluster.calls.store)
        self._beats: dict[int, list[str]] = {}

    def wait(self) -> None:
        key = str(self.call.number)
        arrived = self._arrivals.add(key, 1)
        start_s = asked_s = time.monotonic()
        while arrived < self.cluster.num_ranks:
            time.sleep(_POLL_S)
            now_s = time.monotonic()
            fault = ""
            if now_s - asked_s > _ASK_S:
                asked_s = now_s
                fault = self._fault(now_s - start_s)
            # Counted after asking: a rank that has come and gone on is not taken for one that did not come.
            arrived = self._arrivals.add(key, 0)
            if fault and arrived < self.cluster.num_ranks:
                raise RankFailed(fault)

    def _fault(self, waited_s: float) -> str:
        """Why the wait ends here; nothing while the others may still come."""
        calls = self.cluster.calls.of(range(self.cluster.num_ranks))
        missing = [
            rank for rank, call in enumerate(calls) if call.rules_out(self.call) or call.number < self.call.number
        ]
        excuses = self._excuses(calls)
        failure = self.cluster.channel.first_failure()
        if not excuses and failure is None and waited_s <= self.cluster.timeout_s:
            return ""
        text = self._refusal(missing, excuses) if excuses else self._late(missing, waited_s)
        return text + (f"\n  {failure}" if failure else "")

    def _excuses(self, calls: Sequence[Call]) -> Mapping[int, str]:
        """What keeps each rank that will not come; nothing of those that still may."""
        excuses = {
            rank: "ended" if call.has_ended else f"called {call.name}"
            for rank, call in enumerate(calls)
            if call.rules_out(self.call)
        }
        missing = [rank for rank, call in enumerate(calls) if call.number < self.call.number and rank not in excuses]
        for rank, (beat, place) in zip(missing, self.cluster.channel.signs_of(missing), strict=True):
            seen = self._beats.setdefault(rank, [beat])
            if beat != seen[-1]:
                self._beats[rank] = seen = [*seen, beat] if place else [beat]
            if place and len(seen) > _BEATS:
                excuses[rank] = f"in {place}"
        return excuses

    def _refusal(self, missing: Sequence[int], excuses: Mapping[int, str]) -> str:
        texts: dict[str, list[int]] = {}
        for other, excuse in excuses.items():
            texts.setdefault(excuse, []).append(other)
        known = ", ".join(f"{_ranks(ranks)} {excuse}" for excuse, ranks in texts.items())
        return f"rank {self.cluster.rank}: {self.call.name}: {_ranks(missing)} did not call it ({known}); {_ADVICE}"

    def _late(self, missing: Sequence[int], waited_s: float) -> str:
        return (
            f"rank {self.cluster.rank}: waited {waited_s:.1f} s (limit {self.cluster.timeout_s:g} s) for "
            f"{_ranks(missing)} to call {self.call.name} too; {_ADVICE}"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
