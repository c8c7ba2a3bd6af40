"""Bridges overlap with computing: the same numbers in any number of buckets and on any nodes, and the trace shows it.

On real processes who is faster is chance, so the overlap is enforced there: a rank is made to wait, in the middle of
its schedule, for what can only have come meanwhile. Without overlap these runs would end in a time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hgraph.action import Action
from hgraph.data.batches import GlobalBatch
from hgraph.errors import InvalidInput
from hgraph.strategy import Scheme
from hgraph.topology import Topology
from runtime.bridge import arrived, landed, posted
from runtime.bridge_planner import BridgePlanner, StrategyBridges
from runtime.cluster import ProcessCluster, SimulatedCluster
from runtime.executor import begins, is_final
from runtime.gloo import ProcessTransport
from runtime.layouts import parameter_of
from runtime.messages import Event, Message
from runtime.optimizer import AdamW
from runtime.program import Program
from runtime.rank_step import GRADIENTS, PARAMETERS, StepFacts, rank_step
from runtime.requests import Await, RankGenerator, Signal
from runtime.verify_batches import plan_of
from tests.bridge_samples import nodes
from tests.gloo_workers import GlooPool
from tests.models import language_loss, llama
from tests.small_pools import (
    assert_close,
    draw_batch,
    exact_program,
    expected_step,
    overridden,
    pool,
    restore,
    run_step,
    snapshot,
    stages,
    strategy,
    train_step,
)

U = Scheme.uniform
POOL = pool(
    4,
    strategy("tp2.pp2", U(2, 2)),
    strategy("pp4", U(1, 4)),
    strategy("het", U(2), U(1), U(1)),
    strategy("tp3 ahead of tp1", stages((3, 2), (1, 2))),
    strategy("unequal subgroups", overridden(3, layers__1__mlp="0-1[S(2)] + 2[] @ S(1)")),
    strategy("three idle ranks", U(1)),
)
ASSIGNMENTS: dict[str, Any] = {
    "tp2.pp2": (((0,), (1,), (2,)),),
    "pp4": (((0, 1), (2,)),),
    "het": (((0,), (1,)), ((2,),), ()),
    "tp3 ahead of tp1": (((0,), (1,), (2,)),),
    "unequal subgroups": (((0, 1, 2),),),
    "three idle ranks": (((0, 1, 2),),),
}
LENGTHS = (9, 4, 6)
TWO_NODES = nodes((0, 1), (2, 3))
TWO_RANKS = pool(2, strategy("pp2", U(1, 2)), strategy("two", U(1), U(1)))
TWO_RANKS_ASSIGNMENTS: dict[str, Any] = {"pp2": (((0,), (1,), (2,)),), "two": (((0,), (1,)), ((2,),))}


def small_model(layers: int = 4) -> torch.nn.Module:
    return llama(hidden=24, ffn=25, layers=layers, vocab_size=31, tie_embeddings=True)


@pytest.fixture(scope="module")
def overlapping() -> Program:
    """Many buckets, on two nodes: terms are summed and copies shared inside them."""
    return exact_program(small_model(), language_loss, POOL, bucket_mb=0.006, topology=TWO_NODES)


def with_buckets(program: Program, bucket_mb: float) -> Program:
    """Returns a program of the same compiled graphs from the first weights, with other buckets and one node."""
    cluster = SimulatedCluster(4)
    optimizer = AdamW(lr=1e-3)
    model = small_model().double()
    other = Program(model, program.captured, program.compiled, POOL, optimizer, cluster, 0, bucket_mb=bucket_mb)
    other.planning = program.planning
    return other


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_gradients_equal_the_untouched_module(overlapping: Program, name: str) -> None:
    bridges = overlapping.ranks[0].executables[name].bridges
    assert min(bridges.parameters.num_buckets, bridges.gradients.num_buckets) >= 8
    batch = draw_batch(3, LENGTHS, 31)
    step = run_step(overlapping, batch, name, ASSIGNMENTS[name])
    assert_close(step, expected_step(small_model().double(), language_loss, batch))


def test_buckets_and_nodes_do_not_change_the_loss_of_later_steps(overlapping: Program) -> None:
    """Sums on the way change the order of addition: about 1e-16 a step."""
    whole, batch = with_buckets(overlapping, 25.0), draw_batch(4, LENGTHS, 31)
    assert whole.ranks[0].executables["het"].bridges.parameters.num_buckets == 1
    start = snapshot(overlapping)
    for name, assignment in ASSIGNMENTS.items():
        losses = [train_step(program, batch, name, assignment) for program in (overlapping, whole)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-13)
    restore(overlapping, start)


def first_and_last(stage: int, num_micro_batches: int = 3) -> tuple[str, str]:
    """Returns the events of the first forward and the last backward pass of a stage."""
    return begins(Action("F", stage, 0)), begins(Action("B", stage, num_micro_batches - 1))


def trace_of(program: Program, name: str) -> list[Event]:
    start = snapshot(program)
    train_step(program, draw_batch(3, LENGTHS, 31), name, ASSIGNMENTS[name])
    restore(program, start)
    return list(program.cluster.virtual.trace)  # type: ignore[attr-defined]


def when(trace: list[Event], rank: int, text: str) -> float:
    return next(event.when for event in trace if (event.rank, event.text) == (rank, text))


def check_parameters(trace: list[Event], num_parameter_buckets: int, stage_1: Sequence[int]) -> None:
    """Asserts that rank 0 computes before the ranks of stage 1 have all of their parameters."""
    for rank in stage_1:
        assert when(trace, 0, first_and_last(0)[0]) < when(trace, rank, landed(PARAMETERS, num_parameter_buckets - 1))


def check_buckets(bridges: StrategyBridges) -> None:
    """Asserts that rank 0 has a part in the last bucket of parameters, and waits for the first one of gradients."""
    assert bridges.parameters.buckets[-1].steps[0].sends
    assert not bridges.parameters.buckets[-1].targets
    assert bridges.gradients.buckets[0].steps[0].receives
    assert not bridges.gradients.buckets[0].sources


def test_the_trace_of_simulated_ranks_shows_overlap(overlapping: Program) -> None:
    bridges = overlapping.ranks[0].executables["tp2.pp2"].bridges
    check_buckets(bridges)
    trace = trace_of(overlapping, "tp2.pp2")
    check_parameters(trace, bridges.parameters.num_buckets, (2, 3))
    for rank in (2, 3):
        assert when(trace, rank, posted(GRADIENTS, 0)) < when(trace, 0, first_and_last(0)[1])
    assert [event.when for event in trace] == list(range(len(trace)))


def check_gradients(trace: list[Event], bridges: StrategyBridges, rank: int) -> None:
    """Asserts that a rank sends each bucket after its own gradients in it are final, the first before the last are."""
    final = {event.text: event.when for event in trace if event.rank == rank and event.text.endswith("is final")}
    bridge, sent = bridges.gradients, []
    for bucket in bridge.buckets:
        names = [is_final(parameter_of(bridge.names[position])) for position in bucket.sources]
        if names and bucket.steps and bucket.steps[0].sends:
            sent.append(when(trace, rank, posted(GRADIENTS, bucket.number)))
            assert max(final[name] for name in names) < sent[-1]
    assert len(sent) > 1
    assert sent[0] < max(final.values())


@pytest.mark.parametrize("name, ranks", [("tp2.pp2", (2, 3)), ("het", (0, 1)), ("unequal subgroups", (0, 1, 2))])
def test_gradients_leave_layer_by_layer(overlapping: Program, name: str, ranks: tuple[int, ...]) -> None:
    """Where a rank waits for others within its backward pass, its task goes on: the trace shows the order of layers."""
    trace = trace_of(overlapping, name)
    for rank in ranks:
        check_gradients(trace, overlapping.ranks[rank].executables[name].bridges, rank)
        own = [event.text for event in trace if event.rank == rank]
        last = own.index(begins(Action("B", int(name == "tp2.pp2"), len(ASSIGNMENTS[name][0]) - 1)))
        finals = [at for at, text in enumerate(own) if text.endswith("is final")]
        assert finals and last < finals[0], "only the last micro-batch makes a gradient final"


def test_nothing_is_read_or_changed_too_early(overlapping: Program) -> None:
    """Each rank's first action comes after its own parameters; weights change after all of the bridge has been sent."""
    trace = trace_of(overlapping, "pp4")
    for rank in range(4):
        texts = [event.text for event in trace if event.rank == rank]
        first, last = first_and_last(rank, 2)
        assert texts.index(arrived(PARAMETERS)) < texts.index(first)
        assert texts.index(f"{PARAMETERS}: ended") < texts.index(posted(GRADIENTS, 0))
        own = [text for text in texts if text.startswith(GRADIENTS) and text.endswith("landed")]
        assert len(own) > 4
        assert last in texts


