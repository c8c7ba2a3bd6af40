"""Real processes: the same requests and the same log as on the virtual cluster; every wait ends and says for what."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hgraph.errors import InvalidInput
from runtime.failure_channel import FailureChannel, rank_guard
from runtime.gloo import ProcessTransport
from runtime.messages import Message
from runtime.process_groups import create_groups, init_process_group_from_env
from runtime.requests import AllReduce, Await, Exchange, Join, RankGenerator, Receive, Send, Start
from runtime.virtual_cluster import VirtualCluster
from tests.gloo_workers import GlooPool, WorkersFailed, process_context
from tests.request_programs import DTYPES, GROUPS, check_results, check_tasks, every_request, tasks_and_posts

pytestmark = pytest.mark.gloo


def drive_all(programs: list[tuple[tuple[int, ...], torch.dtype]]) -> list[tuple[Any, list[Message]]]:
    """Returns result and log of `every_request` for each group and dtype, on this rank."""
    rank = dist.get_rank()
    transport = ProcessTransport(create_groups([group for group, _ in programs], 20.0))
    answers = []
    for group, dtype in programs:
        answers.append((transport.drive(every_request(rank, group, dtype)), transport.log))
    transport.close()
    return answers


def test_every_request_and_its_log_equal_the_virtual_cluster(gloo: GlooPool) -> None:
    programs = [(group, dtype) for group in GROUPS for dtype in DTYPES]
    by_rank = gloo.run(drive_all, programs)
    for index, (group, dtype) in enumerate(programs):
        cluster = VirtualCluster(4)
        cluster.run({rank: every_request(rank, group, dtype) for rank in range(4)})
        for rank in range(4):
            results, log = by_rank[rank][index]
            assert log == cluster.log_of(rank)
            if rank in group:
                check_results(rank, group, dtype, results)


def drive_tasks(overlap: bool) -> tuple[Any, list[Message], list[str]]:
    rank = dist.get_rank()
    transport = ProcessTransport(create_groups([(0, 1, 2)], 20.0), overlap=overlap)
    result = transport.drive(tasks_and_posts(rank, 3))
    transport.close()
    return result, transport.log, [event.text for event in transport.trace]


@pytest.mark.parametrize("overlap", [True, False], ids=["threads", "no threads"])
def test_tasks_posts_and_events(gloo: GlooPool, overlap: bool) -> None:
    by_rank = gloo.run(drive_tasks, overlap, num_ranks=3)
    check_tasks({rank: result for rank, (result, _, _) in enumerate(by_rank)})
    cluster = VirtualCluster(3)
    cluster.run({rank: tasks_and_posts(rank, 3) for rank in range(3)})
    for rank, (_, log, trace) in enumerate(by_rank):
        assert log == cluster.log_of(rank)
        assert trace == ["halfway", "go on", "all computed"]


def fail_in_task_while_waiting() -> None:
    """Rank 0 waits for rank 1, which waits for it too, when its task fails."""
    channel = FailureChannel.on_default_store(heartbeat_s=0.2, stale_s=5.0, exit_when_stuck=False)
    transport = ProcessTransport(create_groups([], 3.0), channel=channel)

    def task() -> RankGenerator[None]:
        time.sleep(0.5)  # by now the rank itself waits
        raise ValueError("token 99 is out of vocabulary")
        yield

    def program() -> RankGenerator[None]:
        if dist.get_rank() == 0:
            yield Start(task(), "outer")
        yield Exchange(receives=[Receive(1 - dist.get_rank(), (1,), torch.float32)], label="3F0")

    with rank_guard(channel):
        transport.drive(program())


def test_the_error_of_a_task_is_known_before_its_rank_has_ended_its_wait(gloo: GlooPool) -> None:
    with pytest.raises(WorkersFailed) as caught:
        gloo.run(fail_in_task_while_waiting, num_ranks=2)
    for text in caught.value.texts.values():
        assert "first failure: rank 0: ValueError: token 99 is out of vocabulary" in text


def fail_in_task(overlap: bool, fault: str) -> None:
    transport = ProcessTransport(create_groups([], 2.0), overlap=overlap)

    def task() -> RankGenerator[None]:
        if fault == "error":
            raise ValueError("token 99 is out of vocabulary")
        if fault == "silence":
            yield Exchange(receives=[Receive(1, (1,), torch.float32)], label="bridge parameters")
        if fault == "event":
            yield Await("never")
        if fault == "collective":
            yield AllReduce((0,), torch.ones(1))

    def program() -> RankGenerator[None]:
        started = yield Start(task(), "outer")
        if fault == "nobody":
            yield Await("never")
        if fault != "lost":
            yield Join(started)

    if dist.get_rank() == 0:
        transport.drive(program())
    else:
        time.sleep(4.0 if fault == "silence" else 0.5)


@pytest.mark.parametrize("overlap", [True, False], ids=["threads", "no threads"])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("error", "ValueError: token 99 is out of vocabulary"),
        ("silence", r"rank 0: waited \d\.\d s .* for exchange 'bridge parameters', a message from rank 1"),
        ("collective", "task 'outer': expected messages, signals and waits for them, got AllReduce"),
        ("nobody", "the event 'never' will never come: no task is left"),
        ("event", "the end of task 'outer' will never come: task 'outer' waits for 'never'"),
        ("lost", "started and never joined: 'outer'"),
    ],
)
def test_faults_of_tasks_reach_the_rank(gloo: GlooPool, overlap: bool, fault: str, text: str) -> None:
    with pytest.raises(WorkersFailed, match=text) as caught:
        gloo.run(fail_in_task, overlap, fault, num_ranks=2)
    assert list(caught.value.texts) == [0]


def reduce_noise(num_elements: int) -> Tensor:
    transport = ProcessTransport(create_groups([(0, 1, 2, 3)], 20.0))
    noise = torch.randn(num_elements, generator=torch.Generator().manual_seed(dist.get_rank()))
    return transport.drive(reduce_once((0, 1, 2, 3), noise))


def reduce_once(group: tuple[int, ...], tensor: Tensor, label: str = "3F0 reduce") -> RankGenerator[Tensor]:
    return (yield AllReduce(group, tensor, "sum", label))


def test_copies_of_a_sum_are_equal_to_the_bit(gloo: GlooPool) -> None:
    results = gloo.run(reduce_noise, 1001)
    assert all(torch.equal(results[0], result) for result in results[1:])


def send_many(count: int, num_elements: int) -> tuple[int, list[float]]:
    """Returns how many sends rank 0 still held just before its end, and what rank 1 received, last message first."""
    transport = ProcessTransport(create_groups([], 20.0))
    held = []

    def sender() -> RankGenerator[None]:
        for index in range(count):
            yield Exchange([Send(1, torch.full((num_elements,), float(index)), index)], label="send")
        yield Exchange(receives=[Receive(1, (1,), torch.float32)], label="all received")
        deadline_s = time.monotonic() + 10.0
        while len(transport._pending) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        held.append(len(transport._pending))

    def receiver() -> RankGenerator[list[float]]:
        values = []
        for index in reversed(range(count)):
            (tensor,) = yield Exchange(receives=[Receive(0, (num_elements,), torch.float32, index)], label="receive")
            values.append(tensor[-1].item())
        yield Exchange([Send(0, torch.ones(1))], label="all received")
        return values

    result = transport.drive(sender() if dist.get_rank() == 0 else receiver())
    return (held[0], []) if dist.get_rank() == 0 else (0, result)


def test_sends_do_not_block_and_are_let_go_when_complete(gloo: GlooPool) -> None:
    (held, _), (_, values) = gloo.run(send_many, 30, 100_000, num_ranks=2)
    assert held == 0
    assert values == [float(index) for index in reversed(range(30))]


def fall_silent(kind: str) -> None:
    """Rank 0 waits for what never comes; rank 1 stays long enough not to be taken for dead."""
    groups = create_groups([(0, 1)], 1.0)
    transport = ProcessTransport(groups)

    def waiter() -> RankGenerator[None]:
        if kind == "reduce":
            yield AllReduce((1, 0), torch.ones(4), "sum", "3F0 reduce")
        elif kind == "receive":
            yield Exchange(receives=[Receive(1, (2,), torch.float32, 9)], label="1B2 receive")
        else:
            yield Exchange([Send(1, torch.ones(2), 9)], label="1F2 send")

    if dist.get_rank() == 1:
        time.sleep(1.6)
        return
    transport.drive(waiter())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("reduce", r"s \(limit 1 s\) for all_reduce '3F0 reduce' over ranks \[1, 0\], sum of float32\[4\]"),
        ("receive", r"s \(limit 1 s\) for exchange '1B2 receive', a message from rank 1 \(tag 9\)"),
        ("send", r"the message to rank 1 \(tag 9\) of '1F2 send'"),
    ],
)
def test_a_wait_ends_and_names_what_was_waited_for(gloo: GlooPool, kind: str, text: str) -> None:
    with pytest.raises(WorkersFailed, match=text) as caught:
        gloo.run(fall_silent, kind, num_ranks=2)
    assert list(caught.value.texts) == [0]
    assert "RankFailed: rank 0: waited 1." in caught.value.texts[0]


def ask_for_an_unknown_group() -> None:
    ProcessTransport(create_groups([(0, 1)], 5.0)).drive(reduce_once((0, 2), torch.ones(1)))


def test_a_group_nobody_announced(gloo: GlooPool) -> None:
    with pytest.raises(
        WorkersFailed, match=r"ranks \[0, 2\] were not announced before the first step; there are \[0, 1\]"
    ):
        gloo.run(ask_for_an_unknown_group, num_ranks=3)


def fail_on(failing: int) -> str:
    """Fails on one rank while the others wait for it; returns never."""
    channel = FailureChannel.on_default_store(heartbeat_s=0.2, stale_s=5.0, exit_when_stuck=False)
    transport = ProcessTransport(create_groups([(0, 1, 2, 3)], 20.0), channel=channel)
    with rank_guard(channel):
        if dist.get_rank() == failing:
            raise ValueError("token 99 is out of vocabulary")
        return transport.drive(reduce_once((0, 1, 2, 3), torch.ones(1)))


def test_the_first_error_is_shown_on_all_ranks_and_the_pool_stays_usable(gloo: GlooPool) -> None:
    with pytest.raises(WorkersFailed) as caught:
        gloo.run(fail_on, 2)
    texts = caught.value.texts
    assert sorted(texts) == [0, 1, 2, 3]
    for rank in (0, 1, 3):
        assert "first failure: rank 2: ValueError: token 99 is out of vocabulary" in texts[rank]
    assert gloo.run(dist.get_rank) == [0, 1, 2, 3]


def test_start_up_outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InvalidInput, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; start with torchrun"):
        init_process_group_from_env()


def step_until_killed(rank: int, port: int, hosted_by_rank_0: bool, pipe: Connection) -> None:
    """Reduces over all ranks for ever; says so once under way, and with which error it ended."""
    torch.set_num_threads(1)
    master = hosted_by_rank_0 and rank == 0
    store = dist.TCPStore("127.0.0.1", 0 if master else port, is_master=master, wait_for_workers=False)
    pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    channel = FailureChannel.on_default_store(heartbeat_s=0.2, stale_s=2.0, grace_s=10.0)
    transport = ProcessTransport(create_groups([(0, 1), (2, 3), (0, 1, 2, 3)], 60.0), channel=channel)
    try:
        with rank_guard(channel):
            for step in range(1_000_000):
                # Rank 3's neighbours wait for it directly; the others wait for its neighbours.
                transport.drive(reduce_once((0, 1) if rank < 2 else (2, 3), torch.ones(1000), f"step {step}"))
                transport.drive(reduce_once((0, 1, 2, 3), torch.ones(1000), f"step {step}"))
                if step == 3:
                    pipe.send("under way")
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(1)


class KilledJob:
    """Four processes outside the pool, of which one is killed in the middle of a step."""

    def __init__(self, hosted_by_rank_0: bool) -> None:
        context = process_context()
        self.store = None if hosted_by_rank_0 else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = 0 if self.store is None else self.store.port
        self.processes, self.pipes = [], []
        for rank in range(4):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=step_until_killed, args=(rank, port, hosted_by_rank_0, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
            if rank == 0:
                port = ours.recv()
        for pipe in self.pipes[1:]:
            pipe.recv()
        for pipe in self.pipes:
            assert pipe.recv() == "under way"

    def kill(self, rank: int) -> dict[int, str]:
        """Returns the last words of the other ranks, and asserts that they end within 30 s."""
        process_id = self.processes[rank].pid
        assert process_id is not None
        os.kill(process_id, signal.SIGKILL)
        deadline_s = time.monotonic() + 30.0
        others = [other for other in range(4) if other != rank]
        for other in others:
            self.processes[other].join(max(0.0, deadline_s - time.monotonic()))
        assert all(self.processes[other].exitcode is not None for other in others), "a rank still hangs after 30 s"
        return {other: self.pipes[other].recv() for other in others}

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("hosted_by_rank_0", [False, True], ids=["store elsewhere", "store on rank 0"])
def test_a_killed_rank_is_named_by_all_others(hosted_by_rank_0: bool) -> None:
    job = KilledJob(hosted_by_rank_0)
    try:
        victim = 0 if hosted_by_rank_0 else 3
        words = job.kill(victim)
    finally:
        job.close()
    for text in words.values():
        assert text.startswith("RankFailed")
        assert f"first failure: rank {victim}: " in text
