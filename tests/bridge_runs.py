"""Runs bridges on the virtual cluster and looks over their shoulders: what is sent, when, how much memory it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hgraph.annotation import Annotation
from hgraph.bridge_plan import BridgePlan, plan_bridge
from hgraph.bundles import TensorReshard
from hgraph.shard_map import shard_map
from hgraph.topology import Topology
from runtime.bridge import Bridge
from runtime.buffer_pool import BufferPool
from runtime.requests import Post, RankGenerator, Wait
from runtime.virtual_cluster import VirtualCluster

Sources = dict[int, dict[str, Tensor]]

__all__ = ["Allocations", "Sources", "bridge_plan", "noise_of", "run_bridge", "tensor", "watched"]


def tensor(source: str, target: str, shape: tuple[int, ...], name: str = "w") -> TensorReshard:
    """Returns one tensor of a bridge from the texts of its annotations."""
    return TensorReshard(name, Annotation.parse(source), Annotation.parse(target), shape)


def bridge_plan(
    tensors: Mapping[str, TensorReshard], topology: Topology | None = None, bucket_elements: int | None = None
) -> BridgePlan:
    """Returns the plan of `tensors` under the names given."""
    named = [TensorReshard(name, item.source, item.target, item.shape) for name, item in tensors.items()]
    return plan_bridge(named, topology, bucket_elements=bucket_elements)


def noise_of(reshards: Sequence[TensorReshard], num_ranks: int) -> Sources:
    """Returns random reals, the same where ranks hold one term."""
    sources: Sources = {rank: {} for rank in range(num_ranks)}
    for seed, item in enumerate(reshards):
        terms: dict[tuple[int, int], Tensor] = {}
        for piece in shard_map(item.source, item.shape).pieces:
            generator = torch.Generator().manual_seed(1000 * seed + 50 * piece.family + piece.term)
            whole = terms.setdefault(
                (piece.family, piece.term), torch.randn(item.shape, generator=generator, dtype=torch.float64)
            )
            sources[piece.rank][item.name] = whole[tuple(slice(*ends) for ends in piece.box)].clone()
    return sources


def watched(generator: RankGenerator[Any], in_flight: list[int] | None = None) -> RankGenerator[Any]:
    """Passes everything on, and asserts that no message changes between its post and the wait for it.

    What is to be received is poisoned at the post. `in_flight` gets the number of posts open after each of them.
    """
    sent: dict[int, tuple[Tensor, ...]] = {}
    answer: Any = None
    while True:
        try:
            request = generator.send(answer)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Post):
            sent[id(request.exchange)] = tuple(send.tensor.clone() for send in request.exchange.sends)
            for receive in request.exchange.receives:
                if receive.buffer is not None:
                    receive.buffer.fill_(float("nan"))
            if in_flight is not None:
                in_flight.append(len(sent))
        if isinstance(request, Wait):
            before = sent.pop(id(request.posted.exchange))
            for send, copy in zip(request.posted.exchange.sends, before, strict=True):
                assert torch.equal(send.tensor, copy), "a message was overwritten while it was on its way"
        answer = yield request


def run_bridge(
    plan: BridgePlan,
    sources: Sources,
    dtype: torch.dtype = torch.float64,
    num_ranks: int | None = None,
    wrap: Callable[[RankGenerator[Any], int], RankGenerator[Any]] = lambda generator, rank: generator,
    pools: Mapping[int, BufferPool] | None = None,
) -> tuple[dict[int, dict[str, Tensor]], VirtualCluster]:
    """Returns what each rank holds afterwards, and the cluster with its log and trace."""
    count = plan.topology.num_ranks if num_ranks is None else num_ranks
    cluster = VirtualCluster(count)
    generators = {}
    for rank in range(count):
        bridge = Bridge(plan, rank, dtype, pool=None if pools is None else pools[rank])
        generators[rank] = wrap(watched(bridge.run(sources.get(rank, {}), "bridge")), rank)
    return cluster.run(generators), cluster


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that operators made while this mode was on: `live_bytes` now, `peak_bytes` ever."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        self._made = {key: item for key, item in self._made.items() if not item[0].expired()}
        return sum(num_bytes for _, num_bytes in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {item.untyped_storage().data_ptr() for item in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for item in _tensors(result):
            storage = item.untyped_storage()
            if storage.data_ptr() not in known and storage.nbytes():
                self._made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