def hold(
    generator: RankGenerator[Any], *, before: str | None = None, after: str | None = None, until: str
) -> RankGenerator[Any]:
    """Passes everything on, but waits for the event `until` right before or after another is signalled."""
    answer: Any = None
    while True:
        try:
            request = generator.send(answer)
        except StopIteration as stop:
            return stop.value
        event = request.event if isinstance(request, Signal) else None
        if event is not None and event == before:
            yield Await(until)
        answer = yield request
        if event is not None and event == after:
            yield Await(until)


@dataclass(frozen=True, slots=True)
class Run:
    """What one process saw: traces and buckets of steps that overlap; losses; the log of a last step."""

    trace: list[Event]
    layers: list[Event]
    num_parameter_buckets: int
    losses: list[float]
    log: list[Message]


def run_here() -> Run:
    """Runs a step in which rank 0 is made to overlap, then steps without threads.

    Rank 0 passes on nothing of the parameters, once it has its own, until its first forward pass has begun; and it does
    not begin its last backward pass until the last stage's first bucket of gradients is there. Where each rank has a
    replica, both do not finish their last backward pass until the first bucket of gradients has been exchanged.
    """
    cluster = ProcessCluster(60.0)
    batch = draw_batch(3, LENGTHS, 31)
    program = exact_program(small_model(2), language_loss, TWO_RANKS, bucket_mb=0.006, cluster=cluster)
    executable = program.ranks[cluster.rank].executables["pp2"]
    bridge, executor, transport = executable.bridges.parameters, executable.executor, cluster.transport
    assert transport is not None
    start = snapshot(program)
    if cluster.rank == 0:
        check_buckets(executable.bridges)
        first, last = first_and_last(0)
        _wrap(bridge, "run", lambda run: hold(run, after=arrived(PARAMETERS), until=first))
        _wrap(executor, "run", lambda run: hold(run, before=last, until=landed(GRADIENTS, 0)))
    losses = [train_step(program, batch, "pp2", TWO_RANKS_ASSIGNMENTS["pp2"])]
    trace = list(transport.trace)
    restore(program, start)
    if cluster.rank == 0:
        del bridge.run, executor.run  # type: ignore[method-assign, union-attr]
    layers = leave_by_layer(program, batch, cluster.rank)
    restore(program, start)
    cluster.transport = ProcessTransport(transport.groups, overlap=False)
    losses += [train_step(program, batch, name, assignment) for name, assignment in TWO_RANKS_ASSIGNMENTS.items()]
    program.close()
    return Run(trace, layers, bridge.num_buckets, losses, cluster.transport.log)


