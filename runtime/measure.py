"""Measures what micro-batches take: times per stage slot, bridges, and peak memory, on the cluster of a program.

Real processes are timed by the clock, with all replicas of a strategy at work, for they share the machine in training
too (docs/decisions/0005). Simulated ranks run one after another in one process: there, one replica of each scheme runs,
a rank's time is the CPU time of its own generator, and a slot takes as long as that of the slowest stage; the CPU time
of the cluster itself, which stands for the messages, is shared out evenly. So what else the machine does counts little.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hgraph.data.packed import Packed, pack
from hgraph.strategy import Scheme, Strategy
from runtime.live_bytes import LiveBytes, watched
from runtime.rank_step import RankState, collect_gradients, exchange_parameters, run_micro_batches
from runtime.requests import AllReduce, RankGenerator

if TYPE_CHECKING:
    from runtime.program import Program

__all__ = [
    "Sample",
    "Sampling",
    "Tick",
    "measure",
    "measure_bridges",
    "measure_peaks",
    "micro_batch_counts",
    "num_runs",
    "shapes_to_check",
    "shapes_to_fit",
]

Tick = Callable[[], object]
"""Called after every run of a strategy."""

_SEED = 0
_MOST_MICRO_BATCHES = 8
"""Bounds the time that measuring takes where loads are very unequal."""
_SIMULATED_MICRO_BATCHES = 2
"""One whose gradients begin the sums, and one that adds to them."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What is run: micro-batches of sequences of `lengths`, each `repeats` times.

    With `held_out`, others as well, which no fit sees. What takes `long_s` seconds or more is an average by itself and
    is not repeated.
    """

    lengths: tuple[int, ...] = (32, 128, 512)
    repeats: int = 2
    held_out: bool = False
    long_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Sample:
    """The lengths of a micro-batch, and what it took in ms per stage slot, each time it was run."""

    lengths: tuple[int, ...]
    ms: tuple[float, ...]
    held_out: bool = False


def shapes_to_fit(lengths: Sequence[int], limit: int, longest: int | None) -> list[tuple[int, ...]]:
    """Returns the micro-batches to fit to under a limit: one sequence of each length, and packs of short ones.

    No sequence is longer than `longest`. Where lengths have to be cut, halves and quarters of the greatest take their
    place, so that there are several points to fit.
    """
    single = _single(lengths, limit, longest)
    room = min(limit, max(lengths))
    packs = [(length,) * (room // length) for length in single if room // length > 1]
    return [(length,) for length in single] + packs[:1]


def shapes_to_check(lengths: Sequence[int], limit: int, longest: int | None) -> list[tuple[int, ...]]:
    """Returns further micro-batches: lengths between those to fit to, and packs of unequal sequences."""
    single = _single(lengths, limit, longest)
    between = [round((low * high) ** 0.5) for low, high in itertools.pairwise(single)]
    found: list[tuple[int, ...]] = [(length,) for length in between if length not in single]
    room = min(limit, max(lengths))
    for first in single[1:]:
        rest = (room - first) // single[0]
        if rest > 0:
            found.append((first,) + (single[0],) * min(rest, 2 * len(single)))
    seen = set(shapes_to_fit(lengths, limit, longest))
    return [shape for shape in dict.fromkeys(found) if shape not in seen]


def _single(lengths: Sequence[int], limit: int, longest: int | None) -> list[int]:
    top = limit if longest is None else min(limit, longest)
    single = {length for length in lengths if length <= top}
    if len(single) < len(set(lengths)):
        single |= {max(1, top // 4), max(1, top // 2), top}
    return sorted(single)


def num_runs(program: Program, tokens: Mapping[str, int], sampling: Sampling) -> int:
    """Returns how often `measure` and `measure_bridges` call their tick for all strategies, if nothing is too long."""
    total = 0
    known: set[str] = set()
    for strategy in program.pool.strategies:
        total += sampling.repeats + 1
        fresh = {str(replica.scheme) for replica in strategy.replicas} - known
        if fresh:
            total += 1 + sampling.repeats * sum(map(len, _turns(program, strategy, tokens, sampling)))
        known |= fresh
    return total


def measure(
    program: Program,
    strategy: Strategy,
    fresh: Sequence[Scheme],
    tokens: Mapping[str, int],
    sampling: Sampling,
    tick: Tick | None = None,
) -> dict[str, list[Sample]]:
    """Returns what micro-batches of the schemes of `fresh`, which the strategy has, took. Collective.

    Passes over all shapes are repeated, so that a slow spell of the machine does not fall on one shape alone.
    """
    if not fresh:
        return {}
    names = [str(replica.scheme) for replica in strategy.replicas]
    chosen = [names.index(str(scheme)) for scheme in fresh]
    fitted, checked = _turns(program, strategy, tokens, sampling)
    taken: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    _run_once(program, strategy, fitted[0], chosen)
    _tick(tick)
    turns, is_long = [*fitted, *checked], set[int]()
    for _, turn in itertools.product(range(sampling.repeats), range(len(turns))):
        if turn in is_long:
            continue
        loads = turns[turn]
        times, run_s = _run_once(program, strategy, loads, chosen)
        if run_s >= sampling.long_s:
            is_long.add(turn)
        for index in chosen:
            taken.setdefault((names[index], loads[index]), []).append(times[index])
        _tick(tick)
    to_fit = {(names[index], loads[index]) for loads in fitted for index in chosen}
    result: dict[str, list[Sample]] = {str(scheme): [] for scheme in fresh}
    for (name, load), runs in taken.items():
        result[name].append(Sample(load, tuple(runs), (name, load) not in to_fit))
    return result


def _turns(
    program: Program, strategy: Strategy, tokens: Mapping[str, int], sampling: Sampling
) -> tuple[list[list[tuple[int, ...]]], list[list[tuple[int, ...]]]]:
    """The loads of all replicas for each run: those to fit to, and those held out."""
    limits = [tokens[str(replica.scheme)] for replica in strategy.replicas]
    fitted = [shapes_to_fit(sampling.lengths, limit, program.longest_sequence) for limit in limits]
    checked = [
        shapes_to_check(sampling.lengths, limit, program.longest_sequence) if sampling.held_out else []
        for limit in limits
    ]
    turns = [[own[turn % len(own)] for own in fitted] for turn in range(max(map(len, fitted)))]
    # A replica with nothing (more) to check repeats what it ran to fit, which then does not count as held out.
    more = [
        [own[turn % len(own)] if own else fit[0] for own, fit in zip(checked, fitted, strict=True)]
        for turn in range(max(map(len, checked)))
    ]
    return turns, more


def _tick(tick: Tick | None) -> None:
    if tick is not None:
        tick()


def micro_batch_counts(strategy: Strategy, loads: Sequence[tuple[int, ...]]) -> list[int]:
    """Returns how many equal micro-batches each replica runs; v of them fill v + pp - 1 slots.

    Enough that every stage is at work at once, as in training, and that all replicas have about as many tokens per
    rank: one that ended early would leave the others the machine.
    """
    least = [2 * replica.scheme.pp - 1 for replica in strategy.replicas]
    shares = [sum(load) / len(replica.ranks) for load, replica in zip(loads, strategy.replicas, strict=True)]
    work = max(count * share for count, share in zip(least, shares, strict=True))
    return [
        max(count, min(_MOST_MICRO_BATCHES, round(work / share))) for count, share in zip(least, shares, strict=True)
    ]


def _run_once(
    program: Program, strategy: Strategy, loads: Sequence[tuple[int, ...]], chosen: Sequence[int]
) -> tuple[list[float], float]:
    """Milliseconds per stage slot of each replica, and the seconds of the run: the same on every rank.

    Only the times of the replicas `chosen` mean something.
    """
    if _is_simulated(program):
        return _run_simulated(program, strategy, loads, chosen)
    counts = micro_batch_counts(strategy, loads)
    watch = _Watch(_wall_s)
    times = _run(program, strategy, _batches(program, loads, counts), watch)
    slots = [count + replica.scheme.pp - 1 for count, replica in zip(counts, strategy.replicas, strict=True)]
    return [ms / own for ms, own in zip(times, slots, strict=True)], max(times) / 1e3


def _run_simulated(
    program: Program, strategy: Strategy, loads: Sequence[tuple[int, ...]], chosen: Sequence[int]
) -> tuple[list[float], float]:
    counts = [_SIMULATED_MICRO_BATCHES if index in chosen else 0 for index in range(len(loads))]
    watch = _Watch(time.process_time)
    times = _run(program, strategy, _batches(program, loads, counts), watch)
    at_work = [rank for index in chosen for rank in strategy.replicas[index].ranks]
    messages_s = max(0.0, watch.end_s - watch.start_s - sum(watch.busy_s.values())) / len(at_work)
    slowest_s = [max(watch.busy_s.get(rank, 0.0) for rank in replica.ranks) for replica in strategy.replicas]
    slots = [1e3 * (own_s + messages_s) / _SIMULATED_MICRO_BATCHES for own_s in slowest_s]
    return slots, max(times) / 1e3


@dataclass(slots=True)
class _Watch:
    """When the ranks of this process began and ended, and how long each was at work, in seconds of `clock`."""

    clock: Callable[[], float]
    start_s: float = float("inf")
    end_s: float = 0.0
    busy_s: dict[int, float] = field(default_factory=dict)

    def watched(self, generator: RankGenerator[Any], rank: int) -> RankGenerator[Any]:
        """Runs a rank's generator and adds up the time that it computes."""
        answer: Any = None
        self.start_s = min(self.start_s, self.clock())
        while True:
            before_s = self.clock()
            try:
                request = generator.send(answer)
            except StopIteration as stop:
                self.end_s = max(self.end_s, self.clock())
                return stop.value
            finally:
                self.busy_s[rank] = self.busy_s.get(rank, 0.0) + self.clock() - before_s
            answer = yield request


