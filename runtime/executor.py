"""Executor: runs one replica's schedule on one rank, as a generator of requests.

Built once per (strategy, rank) from compiled programs; nothing is compiled here. The same executor runs under
`runtime/gloo.py` and `runtime/virtual_cluster.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hgraph.action import Action, Schedule
from hgraph.annotation import Annotation
from hgraph.check_schedule import check_schedule
from hgraph.data.packed import Packed
from hgraph.graph import Shape, evaluate_shape
from hgraph.reshard import plan_reshard
from hgraph.schedule import build_schedule, lower
from hgraph.shard_map import shard_map
from hgraph.strategy import Replica
from passes.pipelines import CompiledScheme, RankProgram
from passes.program import Program
from passes.split_stages import Transfer
from runtime.requests import RankGenerator, Signal
from runtime.reshard import PreparedReshard, prepare, run_reshard

__all__ = ["MicroBatchResult", "RankExecutor", "begins", "is_final"]

_PROBE = (1013, 7)
_MOST_SHAPES = 64
"""Of how many sizes a route keeps what it prepared."""

_STANDARD_FIELDS = ("tokens", "positions", "labels", "cu_seqlens")


@dataclass(slots=True)
class _Route:
    """One Reshard or transfer on this rank, ready to run for any number of tokens."""

    source: Annotation
    target: Annotation
    shape: Shape
    dtype: torch.dtype
    label: str
    rank: int
    prepared: PreparedReshard | None = None
    by_shape: dict[tuple[int, ...], PreparedReshard] = field(default_factory=dict)

    def run(
        self, value: Tensor | None, sizes: tuple[int, int], may_overwrite: bool = False
    ) -> RankGenerator[Tensor | None]:
        shape = evaluate_shape(self.shape, *sizes)
        prepared = self.prepared if self.prepared is not None else self._at(shape)
        return run_reshard(
            prepared,
            self.rank,
            value,
            label=self.label,
            dtype=self.dtype,
            shape=shape,
            may_overwrite=may_overwrite,
        )

    def _at(self, shape: tuple[int, ...]) -> PreparedReshard:
        prepared = self.by_shape.pop(shape, None)
        if prepared is None:
            plan = plan_reshard(self.source, self.target, shape, collectives=False)
            prepared = prepare(plan, self.rank)
        # The latest used is the last; lengths differ from step to step, so most never come again.
        self.by_shape[shape] = prepared
        if len(self.by_shape) > _MOST_SHAPES:
            del self.by_shape[next(iter(self.by_shape))]
        return prepared


@dataclass(slots=True)
class MicroBatchResult:
    """What a replica's step leaves on this rank: its share of the loss sum, and accumulated gradients by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    peak_live_micro_batches: int = 0