def leave_by_layer(program: Program, batch: GlobalBatch, rank: int) -> list[Event]:
    """Returns the trace of a step of two replicas that hold back their last gradients until the first are exchanged."""
    executor = program.ranks[rank].executables["two"].executor
    _wrap(executor, "run", lambda run: hold(run, before=is_final("embed.weight"), until=landed(GRADIENTS, 0)))
    train_step(program, batch, "two", TWO_RANKS_ASSIGNMENTS["two"])
    del executor.run  # type: ignore[method-assign, union-attr]
    assert program.cluster.transport is not None  # type: ignore[attr-defined]
    return list(program.cluster.transport.trace)  # type: ignore[attr-defined]


def _wrap(thing: Any, name: str, around: Callable[[RankGenerator[Any]], RankGenerator[Any]]) -> None:
    """Replaces a method that returns a generator by one that goes through `around`."""
    plain = getattr(thing, name)
    setattr(thing, name, lambda *args, **kwargs: around(plain(*args, **kwargs)))


@pytest.fixture(scope="module")
def processes(gloo: GlooPool) -> list[Run]:
    return gloo.run(run_here, num_ranks=2, timeout_s=280.0)


@pytest.mark.gloo
def test_the_trace_of_real_processes_shows_overlap(processes: list[Run]) -> None:
    trace = sorted(event for run in processes for event in run.trace)
    check_parameters(trace, processes[0].num_parameter_buckets, (1,))
    assert when(trace, 0, landed(GRADIENTS, 0)) < when(trace, 0, first_and_last(0)[1])


@pytest.mark.gloo
def test_the_trace_of_real_processes_shows_layers_that_leave(processes: list[Run]) -> None:
    for rank, run in enumerate(processes):
        assert when(run.layers, rank, landed(GRADIENTS, 0)) < when(run.layers, rank, is_final("embed.weight"))


@pytest.mark.gloo
def test_real_processes_train_alike_with_threads_and_without(processes: list[Run]) -> None:
    batch = draw_batch(3, LENGTHS, 31)
    program = exact_program(small_model(2), language_loss, TWO_RANKS, bucket_mb=0.006)
    losses = [train_step(program, batch, name, assignment) for name, assignment in TWO_RANKS_ASSIGNMENTS.items()]
    for rank, run in enumerate(processes):
        assert run.log == program.cluster.log_of(rank)
        assert run.losses == pytest.approx([losses[0], *losses], rel=1e-12)


def test_what_is_refused(overlapping: Program) -> None:
    dtypes = torch.float64, torch.float64

    def plan(bucket_mb: float, topology: Topology | None) -> None:
        compiled, captured = overlapping.compiled, overlapping.captured
        BridgePlanner(compiled, captured, 4, dtypes, bucket_mb, topology).plans(POOL["het"])

    with pytest.raises(InvalidInput, match=r"topology test: expected the 4 ranks of the pool, got 2"):
        plan(1.0, nodes((0,), (1,)))
    with pytest.raises(InvalidInput, match=r"bucket_mb: expected a size above 0 MB, got 0.0"):
        plan(0.0, None)


def test_an_error_in_a_task_reaches_the_caller(overlapping: Program) -> None:
    state = overlapping.ranks[2]
    broken = dict(state.frozen) | {"embed.weight": torch.zeros(1)}
    chosen = overlapping.pool["het"]
    batch = draw_batch(3, LENGTHS, 31)
    plan = plan_of(ASSIGNMENTS["het"], chosen, overlapping.profile, batch.lengths, 0)
    facts = StepFacts(0, batch, (plan,), (chosen,))
    kept, state.frozen = state.frozen, broken
    try:
        with pytest.raises(InvalidInput, match=r"bridge: embed.weight: rank 2 expected \[8, 24\], got \[1\]"):
            overlapping.cluster.run({rank: rank_step(own, facts) for rank, own in overlapping.ranks.items()})
    finally:
        state.frozen = kept
