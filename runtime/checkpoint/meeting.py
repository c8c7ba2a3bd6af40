"""Meetings: a collective call that some rank never makes ends in an error that names the rank, not in a hang."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hgraph.errors import RankFailed
from runtime.cluster import Cluster, ProcessCluster

__all__ = ["meet"]

_POLL_S = 0.005


def meet(cluster: Cluster, what: str, number: int) -> None:
    """Returns once every rank has come here with the same `what` and `number`.

    Raises `RankFailed` after the cluster's timeout, or as soon as another rank is known to have failed.
    """
    if not isinstance(cluster, ProcessCluster):
        return
    store = PrefixStore(f"meeting {what} {number}", dist.distributed_c10d._get_default_store())
    store.set(str(cluster.rank), "here")
    start_s = time.monotonic()
    missing = list(range(cluster.num_ranks))
    while True:
        missing = [rank for rank in missing if not store.check([str(rank)])]
        if not missing:
            return
        waited_s = time.monotonic() - start_s
        failure = cluster.channel.first_failure() if cluster.channel is not None else None
        if waited_s > cluster.timeout_s or failure is not None:
            raise RankFailed(_text(cluster, what, missing, waited_s) + (f"\n  {failure}" if failure else ""))
        time.sleep(_POLL_S)


def _text(cluster: ProcessCluster, what: str, missing: list[int], waited_s: float) -> str:
    ranks = ", ".join(map(str, missing))
    return (
        f"rank {cluster.rank}: waited {waited_s:.1f} s (limit {cluster.timeout_s:g} s) for rank"
        f"{'s' if len(missing) > 1 else ''} {ranks} to call {what} too; it is collective: call it on every rank, not "
        "on rank 0 alone"
    )
