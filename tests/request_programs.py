"""Generators that use every request, for the virtual cluster and for real processes alike, and what must come out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
GROUPS = ((0,), (1, 0), (3, 1), (2, 0, 1), (1, 3, 2), (0, 1, 2, 3), (3, 0, 2, 1))


def term(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns small integers that tell rank and position apart and are exact in every dtype."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return ((torch.arange(count) % 5) + 7 * rank).to(dtype).reshape(shape)


def gather_shapes(group: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns uneven shapes; the second member's is empty."""
    return tuple((0 if at == 1 else 1 + rank, 2) for at, rank in enumerate(group))


def pair_shape(sender: int, receiver: int) -> tuple[int, ...]:
    """Returns the shape of what goes from one rank to another; some are empty."""
    return ((2 * sender + receiver) % 4, 3)


def every_request(rank: int, group: tuple[int, ...], dtype: torch.dtype) -> RankGenerator[dict[str, Any]]:
    """Yields each kind of request over `group`, uneven and empty ones too; a rank outside the group does nothing."""
    if rank not in group:
        return {}
    results: dict[str, Any] = {}
    results["sum"] = yield AllReduce(group, term(rank, (3, 2), dtype), "sum", "sum")
    results["max"] = yield AllReduce(group, term(rank, (2, 3), dtype).t(), "max", "max")
    results["empty sum"] = yield AllReduce(group, term(rank, (0, 2), dtype), "sum", "empty sum")
    results["even"] = yield AllGather(group, term(rank, (2,), dtype), ((2,),) * len(group), "even")
    shapes = gather_shapes(group)
    results["uneven"] = yield AllGather(group, term(rank, shapes[group.index(rank)], dtype), shapes, "uneven")
    results["nothing"] = yield AllGather(group, term(rank, (0,), dtype), ((0,),) * len(group), "nothing")
    results["scatter"] = yield ReduceScatter(
        group, [term(rank, pair_shape(0, member), dtype) for member in group], "sum", "scatter"
    )
    results["exchange"] = yield AllToAll(
        group,
        [term(rank, pair_shape(rank, member), dtype) for member in group],
        tuple(pair_shape(member, rank) for member in group),
        "exchange",
    )
    peers = [member for member in group if member != rank]
    results["messages"] = yield Exchange(
        [Send(peer, term(rank, pair_shape(rank, peer), dtype), tag) for peer in peers for tag in (1, 2)],
        [Receive(peer, pair_shape(peer, rank), dtype, tag) for tag in (2, 1) for peer in peers],
        "messages",
    )
    return results


def check_results(rank: int, group: tuple[int, ...], dtype: torch.dtype, results: dict[str, Any]) -> None:
    """Asserts what `every_request` returned on `rank`."""

    def total(shape: tuple[int, ...]) -> Tensor:
        return sum(term(member, shape, dtype) for member in group)  # type: ignore[return-value]

    peers = [member for member in group if member != rank]
    expected: dict[str, Any] = {
        "sum": total((3, 2)),
        "max": term(max(group), (2, 3), dtype).t(),
        "empty sum": total((0, 2)),
        "even": [term(member, (2,), dtype) for member in group],
        "uneven": [term(member, shape, dtype) for member, shape in zip(group, gather_shapes(group), strict=True)],
        "nothing": [term(member, (0,), dtype) for member in group],
        "scatter": total(pair_shape(0, rank)),
        "exchange": [term(member, pair_shape(member, rank), dtype) for member in group],
        "messages": [term(peer, pair_shape(peer, rank), dtype) for _ in range(2) for peer in peers],
    }
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def tasks_and_posts(rank: int, num_ranks: int) -> RankGenerator[tuple[float, float, list[float]]]:
    """Passes numbers round a ring: two posts at one time, and a task that waits for the rank and is waited for."""
    next_rank, last_rank = (rank + 1) % num_ranks, (rank - 1) % num_ranks

    def task() -> RankGenerator[float]:
        yield Signal("halfway")
        yield Await("go on")
        receive = Receive(last_rank, (1,), torch.float32, 5)
        (received,) = yield Exchange([Send(next_rank, torch.tensor([rank + 0.5]), 5)], [receive], "in the task")
        yield Signal("all computed")
        return received.item()

    posts = []
    for number, label in enumerate(("first", "second")):
        send = Send(next_rank, torch.tensor([float(10 * number + rank)]))
        posts.append((yield Post(Exchange([send], [Receive(last_rank, (1,), torch.float32)], label))))
    started = yield Start(task(), "task")
    yield Await("halfway")
    total = yield AllReduce(tuple(range(num_ranks)), torch.ones(1), "sum", "meanwhile")
    yield Signal("go on")
    yield Await("all computed")
    seconds = yield Wait(posts[1])
    firsts = yield Wait(posts[0])
    return (yield Join(started)), total.item(), [tensor.item() for tensor in (*firsts, *seconds)]


def check_tasks(results: dict[int, tuple[float, float, list[float]]]) -> None:
    """Asserts what `tasks_and_posts` returned on each rank."""
    for rank, (from_task, total, received) in results.items():
        last_rank = (rank - 1) % len(results)
        assert from_task == last_rank + 0.5
        assert total == len(results)
        assert received == [last_rank, 10 + last_rank]
