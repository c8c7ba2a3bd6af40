"""The virtual cluster: every request, and the faults that real processes would keep silent about."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hgraph.errors import PlanError
from runtime.messages import Event, Message
from runtime.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Await,
    Exchange,
    Join,
    Post,
    RankGenerator,
    Receive,
    ReduceScatter,
    Send,
    Signal,
    Start,
    Wait,
)
from runtime.virtual_cluster import VirtualCluster
from tests.request_programs import DTYPES, GROUPS, check_results, check_tasks, every_request, tasks_and_posts


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_request(group: tuple[int, ...], dtype: torch.dtype) -> None:
    results = VirtualCluster(4).run({rank: every_request(rank, group, dtype) for rank in range(4)})
    for rank in group:
        check_results(rank, group, dtype, results[rank])


def reduce_once(
    rank: int, tensor: Tensor, op: str = "sum", group: tuple[int, ...] = (0, 1, 2)
) -> RankGenerator[Tensor]:
    result = yield AllReduce(group, tensor, op, "sum of terms")  # type: ignore[arg-type]
    return result


def test_sums_run_in_group_order_and_are_equal_to_the_bit() -> None:
    terms = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]
    for group, expected in (((0, 1, 2), 0.0), ((0, 2, 1), 1.0)):
        generators = {rank: reduce_once(rank, terms[rank].clone(), group=group) for rank in range(3)}
        results = VirtualCluster(3).run(generators)
        assert [result.item() for result in results.values()] == [expected] * 3


def test_no_two_ranks_share_memory() -> None:
    source = torch.ones(3)

    def program(rank: int) -> RankGenerator[list[Tensor]]:
        peer = 1 - rank
        gathered = yield AllGather((0, 1), source, ((3,), (3,)), "gather")
        exchanged = yield AllToAll((0, 1), [source, source], ((3,), (3,)), "exchange")
        received = yield Exchange([Send(peer, source)], [Receive(peer, (3,), source.dtype)], "swap")
        reduced = yield AllReduce((0, 1), source.clone(), "sum", "reduce")
        return [*gathered, *exchanged, *received, reduced]

    results = VirtualCluster(2).run({rank: program(rank) for rank in range(2)})
    tensors = [source, *results[0], *results[1]]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def test_a_send_is_copied_and_does_not_block() -> None:
    def sender() -> RankGenerator[str]:
        tensor = torch.tensor([1.0])
        yield Exchange([Send(1, tensor)], label="first")
        tensor.fill_(2.0)
        yield Exchange([Send(1, tensor)], label="second")
        return "sent"

    def receiver() -> RankGenerator[list[float]]:
        values = []
        for _ in range(2):
            (tensor,) = yield Exchange(receives=[Receive(0, (1,), torch.float32)], label="receive")
            values.append(tensor.item())
        return values

    assert VirtualCluster(2).run({0: sender(), 1: receiver()}) == {0: "sent", 1: [1.0, 2.0]}


def test_tags_keep_messages_apart_and_order_holds_within_one() -> None:
    def sender() -> RankGenerator[None]:
        yield Exchange([Send(1, torch.tensor([float(value)]), tag) for value, tag in ((1, 7), (2, 5), (3, 7))])

    def receiver() -> RankGenerator[list[float]]:
        received = yield Exchange(receives=[Receive(0, (1,), torch.float32, tag) for tag in (5, 7, 7)])
        return [tensor.item() for tensor in received]

    assert VirtualCluster(2).run({0: sender(), 1: receiver()})[1] == [2.0, 1.0, 3.0]


def test_log_of_a_rank_and_of_the_cluster() -> None:
    def program(rank: int) -> RankGenerator[None]:
        yield AllReduce((1, 0), torch.ones(2), "sum", "reduce")
        yield AllReduce((rank,), torch.ones(2), "sum", "alone")
        yield AllGather((0, 1), torch.ones(rank), ((0,), (1,)), "gather")
        if rank == 0:
            yield Exchange([Send(1, torch.ones(3, dtype=torch.float64), 4)], label="send")
        else:
            yield Exchange(receives=[Receive(0, (3,), torch.float64, 4)], label="receive")

    cluster = VirtualCluster(2)
    cluster.run({rank: program(rank) for rank in range(2)})
    assert cluster.log_of(1) == [
        Message("all_reduce", (1, 0), 8, "reduce"),
        Message("all_gather", (0, 1), 4, "gather"),
        Message("receive", (0, 1), 24, "receive", 4),
    ]
    assert [str(message) for message in cluster.log] == [
        "all_reduce 1,0 16 B 'reduce'",
        "all_gather 0,1 4 B 'gather'",
        "send 0->1 tag 4 24 B 'send'",
    ]


def test_tasks_posts_and_events() -> None:
    cluster = VirtualCluster(3)
    check_tasks(cluster.run({rank: tasks_and_posts(rank, 3) for rank in range(3)}))
    assert [event.text for event in cluster.trace if event.rank == 1] == ["halfway", "go on", "all computed"]
    assert [event.when for event in cluster.trace] == list(range(9))
    kinds = [(message.kind, message.label) for message in cluster.log_of(1)]
    assert kinds == [
        ("send", "first"),
        ("receive", "first"),
        ("send", "second"),
        ("receive", "second"),
        ("all_reduce", "meanwhile"),
        ("send", "in the task"),
        ("receive", "in the task"),
    ], "messages of a task come where it was joined"


def test_a_message_is_received_into_the_buffer_given() -> None:
    def program(rank: int, buffer: Tensor) -> RankGenerator[Tensor]:
        posted = yield Post(Exchange([Send(1 - rank, torch.full((2,), float(rank)))], [_into(1 - rank, buffer)]))
        (received,) = yield Wait(posted)
        return received

    buffers = [torch.zeros(2), torch.zeros(2)]
    results = VirtualCluster(2).run({rank: program(rank, buffer) for rank, buffer in enumerate(buffers)})
    assert [buffer.tolist() for buffer in buffers] == [[1.0, 1.0], [0.0, 0.0]]
    assert results[0].data_ptr() == buffers[0].data_ptr()
    with pytest.raises(PlanError, match=r"expected a contiguous buffer of float32\[2\], got float32\[3\]"):
        VirtualCluster(2).run({0: program(0, torch.zeros(3)), 1: program(1, torch.zeros(2))})


def _into(peer: int, buffer: Tensor) -> Receive:
    return Receive(peer, (2,), torch.float32, buffer=buffer)


def test_its_own_generator_goes_before_the_tasks_of_a_rank() -> None:
    def task() -> RankGenerator[None]:
        yield Signal("ready")
        yield Signal("task goes on")

    def program() -> RankGenerator[None]:
        started = yield Start(task(), "task")
        yield Await("ready")
        yield Signal("rank goes on")
        yield Join(started)

    cluster = VirtualCluster(1)
    cluster.run({0: program()})
    assert cluster.trace == [Event(0, 0, "ready"), Event(1, 0, "task goes on"), Event(2, 0, "rank goes on")]


def faulty_program(fault: str) -> RankGenerator[None]:
    def task() -> RankGenerator[None]:
        if fault == "collective":
            yield AllReduce((0,), torch.ones(1), "sum", "x")
        elif fault == "start":
            yield Start(task(), "inner")
        elif fault == "stuck":
            yield Await("never")
        else:
            yield Signal("done")

    started = yield Start(task(), "outer")
    if fault == "post":
        yield Post(Exchange(label="lost"))
    if fault == "twice":
        posted = yield Post(Exchange(label="again"))
        yield Wait(posted)
        yield Wait(posted)
    if fault != "join":
        yield Join(started)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("collective", "task 'outer': expected messages, signals and waits for them, got AllReduce"),
        ("start", "task 'outer': expected messages, signals and waits for them, got Start"),
        ("join", "rank 0, task 'outer' was started and never joined"),
        ("post", "rank 0: posted and never waited for: 'lost'"),
        ("twice", "rank 0: exchange 'again' of nothing was not posted here, or has been waited for"),
        (
            "stuck",
            "deadlock: no rank can advance\n"
            "  rank 0 waits for the end of task 'outer'\n"
            "  rank 0, task 'outer' waits for event 'never'",
        ),
    ],
)
def test_faults_of_tasks_and_posts(fault: str, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        VirtualCluster(1).run({0: faulty_program(fault)})
    assert str(caught.value) == text


def test_mismatch_names_both_ranks_and_requests() -> None:
    generators = {0: reduce_once(0, torch.ones(2)), 1: reduce_once(1, torch.ones(3)), 2: reduce_once(2, torch.ones(2))}
    with pytest.raises(PlanError) as caught:
        VirtualCluster(3).run(generators)
    assert str(caught.value) == (
        "mismatch: ranks 0 and 1 ask for different collectives\n"
        "  rank 0: all_reduce 'sum of terms' over ranks [0, 1, 2], sum of float32[2]\n"
        "  rank 1: all_reduce 'sum of terms' over ranks [0, 1, 2], sum of float32[3]"
    )


@pytest.mark.parametrize(
    "other",
    [
        AllReduce((0, 1), torch.ones(2), "max", "x"),
        AllReduce((1, 0), torch.ones(2), "sum", "x"),
        AllReduce((0, 1), torch.ones(2), "sum", "y"),
        AllReduce((0, 1), torch.ones(2, dtype=torch.float64), "sum", "x"),
        AllGather((0, 1), torch.ones(2), ((2,), (2,)), "x"),
    ],
    ids=["op", "order", "label", "dtype", "kind"],
)
def test_every_difference_is_a_mismatch(other: AllReduce | AllGather) -> None:
    def ask(request: object) -> RankGenerator[None]:
        yield request  # type: ignore[misc]

    with pytest.raises(PlanError, match="different collectives"):
        VirtualCluster(2).run({0: ask(AllReduce((0, 1), torch.ones(2), "sum", "x")), 1: ask(other)})


def test_all_to_all_checks_each_pair() -> None:
    def program(rank: int, expected: int) -> RankGenerator[None]:
        yield AllToAll((0, 1), [torch.ones(1), torch.ones(2)], ((1,), (expected,)), "x")

    VirtualCluster(2).run({0: program(0, 1), 1: _swap_shapes()})
    with pytest.raises(PlanError, match="different collectives"):
        VirtualCluster(2).run({0: program(0, 3), 1: _swap_shapes()})


def _swap_shapes() -> RankGenerator[None]:
    yield AllToAll((0, 1), [torch.ones(1), torch.ones(2)], ((2,), (2,)), "x")


def test_deadlock_lists_what_each_rank_waits_for() -> None:
    def receive(peer: int) -> RankGenerator[None]:
        yield Exchange(receives=[Receive(peer, (2, 3), torch.float64, 5)], label="1F0 receive")

    def finish() -> RankGenerator[None]:
        return
        yield

    generators = {0: receive(1), 1: receive(0), 2: reduce_once(2, torch.ones(2), group=(2, 3)), 3: finish()}
    with pytest.raises(PlanError) as caught:
        VirtualCluster(4).run(generators)
    assert str(caught.value) == (
        "deadlock: no rank can advance\n"
        "  rank 0 waits in exchange '1F0 receive' for a message from rank 1 (tag 5, float64[2, 3])\n"
        "  rank 1 waits in exchange '1F0 receive' for a message from rank 0 (tag 5, float64[2, 3])\n"
        "  rank 2 waits for ranks 3 in all_reduce 'sum of terms' over ranks [2, 3], sum of float32[2]\n"
        "  rank 3 has finished"
    )


def test_wrong_shape_and_lost_messages_are_errors() -> None:
    def send() -> RankGenerator[None]:
        yield Exchange([Send(1, torch.ones(2), 3)], label="a")

    def receive(shape: tuple[int, ...]) -> RankGenerator[None]:
        yield Exchange(receives=[Receive(0, shape, torch.float32, 3)], label="b")

    def nothing() -> RankGenerator[None]:
        yield Exchange(label="nothing")

    with pytest.raises(
        PlanError, match=r"exchange 'b': rank 1 expected float32\[3\] from rank 0 \(tag 3\), got float32\[2\]"
    ):
        VirtualCluster(2).run({0: send(), 1: receive((3,))})
    with pytest.raises(PlanError, match=r"messages sent and never received: 0 -> 1 \(tag 3\)"):
        VirtualCluster(2).run({0: send(), 1: nothing()})


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Exchange([Send(0, torch.ones(1))], label="x"), "cannot send to itself"),
        (Exchange([Send(2, torch.ones(1))], label="x"), "expected a peer below 2, got 2"),
        (AllReduce((1,), torch.ones(1), "sum", "x"), "rank 0 is not in the group"),
        (AllReduce((0, 2), torch.ones(1), "sum", "x"), "expected distinct ranks below 2"),
        (AllGather((0, 1), torch.ones(2), ((1,), (2,)), "x"), r"announced the shape \(1,\), gave \(2,\)"),
        (ReduceScatter((0, 1), [torch.ones(1)], "sum", "x"), "expected one chunk per member, 2, got 1"),
        (AllToAll((0, 1), [torch.ones(1)] * 2, ((1,),), "x"), "expected one shape per member, 2, got 1"),
        ("hello", "expected a request of runtime.requests, got str"),
    ],
)
def test_requests_wrong_in_themselves(request_: object, text: str) -> None:
    def program() -> RankGenerator[None]:
        yield request_  # type: ignore[misc]

    with pytest.raises(PlanError, match=text):
        VirtualCluster(2).run({0: program()})


def test_exceptions_name_the_rank_and_every_generator_is_closed() -> None:
    closed = []

    def wait(rank: int) -> RankGenerator[None]:
        try:
            yield AllReduce((0, 1, 2), torch.ones(1), "sum", "x")
        finally:
            closed.append(rank)

    def fail() -> RankGenerator[None]:
        yield Exchange(label="nothing")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as caught:
        VirtualCluster(3).run({0: wait(0), 1: fail(), 2: wait(2)})
    assert caught.value.__notes__ == ["on rank 1 of the virtual cluster"]
    assert closed == [0]  # rank 2 had not begun
