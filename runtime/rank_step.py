"""One step on one rank, as a generator of requests: parameters in, run, gradients out, optimizer.

Overlap. Both bridges are tasks beside the rank's own work. Parameters travel in the order in which stages use them; a
rank computes as soon as it has all that its own stage needs, while later buckets, of which it owns parts or passes them
on, travel on. Gradients leave layer by layer, the last one's first: a bucket is sent once the rank's last backward pass
has added to all that it holds of it, while that pass goes on with the layers before; the task receives those of others
from shortly before that pass. Where tasks have no threads (`runtime/tasks.py`) the same messages are sent before and
after the rank's work instead.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hgraph.capture import Captured
from hgraph.data.batches import GlobalBatch
from hgraph.data.packed import Packed
from hgraph.errors import InvalidInput, NonFiniteLoss
from hgraph.plan import StepPlan
from hgraph.shard_map import shard_map
from hgraph.strategy import Strategy
from runtime.bridge import Bridge, LaterSources, arrived, ended
from runtime.bridge_planner import StrategyBridges
from runtime.buffer_pool import BufferPool
from runtime.direct_switch import DirectSwitch
from runtime.executor import MicroBatchResult, RankExecutor, begins, is_final
from runtime.layouts import parameter_of
from runtime.micro_batches import Contents, pack_micro_batch
from runtime.optimizer import ShardedAdamW
from runtime.requests import AllGather, AllReduce, Await, Join, RankGenerator, Start, Task

__all__ = [
    "Executable",
    "RankOutcome",
    "RankState",
    "StepFacts",
    "collect_gradients",
    "exchange_parameters",
    "rank_step",
    "run_micro_batches",
]

_MESSAGE_BYTES = 2048
PARAMETERS, GRADIENTS = "bridge parameters", "bridge gradients"


@dataclass(slots=True)
class Executable:
    """What one rank needs to run a strategy; `executor` is None on a rank that the strategy leaves idle."""

    strategy: Strategy
    replica: int | None
    executor: RankExecutor | None
    bridges: StrategyBridges


@dataclass(slots=True)
class RankState:
    """What one rank keeps from step to step.

    `frozen` holds its shards of parameters that are not trained, or that the loss does not depend on: as with
    PyTorch's optimizers, what gets no gradient does not decay either.
    """

    rank: int
    num_ranks: int
    dtype: torch.dtype
    optimizer: ShardedAdamW
    frozen: dict[str, Tensor]
    captured: Captured
    contents: Contents = field(default_factory=Contents)
    executables: dict[str, Executable] = field(default_factory=dict)
    buffers: BufferPool = field(default_factory=BufferPool)
    switches: dict[tuple[str, str], DirectSwitch] = field(default_factory=dict)

    def weights(self) -> dict[str, Tensor]:
        """Returns this rank's shards of all parameters in the optimizer layout."""
        return self.optimizer.master | self.frozen

    def first_name(self) -> dict[str, str]:
        """Returns the parameter's first name for each of its names."""
        return {name: facts.name for facts in self.captured.parameters for name in facts.names}


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What all ranks know of a step before it: one strategy, or several that run their parts of the batch in turn."""

    step: int
    batch: GlobalBatch
    plans: tuple[StepPlan, ...]
    strategies: tuple[Strategy, ...]

    @property
    def first_replica(self) -> tuple[int, ...]:
        """Where the replicas of each strategy begin among those of all."""
        counts = [len(strategy.replicas) for strategy in self.strategies]
        return tuple(itertools.accumulate(counts, initial=0))[:-1]

    @property
    def num_replicas(self) -> int:
        return sum(len(strategy.replicas) for strategy in self.strategies)


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What every rank knows after a step, the same on all."""

    loss: float
    grad_norm: float
    learning_rate: float
    measured_ms: float
    replica_ms: tuple[float, ...]
    peak_live_micro_batches: int
    gradients: Mapping[str, Tensor] = field(default_factory=dict)