def _run(program: Program, strategy: Strategy, batches: Sequence[list[Packed]], watch: _Watch) -> list[float]:
    """Runs micro-batches on every replica; returns the milliseconds of each, from when all began."""
    generators = {rank: _timed(state, strategy, batches, watch) for rank, state in program.ranks.items()}
    with torch.no_grad():
        return next(iter(program.cluster.run(generators).values()))


def _batches(program: Program, loads: Sequence[tuple[int, ...]], counts: Sequence[int]) -> list[list[Packed]]:
    return [[_random_batch(program, load)] * count for load, count in zip(loads, counts, strict=True)]


def _is_simulated(program: Program) -> bool:
    """Whether this process does the work of all ranks by itself, on its CPU."""
    local = program.cluster.local_ranks
    return program.cluster.device.type == "cpu" and len(local) == program.pool.num_ranks


def _wall_s() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _timed(
    state: RankState, strategy: Strategy, batches: Sequence[list[Packed]], watch: _Watch
) -> RankGenerator[list[float]]:
    executable = state.executables[strategy.name]
    parameters = yield from exchange_parameters(state, executable)
    world = tuple(range(state.num_ranks))
    yield AllReduce(world, torch.zeros(1), "sum", "measuring: start")
    start_s = watch.clock()
    times = torch.zeros(len(strategy.replicas), dtype=torch.float64)
    if executable.replica is not None:
        run = run_micro_batches(state, executable, parameters, batches[executable.replica], 1.0)
        yield from watch.watched(run, state.rank)
        times[executable.replica] = 1e3 * (watch.clock() - start_s)
    times = yield AllReduce(world, times, "max", "measuring: times")
    return times.tolist()


