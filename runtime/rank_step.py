"""One step on one rank, as a generator of requests: parameters in, run, gradients out, optimizer."""

from __future__ import annotations

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
from runtime.executor import MicroBatchResult, RankExecutor
from runtime.layouts import StrategyBridges
from runtime.micro_batches import Contents, pack_micro_batch
from runtime.optimizer import ShardedAdamW
from runtime.requests import AllGather, AllReduce, RankGenerator

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

    def weights(self) -> dict[str, Tensor]:
        """Returns this rank's shards of all parameters in the optimizer layout."""
        return self.optimizer.master | self.frozen

    def first_name(self) -> dict[str, str]:
        """Returns the parameter's first name for each of its names."""
        return {name: facts.name for facts in self.captured.parameters for name in facts.names}


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What all ranks know of a step before it."""

    step: int
    batch: GlobalBatch
    plan: StepPlan
    strategy: Strategy


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
    executable = state.executables[facts.plan.strategy]
    micro_batches = yield from _fetch(state, executable, facts)
    if facts.batch.num_targets == 0:
        return _nothing_to_learn(state, facts, keep_gradients)
    parameters = yield from exchange_parameters(state, executable)
    run_start_s = time.perf_counter()
    result = yield from run_micro_batches(state, executable, parameters, micro_batches, 1.0 / facts.batch.num_targets)
    del parameters
    run_ms = 1e3 * (time.perf_counter() - run_start_s)
    gradients = yield from collect_gradients(state, executable, result)
    losses, grad_norm = yield from _totals(state, executable, result, gradients, facts)
    _check_finite(losses, grad_norm, facts)
    kept = {name: gradient.clone() for name, gradient in gradients.items()} if keep_gradients else {}
    rate = state.optimizer.step(gradients, grad_norm) if update else 0.0
    step_ms = 1e3 * (time.perf_counter() - start_s)
    peak = 0 if result is None else result.peak_live_micro_batches
    greatest = yield from _greatest(state, executable, run_ms, step_ms, peak, len(losses))
    return RankOutcome(
        loss=sum(losses),
        grad_norm=grad_norm,
        learning_rate=rate,
        measured_ms=greatest[-2],
        replica_ms=tuple(greatest[: len(losses)]),
        peak_live_micro_batches=int(greatest[-1]),
        gradients=kept,
    )


def _fetch(state: RankState, executable: Executable, facts: StepFacts) -> RankGenerator[list[Packed]]:
    """The micro-batches this rank runs. All ranks agree that theirs are sound, so that none is left waiting."""
    packed: list[Packed] = []
    problem = ""
    cause: Exception | None = None
    try:
        if executable.replica is not None:
            plan = facts.plan.replicas[executable.replica]
            packed = [pack_micro_batch(facts.batch, indices, state.contents) for indices in plan.micro_batches]
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
    """Optimizer layout -> compute layout; by the names that the model uses."""
    weights, first = state.weights(), state.first_name()
    bridge = executable.bridges.parameters
    sources = {key: weights[name] for key in bridge.names if (name := first[_name(key)]) in weights}
    arrived = yield from bridge.run(sources, "bridge parameters")
    return {_name(key): tensor for key, tensor in arrived.items()}


def run_micro_batches(
    state: RankState,
    executable: Executable,
    parameters: Mapping[str, Tensor],
    micro_batches: Sequence[Packed],
    scale: float,
) -> RankGenerator[MicroBatchResult | None]:
    """Runs the replica's schedule on this rank; nothing on an idle rank. `scale` multiplies the loss sum."""
    if executable.executor is None:
        return None
    return (yield from executable.executor.run(parameters, micro_batches, torch.tensor(scale, dtype=state.dtype)))


def collect_gradients(
    state: RankState, executable: Executable, result: MicroBatchResult | None
) -> RankGenerator[dict[str, Tensor]]:
    """Every replica's gradients -> their owners, summed there; by the parameters' first names."""
    bridge, sources = executable.bridges.gradients, {}
    if executable.executor is not None and result is not None:
        for key in bridge.names:
            name = _name(key)
            if name in executable.executor.gradients and bridge.holds_source(key):
                sources[key] = _gradient(state, executable.executor, result, name)
    arrived = yield from bridge.run(sources, "bridge gradients")
    totals = {name: torch.zeros_like(shard) for name, shard in state.optimizer.master.items()}
    first = state.first_name()
    for key, gradient in arrived.items():
        if (name := first[_name(key)]) in totals:
            totals[name] += gradient
    return totals


def _gradient(state: RankState, executor: RankExecutor, result: MicroBatchResult, name: str) -> Tensor:
    if name in result.gradients:
        return result.gradients[name]
    shape = next(facts.shape for facts in state.captured.parameters if name in facts.names)
    local = shard_map(executor.gradients[name], shape).local_shape(executor.rank)
    return torch.zeros(local, dtype=executor.accumulate)


def _totals(
    state: RankState,
    executable: Executable,
    result: MicroBatchResult | None,
    gradients: Mapping[str, Tensor],
    facts: StepFacts,
) -> RankGenerator[tuple[list[float], float]]:
    """The loss of each replica over the global number of labelled tokens, and the global gradient norm."""
    count = len(facts.strategy.replicas)
    totals = torch.zeros(count + 1, dtype=torch.float64)
    if executable.replica is not None and result is not None:
        totals[executable.replica] = result.loss.double() / facts.batch.num_targets
    totals[-1] = state.optimizer.squared_norm(gradients)
    totals = yield AllReduce(tuple(range(state.num_ranks)), totals, "sum", "step: loss and gradient norm")
    *losses, squared = totals.tolist()
    return losses, math.sqrt(squared) if squared >= 0 else math.nan


def _greatest(
    state: RankState, executable: Executable, run_ms: float, step_ms: float, peak: int, count: int
) -> RankGenerator[list[float]]:
    values = torch.zeros(count + 2, dtype=torch.float64)
    if executable.replica is not None:
        values[executable.replica] = run_ms
    values[-2], values[-1] = step_ms, peak
    values = yield AllReduce(tuple(range(state.num_ranks)), values, "max", "step: times")
    return values.tolist()


def _check_finite(losses: Sequence[float], grad_norm: float, facts: StepFacts) -> None:
    bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    if not bad and math.isfinite(grad_norm):
        return
    where = []
    for index in bad:
        plan = facts.plan.replicas[index]
        ids = [facts.batch.ids[position] for micro_batch in plan.micro_batches for position in micro_batch]
        where.append(f"replica {index} ({facts.strategy.replicas[index].scheme}) with sequence ids {ids}")
    what = f"loss is not finite in {'; '.join(where)}" if bad else f"the gradient norm is {grad_norm}"
    raise NonFiniteLoss(
        f"step {facts.step}, strategy {facts.strategy.name}: {what}. Weights, moments and step count are as before the "
        "step; lower the learning rate, or look at these sequences"
    )


def _nothing_to_learn(state: RankState, facts: StepFacts, keep_gradients: bool) -> RankOutcome:
    zeros = {name: torch.zeros_like(shard) for name, shard in state.optimizer.master.items()}
    idle = (0.0,) * len(facts.strategy.replicas)
    return RankOutcome(0.0, 0.0, 0.0, 0.0, idle, 0, zeros if keep_gradients else {})


def _name(key: str) -> str:
    """The parameter name of a plan key (`runtime/layouts.py`)."""
    return key.partition("#")[0]
