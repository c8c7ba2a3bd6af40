"""Process groups: joining the job, and the groups of a program, created once before its first step."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hgraph.errors import InvalidInput, PlanError

__all__ = ["ProcessGroups", "create_groups", "init_process_group_from_env"]

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_process_group_from_env(backend: str = "gloo", timeout_s: float = 300.0) -> tuple[int, int]:
    """Joins the job that torchrun started, with one thread per rank; returns (rank, number of ranks).

    Raises `InvalidInput` where the variables that torchrun sets are missing.
    """
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise InvalidInput(
            f"start-up: expected the variables that torchrun sets, {', '.join(missing)} not set; "
            f"start with torchrun --nproc-per-node N"
        )
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The process groups of one program on this rank.

    Attributes: `by_ranks`, ascending ranks -> group, only those that hold this rank; `pairs`, the group of all ranks
    that carries messages of pairs; `timeout_s`, how long anything in these groups may wait.
    """

    rank: int
    num_ranks: int
    backend: str
    timeout_s: float
    pairs: dist.ProcessGroup
    by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup]

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Returns the process group of `ranks`, in whatever order they are given."""
        try:
            return self.by_ranks[tuple(sorted(ranks))]
        except KeyError:
            known = ", ".join(str(list(group)) for group in self.by_ranks) or "none"
            raise PlanError(
                f"process groups: ranks {list(ranks)} were not announced before the first step; there are {known}"
            ) from None

    def destroy(self) -> None:
        """Closes the groups of this rank."""
        for group in (*self.by_ranks.values(), self.pairs):
            dist.destroy_process_group(group)


def create_groups(groups: Iterable[tuple[int, ...]], timeout_s: float) -> ProcessGroups:
    """Creates the groups of all ranks in one order; collective, so every rank gives the same `groups`.

    Groups in another order of ranks share one process group; groups of one rank need none.
    """
    num_ranks = dist.get_world_size()
    wanted = sorted({tuple(sorted(group)) for group in groups if len(group) > 1}, key=lambda group: (len(group), group))
    for group in wanted:
        if len(set(group)) != len(group) or group[0] < 0 or group[-1] >= num_ranks:
            raise InvalidInput(f"process groups: expected distinct ranks below {num_ranks}, got {list(group)}")
    timeout = timedelta(seconds=timeout_s)
    rank = dist.get_rank()
    pairs = dist.new_group(list(range(num_ranks)), timeout=timeout)
    created = {group: dist.new_group(list(group), timeout=timeout) for group in wanted}
    mine = {group: handle for group, handle in created.items() if rank in group}
    return ProcessGroups(rank, num_ranks, dist.get_backend(), timeout_s, pairs, mine)