def rank_step(
    state: RankState, facts: StepFacts, *, keep_gradients: bool = False, update: bool = True
) -> RankGenerator[RankOutcome]:
    """Runs one step; `keep_gradients` returns this rank's gradient shards in the outcome (before clipping).

    Without `update` weights and optimizer stay as they are.
    """
    start_s = time.perf_counter()
    executables = [state.executables[plan.strategy] for plan in facts.plans]
    micro_batches = yield from _fetch(state, executables, facts)
    if facts.batch.num_targets == 0:
        return _nothing_to_learn(state, facts, keep_gradients)
    results, run_ms, gradients = yield from _run_strategies(state, executables, micro_batches, facts)
    losses, grad_norm = yield from _totals(state, executables, results, gradients, facts)
    _check_finite(losses, grad_norm, facts)
    kept = {name: gradient.clone() for name, gradient in gradients.items()} if keep_gradients else {}
    rate = state.optimizer.step(gradients, grad_norm) if update else 0.0
    step_ms = 1e3 * (time.perf_counter() - start_s)
    peak = max((result.peak_live_micro_batches for result in results if result is not None), default=0)
    greatest = yield from _greatest(state, executables, run_ms, step_ms, peak, facts)
    return RankOutcome(
        loss=sum(losses),
        grad_norm=grad_norm,
        learning_rate=rate,
        measured_ms=greatest[-2],
        replica_ms=tuple(greatest[: len(losses)]),
        peak_live_micro_batches=int(greatest[-1]),
        gradients=kept,
    )


def _run_strategies(
    state: RankState, executables: Sequence[Executable], micro_batches: Sequence[Sequence[Packed]], facts: StepFacts
) -> RankGenerator[tuple[list[MicroBatchResult | None], list[float], dict[str, Tensor]]]:
    """Runs every strategy in turn: what each left, its milliseconds on this rank, and the gradients this rank owns."""
    parameters, incoming = yield from _begin_parameters(state, executables[0])
    if len(executables) > 1:
        yield Join(incoming)
    gradients: dict[str, Tensor] = {}
    results: list[MicroBatchResult | None] = []
    run_ms: list[float] = []
    for part, executable in enumerate(executables):
        if part:
            switch = state.switches[facts.plans[part - 1].strategy, facts.plans[part].strategy]
            parameters, gradients = yield from _switch(state, switch, executables[part - 1], parameters, gradients)
        is_last = part == len(executables) - 1
        if is_last:
            outgoing = yield Start(_gradient_task(state, executable, len(micro_batches[part]), gradients), GRADIENTS)
        start_s = time.perf_counter()
        scale = 1.0 / facts.batch.num_targets
        result = yield from run_micro_batches(
            state, executable, parameters, micro_batches[part], scale, gradients, is_last=is_last
        )
        run_ms.append(1e3 * (time.perf_counter() - start_s))
        results.append(result)
    if len(executables) == 1:
        yield Join(incoming)
    del parameters, incoming
    return results, run_ms, _owned(state, (yield Join(outgoing)))


def _fetch(state: RankState, executables: Sequence[Executable], facts: StepFacts) -> RankGenerator[list[list[Packed]]]:
    """The micro-batches this rank runs, per strategy. All ranks agree that theirs are sound, so that none waits."""
    packed: list[list[Packed]] = []
    problem = ""
    cause: Exception | None = None
    try:
        for executable, plan in zip(executables, facts.plans, strict=True):
            chosen = () if executable.replica is None else plan.replicas[executable.replica].micro_batches
            packed.append([pack_micro_batch(facts.batch, indices, state.contents) for indices in chosen])
    except InvalidInput as error:
        problem = str(error)
    except Exception as error:  # whatever a data set raises: the other ranks must not wait for this one
        problem = f"rank {state.rank} cannot read its sequences: {type(error).__name__}: {error}"
        cause = error
    world = tuple(range(state.num_ranks))
    flag = torch.tensor([float(bool(problem))], dtype=torch.float64)
    flag = yield AllReduce(world, flag, "max", "step: batch is sound")
    if not flag.item():
        return packed
    text = problem.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    own = torch.tensor(list(text), dtype=torch.int64)
    texts = yield AllGather(world, own, ((_MESSAGE_BYTES,),) * state.num_ranks, "step: what is wrong")
    found = [bytes(rows.tolist()).rstrip(b"\0").decode(errors="replace") for rows in texts]
    raise InvalidInput(f"step {facts.step}: " + next(text for text in found if text)) from cause


