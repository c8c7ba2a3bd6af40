"""Calibration: costs of schemes and bridges, measured by running the compiled programs on this machine.

For each scheme a, b, c of `t = a sum s^2 + b sum s + c` (ms per stage slot; Hydraulis, arXiv 2412.07894, section 4) are
fitted to micro-batches of several lengths, alone and packed. All replicas of a strategy run at once, as they will in
training, since they share the machine. Token limits come from a memory budget per rank, or are given.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hgraph.data.packed import Packed, pack
from hgraph.errors import InvalidInput
from hgraph.graph import annotated_text
from hgraph.profile import Profile, SchemeCost
from hgraph.profile_file import ProfileFile, read_profile_file, write_profile_file
from hgraph.strategy import Scheme, Strategy
from hgraph.strategy_file import write_pool
from runtime.memory import MIB, scheme_memory, token_limit
from runtime.rank_step import RankState, collect_gradients, exchange_parameters, run_micro_batches
from runtime.requests import AllReduce, RankGenerator

if TYPE_CHECKING:
    from runtime.program import Program

__all__ = ["MemoryLimits", "calibrate", "max_tokens_of"]

_VERSION = 2
"""Raised by whoever changes what calibration runs, times or fits: profiles that were kept before do not count then."""
_SEED = 0
_MOST_MICRO_BATCHES = 8
"""Bounds the time that calibration takes where loads are very unequal."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What bounds the tokens of a micro-batch: `max_tokens` by scheme text, else a budget per rank in MiB."""

    budget_mib: float | None = 1024.0
    max_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sample:
    """One measured micro-batch: lengths of its sequences, and ms per stage slot."""

    lengths: tuple[int, ...]
    ms: float