class RankExecutor:
    """Runs the micro-batches of one replica on one of its ranks.

    `rank` is global. `parameters` (names of what this rank's stage uses) and `gradients` give annotations on global
    ranks. `accumulate` is the dtype gradients are summed in.
    """

    def __init__(
        self,
        compiled: CompiledScheme,
        replica: Replica,
        rank: int,
        buffers: Mapping[str, Tensor],
        accumulate: torch.dtype,
    ) -> None:
        self.compiled, self.replica, self.rank, self.accumulate = compiled, replica, rank, accumulate
        self.local_rank = replica.ranks.index(rank)
        scheme = compiled.scheme
        self.stage = next(s for s in range(scheme.pp) if self.local_rank in scheme.stage_ranks(s))
        stage = compiled.stages[self.stage]
        self.program: RankProgram = stage.ranks[self.local_rank]
        self.parameters = self._annotations(compiled.parameters)
        self.gradients = self._annotations(compiled.gradients)
        self.counts_loss = _counts(stage.graphs.loss, self.local_rank)
        self.buffers = {f"buffer:{name}": tensor for name, tensor in buffers.items()}
        self.edges = tuple(sorted({_forward_edge(transfer) for transfer in compiled.transfers}))
        self.transfers = {transfer.name: self._transfer(transfer) for transfer in compiled.transfers}
        self.forward_routes = self._routes(self.program.forward, "forward")
        self.backward_routes = self._routes(self.program.backward, "backward")

    def _annotations(self, given: Mapping[tuple[str, int], Annotation]) -> dict[str, Annotation]:
        return {
            name: annotation.relabel(self.replica.ranks)
            for (name, stage), annotation in given.items()
            if stage == self.stage and self.local_rank in annotation.ranks
        }

    def _transfer(self, transfer: Transfer) -> _Route | None:
        source, target = (a.relabel(self.replica.ranks) for a in (transfer.source, transfer.target))
        if self.rank not in (*source.ranks, *target.ranks):
            return None
        free = [dim for dim, size in enumerate(transfer.shape) if not isinstance(size, int)]
        label = f"{transfer.phase} {transfer.name}, stage {transfer.sender} to {transfer.receiver}"
        route = _Route(source, target, transfer.shape, transfer.dtype, label, self.rank)
        if not any(_cuts(annotation, dim) for annotation in (source, target) for dim in free):
            shape = evaluate_shape(transfer.shape, *_PROBE)
            route.prepared = prepare(plan_reshard(source, target, shape, collectives=False, free_dims=free), self.rank)
        return route

    def _routes(self, program: Program, phase: str) -> list[_Route]:
        routes = []
        for reshard in program.reshards:
            source, target = (a.relabel(self.replica.ranks) for a in (reshard.source, reshard.target))
            label = f"{phase} {reshard.label}"
            # Plans made during a step use messages alone: process groups exist only for what was known before it.
            route = _Route(source, target, reshard.shape, reshard.dtype, label, self.rank)
            if reshard.plan is not None and self.rank in (*source.ranks, *target.ranks):
                plan = plan_reshard(source, target, reshard.plan.shape, free_dims=reshard.plan.free_dims)
                route.prepared = prepare(plan, self.rank)
            routes.append(route)
        return routes

    @functools.lru_cache(maxsize=256)  # noqa: B019  (an executor lives as long as its program)
    def schedule(self, num_micro_batches: int) -> Schedule:
        """Returns the lowered, checked schedule of the replica for a number of micro-batches."""
        scheme = self.compiled.scheme
        schedule = lower(build_schedule(scheme.schedule, scheme.pp, num_micro_batches), self.edges)
        check_schedule(schedule, self.edges)
        return schedule

    def run(
        self,
        parameters: Mapping[str, Tensor],
        micro_batches: Sequence[Packed],
        scale: Tensor,
        gradients: dict[str, Tensor] | None = None,
        *,
        is_last: bool = True,
    ) -> RankGenerator[MicroBatchResult]:
        """Runs forward and backward of all micro-batches. `scale` multiplies the loss sum (1 / labelled tokens).

        Gradients are added to what `gradients` begins with, in place, by name. Every computation signals that it
        `begins`, and every gradient, in the last micro-batch, that it `is_final`; the latter not where other strategies
        go on with the gradients in the same step (`is_last` False).
        """
        step = _Step(self, parameters, micro_batches, scale, {} if gradients is None else gradients, is_last)
        for action in self.schedule(len(micro_batches)).stages[self.stage]:
            if action.is_compute:
                yield Signal(begins(action))
            yield from step.run(action)
        if is_last and not micro_batches:
            for name in self.gradients:
                yield Signal(is_final(name))
        return step.result()

    def last_backward(self, num_micro_batches: int) -> Action | None:
        """Returns the backward pass from which on as many are left as there are stages; None without micro-batches.

        No stage finishes its last backward pass much earlier than that.
        """
        actions = self.schedule(num_micro_batches).stages[self.stage]
        backward = [action for action in actions if action.kind == "B"]
        return backward[-min(self.compiled.scheme.pp, len(backward))] if backward else None


def begins(action: Action) -> str:
    """Returns the event that a computation begins on a rank."""
    return f"{action} begins"


def is_final(name: str) -> str:
    """Returns the event that nothing is added to the gradient of a parameter any more on a rank."""
    return f"gradient {name} is final"