def exchange_parameters(state: RankState, executable: Executable) -> RankGenerator[dict[str, Tensor]]:
    """Optimizer layout -> compute layout, all at once; by the names that the model uses."""
    bridge = executable.bridges.parameters
    found = yield from bridge.run(_parameter_sources(state, bridge), PARAMETERS)
    return {parameter_of(key): tensor for key, tensor in found.items()}


def _begin_parameters(state: RankState, executable: Executable) -> RankGenerator[tuple[dict[str, Tensor], Task]]:
    """The parameters that this rank uses, once they are there, and the task that passes on those of others."""
    bridge = executable.bridges.parameters
    found: dict[str, Tensor] = {}
    task = yield Start(bridge.run(_parameter_sources(state, bridge), PARAMETERS, results=found), PARAMETERS)
    yield Await(arrived(PARAMETERS))
    return {parameter_of(key): tensor for key, tensor in found.items()}, task


def _parameter_sources(state: RankState, bridge: Bridge) -> dict[str, Tensor]:
    weights, first = state.weights(), state.first_name()
    return {key: weights[name] for key in bridge.names if (name := first[parameter_of(key)]) in weights}


def run_micro_batches(
    state: RankState,
    executable: Executable,
    parameters: Mapping[str, Tensor],
    micro_batches: Sequence[Packed],
    scale: float,
    gradients: dict[str, Tensor] | None = None,
    *,
    is_last: bool = True,
) -> RankGenerator[MicroBatchResult | None]:
    """Runs the replica's schedule on this rank (`RankExecutor.run`); nothing on an idle rank."""
    if executable.executor is None:
        return None
    factor = torch.tensor(scale, dtype=state.dtype)
    return (yield from executable.executor.run(parameters, micro_batches, factor, gradients, is_last=is_last))


def collect_gradients(
    state: RankState, executable: Executable, result: MicroBatchResult | None
) -> RankGenerator[dict[str, Tensor]]:
    """Every replica's gradients -> their owners, summed there, all at once; by the parameters' first names."""
    gradients = {} if result is None else result.gradients
    bridge = executable.bridges.gradients
    sources = {key: _gradient(state, executable, gradients, key) for key in bridge.names if bridge.holds_source(key)}
    return _owned(state, (yield from bridge.run(sources, GRADIENTS)))


def _gradient_task(
    state: RankState, executable: Executable, num_micro_batches: int, gradients: Mapping[str, Tensor]
) -> RankGenerator[dict[str, Tensor]]:
    """Every replica's gradients -> their owners; this rank's own are read from `gradients` as they become final.

    It begins near the end of the schedule: earlier, nobody can have sent anything, and waits have a limit.
    """
    yield Await(ended(PARAMETERS))  # until then the buffers are those of the parameters
    executor = executable.executor
    last = None if executor is None else executor.last_backward(num_micro_batches)
    if last is not None:
        yield Await(begins(last))
    sources = LaterSources(
        lambda key: is_final(parameter_of(key)), lambda key: _gradient(state, executable, gradients, key)
    )
    return (yield from executable.bridges.gradients.run(sources, GRADIENTS))