def calibrate(
    program: Program,
    limits: MemoryLimits,
    *,
    lengths: Sequence[int] = (32, 128, 512),
    repeats: int = 2,
    cache: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Returns the profile of every scheme and strategy of the program's pool. Collective.

    `lengths` are those of the measured sequences; a scheme is measured with those that its limit and the model's table
    of positions, if it has one, leave, and with shorter ones instead of the others. With `cache`, a folder,
    results are kept there by what they depend on.
    """
    tokens = {str(scheme): max_tokens_of(program, scheme, limits) for scheme in program.pool.schemes}
    path = None if cache is None else Path(cache) / f"profile-{_key(program, tokens, lengths, repeats)}.yaml"
    known = program.cluster.broadcast(_kept(path, program.pool.num_ranks))
    if known is not None:
        return known
    costs, bridges = {}, {}
    for number, strategy in enumerate(program.pool.strategies, 1):
        if progress is not None:
            progress(f"calibrating {number}/{len(program.pool.strategies)}: {strategy.name}")
        bridges[strategy.name] = _measure_bridges(program, strategy, repeats)
        fresh = [r.scheme for r in strategy.replicas if str(r.scheme) not in costs]
        for name, cost in _measure(program, strategy, fresh, tokens, lengths, repeats).items():
            costs[name] = cost
    profile = program.cluster.broadcast(Profile(costs, bridges))
    if path is not None and 0 in program.cluster.local_ranks:
        write_profile_file(path, ProfileFile.of(profile))
    return profile


def _kept(path: Path | None, num_ranks: int) -> Profile | None:
    return None if path is None or not path.exists() else read_profile_file(path).profile(num_ranks)


def max_tokens_of(program: Program, scheme: Scheme, limits: MemoryLimits) -> int:
    """Returns the token limit of a micro-batch under `scheme`."""
    given = limits.max_tokens.get(str(scheme))
    if given is not None:
        return given
    if limits.budget_mib is None:
        raise InvalidInput(f"memory: no budget_mib, and max_tokens does not name scheme {scheme}")
    stages = scheme_memory(program.compiled[str(scheme)], program.captured, program.pool.num_ranks)
    try:
        limit = token_limit(stages, limits.budget_mib * MIB)
    except InvalidInput as error:
        raise InvalidInput(f"memory: scheme {scheme}: {error}") from error
    if limit < 1:
        fixed = max(stage.fixed_bytes for stage in stages) / MIB
        raise InvalidInput(
            f"memory: scheme {scheme} leaves no room for a token in {limits.budget_mib:g} MiB per rank (weights, "
            f"gradients and optimizer take {fixed:.0f} MiB); raise the budget or drop the scheme from the pool"
        )
    return limit


def _measure(
    program: Program,
    strategy: Strategy,
    fresh: Sequence[Scheme],
    tokens: Mapping[str, int],
    lengths: Sequence[int],
    repeats: int,
) -> dict[str, SchemeCost]:
    """Costs of the schemes of `fresh`, with all replicas of the strategy at work."""
    if not fresh:
        return {}
    samples: dict[str, list[_Sample]] = {str(scheme): [] for scheme in fresh}
    names = [str(replica.scheme) for replica in strategy.replicas]
    shapes = [_shapes(lengths, tokens[name], program.longest_sequence) for name in names]
    _run_once(program, strategy, [own[0] for own in shapes], [1] * len(shapes))
    for turn in range(max(map(len, shapes))):
        loads = [own[turn % len(own)] for own in shapes]
        counts = _micro_batches(strategy, loads)
        times = [_run_once(program, strategy, loads, counts) for _ in range(repeats)]
        for index, replica in enumerate(strategy.replicas):
            if names[index] in samples:
                slots = counts[index] + replica.scheme.pp - 1
                slot = statistics.median(run[index] for run in times) / slots
                samples[names[index]].append(_Sample(loads[index], slot))
    return {name: _fit(name, own, tokens[name]) for name, own in samples.items()}


def _micro_batches(strategy: Strategy, loads: Sequence[tuple[int, ...]]) -> list[int]:
    """How many equal micro-batches each replica runs; v of them fill v + pp - 1 slots.

    Enough that every stage is at work at once, as in training, and that all replicas have about as many tokens per
    rank: one that ended early would leave the others the machine.
    """
    least = [2 * replica.scheme.pp - 1 for replica in strategy.replicas]
    shares = [sum(load) / len(replica.ranks) for load, replica in zip(loads, strategy.replicas, strict=True)]
    work = max(count * share for count, share in zip(least, shares, strict=True))
    return [
        max(count, min(_MOST_MICRO_BATCHES, round(work / share))) for count, share in zip(least, shares, strict=True)
    ]


def _shapes(lengths: Sequence[int], limit: int, longest: int | None) -> list[tuple[int, ...]]:
    """The micro-batches to measure under a limit: one sequence of each length, and packs of short ones.

    No sequence is longer than `longest`. Where lengths have to be cut, halves and quarters of the greatest take their
    place, so that there are several points to fit.
    """
    top = limit if longest is None else min(limit, longest)
    single = {length for length in lengths if length <= top}
    if len(single) < len(set(lengths)):
        single |= {max(1, top // 4), max(1, top // 2), top}
    room = min(limit, max(lengths))
    packs = [(length,) * (room // length) for length in sorted(single) if room // length > 1]
    return [(length,) for length in sorted(single)] + packs[:1]


def _run_once(
    program: Program, strategy: Strategy, loads: Sequence[tuple[int, ...]], counts: Sequence[int]
) -> list[float]:
    """Milliseconds of each replica for a number of equal micro-batches."""
    batches = [[_random_batch(program, load)] * count for load, count in zip(loads, counts, strict=True)]
    generators = {rank: _timed(state, strategy, batches) for rank, state in program.ranks.items()}
    with torch.no_grad():
        times = next(iter(program.cluster.run(generators).values()))
    return [ms / _serial(program, strategy) for ms in times]


def _serial(program: Program, strategy: Strategy) -> float:
    """Simulated ranks run one after another in one process: a rank's share of that is what it would take by itself."""
    return 1.0 if len(program.cluster.local_ranks) == 1 else float(len(strategy.ranks))


def _timed(state: RankState, strategy: Strategy, batches: Sequence[list[Packed]]) -> RankGenerator[list[float]]:
    executable = state.executables[strategy.name]
    parameters = yield from exchange_parameters(state, executable)
    world = tuple(range(state.num_ranks))
    yield AllReduce(world, torch.zeros(1), "sum", "calibration: start")
    start_s = time.perf_counter()
    if executable.replica is not None:
        yield from run_micro_batches(state, executable, parameters, batches[executable.replica], 1.0)
    times = torch.zeros(len(strategy.replicas), dtype=torch.float64)
    if executable.replica is not None:
        times[executable.replica] = 1e3 * (time.perf_counter() - start_s)
    times = yield AllReduce(world, times, "max", "calibration: times")
    return times.tolist()


def _measure_bridges(program: Program, strategy: Strategy, repeats: int) -> float:
    """Milliseconds of what a step does around its micro-batches: parameters in, gradients out."""
    runs = []
    for _ in range(repeats + 1):
        generators = {rank: _timed_bridge(state, strategy) for rank, state in program.ranks.items()}
        with torch.no_grad():
            runs.append(next(iter(program.cluster.run(generators).values())))
    serial = 1.0 if len(program.cluster.local_ranks) == 1 else float(program.pool.num_ranks)
    return statistics.median(runs[1:]) / serial


def _timed_bridge(state: RankState, strategy: Strategy) -> RankGenerator[float]:
    world = tuple(range(state.num_ranks))
    yield AllReduce(world, torch.zeros(1), "sum", "calibration: start")
    start_s = time.perf_counter()
    executable = state.executables[strategy.name]
    parameters = yield from exchange_parameters(state, executable)
    result = yield from run_micro_batches(state, executable, parameters, [], 1.0)
    yield from collect_gradients(state, executable, result)
    elapsed = torch.tensor([1e3 * (time.perf_counter() - start_s)], dtype=torch.float64)
    elapsed = yield AllReduce(world, elapsed, "max", "calibration: times")
    return elapsed.item()


def _random_batch(program: Program, lengths: Sequence[int]) -> Packed:
    generator = np.random.default_rng(_SEED)
    top = program.vocab_size or 2
    row = pack([torch.from_numpy(generator.integers(0, top, length)) for length in lengths])
    return replace(row, fields=program.contents.empty_fields(lengths))


def _fit(name: str, samples: Sequence[_Sample], max_tokens: int) -> SchemeCost:
    """Least squares of relative errors with a, b, c of 0 or more: the best of all subsets of coefficients."""
    if not samples:
        raise InvalidInput(f"calibration: nothing was measured for scheme {name}")
    rows = np.array([[sum(s * s for s in x.lengths), sum(x.lengths), 1.0] for x in samples])
    weights = np.array([1.0 / max(sample.ms, 1e-6) for sample in samples])
    best, best_error = np.zeros(3), float("inf")
    for size in (1, 2, 3):
        for columns in itertools.combinations(range(3), size):
            matrix = rows[:, columns] * weights[:, None]
            solution, *_ = np.linalg.lstsq(matrix, np.ones(len(samples)), rcond=None)
            error = float(np.sum((matrix @ solution - 1.0) ** 2))
            if np.all(solution >= 0) and error < best_error - 1e-12:
                best, best_error = np.zeros(3), error
                best[list(columns)] = solution
    a, b, c = (float(value) for value in best)
    return SchemeCost(a, b, c, max_tokens)


def _key(program: Program, tokens: Mapping[str, int], lengths: Sequence[int], repeats: int) -> str:
    parts = [
        f"calibration {_VERSION}",
        annotated_text(program.captured.graph),
        write_pool(program.pool),
        json.dumps([sorted(tokens.items()), list(lengths), repeats]),
        torch.__version__,
        type(program.cluster).__name__,
        f"{os.cpu_count()} {program.cluster.device}",
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
