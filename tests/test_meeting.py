"""A collective call that some rank does not make ends at once, with the ranks that do something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from hgraph.errors import HydraulisError
from runtime.calls import Call, waits_in
from runtime.cluster import ProcessCluster, SimulatedCluster
from runtime.meeting import meet
from tests.gloo_workers import GlooPool

SAVE = "save to runs/step-000003"
ADVICE = "it is collective: call it on every rank, not on rank 0 alone"
AT_ONCE_S = 2.0
"""How soon a rank that will not come must be named; one seen waiting, after two signs of life of a second each."""


def test_calls_in_words() -> None:
    assert Call.parse(str(Call(7, "save to a folder/step-000003"))) == Call(7, "save to a folder/step-000003")


@pytest.mark.parametrize(
    ("there", "ruled_out"),
    [
        (Call(0, ""), False),
        (Call(3, "step 3"), False),
        (Call(4, SAVE), False),
        (Call(4, "step 4"), True),
        (Call(4, "save to elsewhere"), True),
        (Call(5, "step 4"), True),
        (Call(3, "end"), True),
        (Call(4, "end"), False),
    ],
)
def test_who_may_still_come(there: Call, ruled_out: bool) -> None:
    assert there.rules_out(Call(4, SAVE)) == ruled_out


def test_simulated_ranks_are_all_there() -> None:
    meet(SimulatedCluster(4), SAVE)


def test_a_thread_that_waits_nowhere() -> None:
    assert waits_in(threading.get_ident()) == ""
    assert waits_in(-1) == ""


def others_step(cluster: ProcessCluster) -> None:
    cluster.enter("step 4")
    cluster.broadcast(None)


def others_end(cluster: ProcessCluster) -> None:
    cluster.close()


def others_wait_in_a_barrier(cluster: ProcessCluster) -> None:
    del cluster
    dist.barrier()


def others_gather(cluster: ProcessCluster) -> None:
    cluster.gather(None)


def two_load(cluster: ProcessCluster) -> None:
    if cluster.rank == 3:
        others_step(cluster)
    meet(cluster, "load from runs")


def rank_2_fails(cluster: ProcessCluster) -> None:
    if cluster.rank == 2:
        cluster.close(ValueError("no such file"))
        return
    time.sleep(3.0)
    meet(cluster, SAVE)


def save_on_rank_0(others: Callable[[ProcessCluster], None]) -> tuple[str, float]:
    """Returns the error of this rank, or that of the job, and the seconds until it came."""
    cluster = ProcessCluster(60.0)
    cluster.prepare([])
    cluster.enter("step 3")
    cluster.broadcast(None)
    start_s = time.monotonic()
    try:
        if cluster.rank == 0:
            meet(cluster, SAVE)
        else:
            others(cluster)
    except (HydraulisError, RuntimeError) as error:
        return f"{error}\n{cluster.channel.diagnose()}", time.monotonic() - start_s
    return "", time.monotonic() - start_s


ALONE = [
    (others_step, " called step 4", AT_ONCE_S),
    (others_end, " ended", AT_ONCE_S),
    (two_load, "called load from runs", AT_ONCE_S),
    (others_wait_in_a_barrier, f" in torch.distributed.barrier ({__file__}:", 2 * AT_ONCE_S),
    (others_gather, f" in torch.distributed.all_gather_object ({__file__}:", 2 * AT_ONCE_S),
]


@pytest.mark.gloo
@pytest.mark.case(116)
@pytest.mark.parametrize(("others", "text", "limit_s"), ALONE, ids=lambda value: getattr(value, "__name__", None))
def test_a_save_on_one_rank_names_at_once_what_the_others_do(
    gloo: GlooPool, others: Callable[[ProcessCluster], None], text: str, limit_s: float
) -> None:
    results = gloo.run(save_on_rank_0, others)
    error, seconds = results[0]
    head = error.partition(" did not call it (")[0]
    # Who has noted a call by then may be one of them or all; of two that call another thing each is enough.
    assert head.startswith(f"rank 0: {SAVE}: rank") and ADVICE in error
    assert text in error or (others is two_load and " called step 4" in error)
    assert seconds < limit_s
    if others is not others_end:
        assert all("first failure: rank" in error and "did not call it" in error for error, _ in results), "all raise"


@pytest.mark.gloo
@pytest.mark.case(116)
def test_a_rank_that_fails_elsewhere_is_named(gloo: GlooPool) -> None:
    error, seconds = gloo.run(save_on_rank_0, rank_2_fails)[0]
    assert "first failure: rank 2: ValueError: no such file" in error
    assert seconds < AT_ONCE_S


def all_come() -> float:
    """Some late, from a barrier of their own, right after one of all ranks."""
    cluster = ProcessCluster(60.0)
    cluster.prepare([])
    pair = dist.new_group([1, 2])
    dist.barrier()
    start_s = time.monotonic()
    if cluster.rank == 2:
        time.sleep(3.5)
    if cluster.rank in (1, 2):
        dist.barrier(group=pair)
    meet(cluster, SAVE)
    cluster.enter("step 4")
    seconds = time.monotonic() - start_s
    meet(cluster, "save to runs/step-000004")
    return seconds


@pytest.mark.gloo
@pytest.mark.case(116)
def test_ranks_that_come_late_are_awaited(gloo: GlooPool) -> None:
    assert all(seconds > 3.0 for seconds in gloo.run(all_come))


def one_is_too_late() -> str:
    cluster = ProcessCluster(1.0)
    if cluster.rank == 1:
        time.sleep(3.0)
        return ""
    try:
        meet(cluster, SAVE)
    except HydraulisError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_a_wait_ends_where_nobody_knows_what_a_rank_does(gloo: GlooPool) -> None:
    error = gloo.run(one_is_too_late, num_ranks=2)[0]
    assert f"(limit 1 s) for rank 1 to call {SAVE} too; {ADVICE}" in error