class _Step:
    """The live values of one step on one rank."""

    def __init__(
        self,
        executor: RankExecutor,
        parameters: Mapping[str, Tensor],
        batches: Sequence[Packed],
        scale: Tensor,
        gradients: dict[str, Tensor],
        is_last: bool,
    ) -> None:
        self.executor, self.batches, self.gradients, self.is_last = executor, batches, gradients, is_last
        self.base = {f"parameter:{name}": tensor for name, tensor in parameters.items()}
        self.base |= executor.buffers
        self.base["scale:scale"] = scale
        self.base |= executor.program.coordinates  # type: ignore[arg-type]
        self.sizes = [(int(b.tokens.shape[0]), int(b.cu_seqlens.shape[0])) for b in batches]
        self.saved: dict[int, dict[str, Tensor]] = {}
        self.outgoing: dict[tuple[str, int], Tensor] = {}
        self.incoming: dict[int, dict[str, Tensor]] = {}
        self.loss: list[Tensor] = []
        self.peak = 0
        self.backward_left = len(batches)

    def run(self, action: Action) -> RankGenerator[None]:
        if action.kind == "F":
            return self._forward(action.micro_batch)
        if action.kind == "B":
            return self._backward(action.micro_batch)
        return self._messages(action)

    def _forward(self, number: int) -> RankGenerator[None]:
        program, routes = self.executor.program.forward, self.executor.forward_routes
        outputs = yield from program.run(self._inputs(number), self._communicate(routes, number), self._deliver)
        self.saved[number] = {}
        self.peak = max(self.peak, len(self.saved))
        self._store(outputs, number)

    def _backward(self, number: int) -> RankGenerator[None]:
        program, routes = self.executor.program.backward, self.executor.backward_routes
        inputs = self._inputs(number) | self.saved.pop(number)
        self.backward_left -= 1
        outputs = yield from program.run(inputs, self._communicate(routes, number), self._deliver)
        self._store(outputs, number)

    def _inputs(self, number: int) -> dict[str, Tensor]:
        batch = self.batches[number]
        inputs = dict(self.base)
        inputs |= {f"input:{name}": getattr(batch, name) for name in _STANDARD_FIELDS}
        inputs |= {f"input:{name}": tensor for name, tensor in batch.fields.items()}
        inputs["num_tokens"], inputs["num_boundaries"] = self.sizes[number]  # type: ignore[assignment]
        return inputs | self.incoming.pop(number, {})

    def _store(self, outputs: dict[str, Tensor], number: int) -> None:
        for name in list(outputs):
            value = outputs.pop(name)
            kind, _, rest = name.partition(":")
            if kind == "saved":
                self.saved[number][name] = value
            elif kind == "send":
                self.outgoing[rest, number] = value
            elif self.executor.counts_loss:
                self.loss.append(value.detach())

    def _deliver(self, name: str, value: Tensor) -> RankGenerator[None]:
        """Adds a micro-batch's gradient to the sum of those before it."""
        total = self.gradients.get(name)
        if total is None:
            self.gradients[name] = value.to(self.executor.accumulate, copy=True)
        else:
            total.add_(value)
        if self.is_last and not self.backward_left:
            yield Signal(is_final(name))

    def _communicate(self, routes: list[_Route], number: int) -> Callable[..., RankGenerator[Tensor | None]]:
        sizes = self.sizes[number]

        def communicate(index: int, value: Tensor | None, may_overwrite: bool) -> RankGenerator[Tensor | None]:
            return routes[index].run(value, sizes, may_overwrite)

        return communicate

    def _messages(self, action: Action) -> RankGenerator[None]:
        """Sends or receives every value that passes between two stages for one micro-batch."""
        executor, number = self.executor, action.micro_batch
        sending = action.kind in ("SF", "SB")
        phase = "forward" if action.kind in ("SF", "RF") else "backward"
        ends = (action.stage, action.peer) if sending else (action.peer, action.stage)
        for transfer in executor.compiled.transfers:
            if (transfer.sender, transfer.receiver) != ends or transfer.phase != phase:
                continue
            route = executor.transfers[transfer.name]
            if route is None:
                continue
            value = self.outgoing.pop((transfer.name, number), None) if sending else None
            result = yield from route.run(value, self.sizes[number])
            if not sending and result is not None:
                self.incoming.setdefault(number, {})[f"received:{transfer.name}"] = result

    def result(self) -> MicroBatchResult:
        executor = self.executor
        assert not self.saved and not self.outgoing, "values were left over at the end of a step"
        loss = torch.zeros((), dtype=executor.accumulate)
        for value in self.loss:
            loss = loss + value.to(executor.accumulate)
        return MicroBatchResult(loss, self.gradients, self.peak)


def _counts(annotation: Annotation | None, rank: int) -> bool:
    """Whether this rank's loss value counts: the first holder of each term of one family (others hold it all again)."""
    if annotation is None or rank not in annotation.ranks:
        return False
    shares = shard_map(annotation, ()).pieces
    family = min(piece.family for piece in shares)
    pieces = [piece for piece in shares if piece.family == family]
    own = next((piece for piece in pieces if piece.rank == rank), None)
    return own is not None and rank == min(piece.rank for piece in pieces if piece.term == own.term)


def _forward_edge(transfer: Transfer) -> tuple[int, int]:
    return min(transfer.sender, transfer.receiver), max(transfer.sender, transfer.receiver)


def _cuts(annotation: Annotation, dim: int) -> bool:
    return any(getattr(placement, "dim", None) == dim for placement in annotation.placements())