def measure_bridges(program: Program, strategy: Strategy, repeats: int, tick: Tick | None = None) -> float:
    """Returns the ms of what a step does around its micro-batches: parameters in, gradients out. Collective."""
    simulated = _is_simulated(program)
    clock = time.process_time if simulated else _wall_s
    runs = []
    for _ in range(repeats + 1):
        generators = {rank: _timed_bridge(state, strategy, clock) for rank, state in program.ranks.items()}
        with torch.no_grad():
            runs.append(next(iter(program.cluster.run(generators).values())))
        _tick(tick)
    return statistics.median(runs[1:]) / (program.pool.num_ranks if simulated else 1)


def _timed_bridge(state: RankState, strategy: Strategy, clock: Callable[[], float]) -> RankGenerator[float]:
    world = tuple(range(state.num_ranks))
    yield AllReduce(world, torch.zeros(1), "sum", "measuring: start")
    start_s = clock()
    executable = state.executables[strategy.name]
    parameters = yield from exchange_parameters(state, executable)
    result = yield from run_micro_batches(state, executable, parameters, [], 1.0)
    yield from collect_gradients(state, executable, result)
    elapsed = torch.tensor([1e3 * (clock() - start_s)], dtype=torch.float64)
    elapsed = yield AllReduce(world, elapsed, "max", "measuring: times")
    return elapsed.item()


def measure_peaks(
    program: Program, strategy: Strategy, fresh: Sequence[Scheme], load: tuple[int, ...]
) -> dict[str, list[int]]:
    """Returns the most bytes that a rank of each stage held, for the schemes of `fresh`, in micro-batches of `load`.

    Counted by `runtime/live_bytes.py` while a rank computes; the weights it computes with are among it. Collective.
    """
    names = [str(replica.scheme) for replica in strategy.replicas]
    chosen = {str(scheme): strategy.replicas[names.index(str(scheme))] for scheme in fresh}
    at_work = [strategy.replicas[index] in chosen.values() for index in range(len(names))]
    counts = [
        2 * replica.scheme.pp - 1 if works else 0 for replica, works in zip(strategy.replicas, at_work, strict=True)
    ]
    batches = _batches(program, [load] * len(counts), counts)
    generators = {rank: _counted(state, strategy, batches) for rank, state in program.ranks.items()}
    with torch.no_grad():
        peaks = next(iter(program.cluster.run(generators).values()))
    return {
        name: [max(int(peaks[rank]) for rank in replica.stage_ranks(stage)) for stage in range(replica.scheme.pp)]
        for name, replica in chosen.items()
    }


def _counted(state: RankState, strategy: Strategy, batches: Sequence[list[Packed]]) -> RankGenerator[list[float]]:
    counter = LiveBytes()
    executable = state.executables[strategy.name]
    parameters = yield from watched(exchange_parameters(state, executable), counter)
    if executable.replica is not None:
        run = run_micro_batches(state, executable, parameters, batches[executable.replica], 1.0)
        yield from watched(run, counter)
    peaks = torch.zeros(state.num_ranks, dtype=torch.float64)
    peaks[state.rank] = counter.peak_bytes
    peaks = yield AllReduce(tuple(range(state.num_ranks)), peaks, "max", "measuring: peaks")
    return peaks.tolist()


def _random_batch(program: Program, lengths: Sequence[int]) -> Packed:
    generator = np.random.default_rng(_SEED)
    top = program.vocab_size or 2
    row = pack([torch.from_numpy(generator.integers(0, top, length)) for length in lengths])
    return replace(row, fields=program.contents.empty_fields(lengths))