def _owned(state: RankState, arrived_by_key: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank owns of every trained parameter's gradient: all that has arrived under its names, summed."""
    totals = {name: torch.zeros_like(shard) for name, shard in state.optimizer.master.items()}
    first = state.first_name()
    for key, gradient in arrived_by_key.items():
        if (name := first[parameter_of(key)]) in totals:
            totals[name] += gradient
    return totals


def _gradient(state: RankState, executable: Executable, gradients: Mapping[str, Tensor], key: str) -> Tensor:
    """What this rank leaves of a gradient, named as in bridges: zeros where nothing was added up."""
    executor, name = executable.executor, parameter_of(key)
    assert executor is not None
    if name in gradients:
        return gradients[name]
    shape = next(facts.shape for facts in state.captured.parameters if name in facts.names)
    local = shard_map(executor.gradients[name], shape).local_shape(executor.rank)
    return torch.zeros(local, dtype=executor.accumulate)


def _switch(
    state: RankState,
    switch: DirectSwitch,
    before: Executable,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> RankGenerator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The next strategy's parameters, and what its gradients begin with, straight from the strategy before it."""
    moved = yield from switch.parameters(parameters)
    names = before.executor.gradients if before.executor is not None else ()
    accumulated = {name: _gradient(state, before, gradients, name) for name in names}
    return moved, (yield from switch.gradients(accumulated))


def _totals(
    state: RankState,
    executables: Sequence[Executable],
    results: Sequence[MicroBatchResult | None],
    gradients: Mapping[str, Tensor],
    facts: StepFacts,
) -> RankGenerator[tuple[list[float], float]]:
    """The loss of each replica over the global number of labelled tokens, and the global gradient norm."""
    totals = torch.zeros(facts.num_replicas + 1, dtype=torch.float64)
    for executable, result, first in zip(executables, results, facts.first_replica, strict=True):
        if executable.replica is not None and result is not None:
            totals[first + executable.replica] = result.loss.double() / facts.batch.num_targets
    totals[-1] = state.optimizer.squared_norm(gradients)
    totals = yield AllReduce(tuple(range(state.num_ranks)), totals, "sum", "step: loss and gradient norm")
    *losses, squared = totals.tolist()
    return losses, math.sqrt(squared) if squared >= 0 else math.nan


def _greatest(
    state: RankState,
    executables: Sequence[Executable],
    run_ms: Sequence[float],
    step_ms: float,
    peak: int,
    facts: StepFacts,
) -> RankGenerator[list[float]]:
    values = torch.zeros(facts.num_replicas + 2, dtype=torch.float64)
    for executable, own_ms, first in zip(executables, run_ms, facts.first_replica, strict=True):
        if executable.replica is not None:
            values[first + executable.replica] = own_ms
    values[-2], values[-1] = step_ms, peak
    values = yield AllReduce(tuple(range(state.num_ranks)), values, "max", "step: times")
    return values.tolist()


def _check_finite(losses: Sequence[float], grad_norm: float, facts: StepFacts) -> None:
    bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    if not bad and math.isfinite(grad_norm):
        return
    where = []
    planned = [replica for plan in facts.plans for replica in plan.replicas]
    replicas = [replica for strategy in facts.strategies for replica in strategy.replicas]
    for index in bad:
        ids = [facts.batch.ids[position] for micro_batch in planned[index].micro_batches for position in micro_batch]
        where.append(f"replica {index} ({replicas[index].scheme}) with sequence ids {ids}")
    what = f"loss is not finite in {'; '.join(where)}" if bad else f"the gradient norm is {grad_norm}"
    names = ", then ".join(strategy.name for strategy in facts.strategies)
    raise NonFiniteLoss(
        f"step {facts.step}, strategy {names}: {what}. Weights, moments and step count are as before the "
        "step; lower the learning rate, or look at these sequences"
    )


def _nothing_to_learn(state: RankState, facts: StepFacts, keep_gradients: bool) -> RankOutcome:
    zeros = {name: torch.zeros_like(shard) for name, shard in state.optimizer.master.items()}
    idle = (0.0,) * facts.num_replicas
    return RankOutcome(0.0, 0.0, 0.0, 0.0, idle, 0, zeros if keep_gradients else {})
