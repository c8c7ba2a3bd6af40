"""What `hgraph profile` does: compile a pool, measure every scheme with points held out, and count peak memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hgraph.graph import BOUNDARIES, TOKENS
from hgraph.memory_model import DeviceSizes, ModelSizes
from hgraph.model_facts import ModelFacts
from hgraph.profile_file import ProfileFile
from hgraph.strategy import Pool, Replica, Scheme, Strategy
from runtime.calibrate import MemoryLimits, profile_of, token_limits
from runtime.config import ModelConfig, RunConfig
from runtime.measure import Sampling, Tick, measure_peaks, num_runs, shapes_to_fit
from runtime.memory import optimizer_bytes, scheme_memory
from runtime.program import Program

__all__ = ["PeakReport", "pool_of_all_schemes", "profile_program"]


@dataclass(frozen=True, slots=True)
class PeakReport:
    """Peak memory of the fullest rank of a scheme for micro-batches of `tokens`, optimizer states aside.

    `counted_bytes` of live tensors while it ran; `predicted_bytes` by the expressions of its programs.
    """

    tokens: int
    counted_bytes: int
    predicted_bytes: int


def pool_of_all_schemes(num_ranks: int, facts: ModelFacts | None) -> Pool:
    """Returns a pool of one strategy for every (tp, pp) whose product divides `num_ranks`, of equal replicas.

    tp is at most the query heads of the model and pp its layers, where `facts` tell them.
    """
    strategies = []
    for tp in _divisors(num_ranks):
        for pp in _divisors(num_ranks // tp):
            if facts is not None and (tp > facts.num_query_heads or pp > facts.num_layers):
                continue
            scheme, size = Scheme.uniform(tp, pp), tp * pp
            replicas = [Replica(scheme, tuple(range(first, first + size))) for first in range(0, num_ranks, size)]
            count = f" x{len(replicas)}" if len(replicas) > 1 else ""
            strategies.append(Strategy(f"{scheme}{count}", tuple(replicas)))
    return Pool(num_ranks, tuple(strategies))


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def profile_program(
    program: Program,
    config: RunConfig,
    sampling: Sampling,
    *,
    begin: Callable[[int], Tick] | None = None,
) -> tuple[ProfileFile, dict[str, PeakReport]]:
    """Returns the profile of a program's pool, and what was counted of its memory by scheme. Collective.

    `begin` is told how many runs there will be, and gives what to call after each.
    """
    limits = MemoryLimits(config.memory.budget_mib, config.memory.max_tokens)
    tokens = token_limits(program, limits)
    tick = None if begin is None else begin(num_runs(program, tokens, sampling) + len(program.pool.strategies))
    profile = profile_of(program, limits, sampling, tick=tick)
    peaks = _peaks(program, tokens, sampling, tick)
    lengths = ", ".join(map(str, sampling.lengths))
    described = replace(
        profile,
        name=config.name,
        model=_sizes(config.model),
        device=_device(program),
        source=_source(program),
        notes=(f"Fitted to sequences of {lengths} tokens and packs of them, each run {sampling.repeats} times.",),
    )
    return described, peaks


def _peaks(program: Program, tokens: Mapping[str, int], sampling: Sampling, tick: Tick | None) -> dict[str, PeakReport]:
    """Counts, for each scheme, in the first strategy that has it."""
    found: dict[str, PeakReport] = {}
    for strategy in program.pool.strategies:
        fresh = {str(r.scheme): r.scheme for r in strategy.replicas if str(r.scheme) not in found}
        if fresh:
            least = min(tokens[name] for name in fresh)
            load = max(shapes_to_fit(sampling.lengths, least, program.longest_sequence), key=sum)
            peaks = measure_peaks(program, strategy, tuple(fresh.values()), load)
            found |= {name: _report(program, name, stages, load) for name, stages in peaks.items()}
        _call(tick)
    return found


def _call(tick: Tick | None) -> None:
    if tick is not None:
        tick()


def _report(program: Program, name: str, counted: Sequence[int], load: tuple[int, ...]) -> PeakReport:
    num_ranks = program.pool.num_ranks
    share = optimizer_bytes(program.captured) // num_ranks
    sizes = {TOKENS: sum(load), BOUNDARIES: len(load) + 1}
    stages = scheme_memory(program.compiled[name], program.captured, num_ranks)
    predicted = [int(stage.peak_bytes.subs(sizes)) - share for stage in stages]
    fullest = max(range(len(counted)), key=lambda stage: counted[stage])
    return PeakReport(sum(load), counted[fullest], predicted[fullest])


def _sizes(model: ModelConfig) -> ModelSizes | None:
    """Sizes of the decoder that comes along; those of a model of the user's own are not known."""
    if model.factory is not None:
        return None
    return ModelSizes(model.layers, model.hidden, model.ffn, model.heads, model.vocab_size, model.kv_heads)


def _device(program: Program) -> DeviceSizes | None:
    device = program.cluster.device
    if device.type != "cuda":
        return None
    facts = torch.cuda.get_device_properties(device)
    return DeviceSizes(facts.name, facts.total_memory / 2**20, torch.cuda.device_count())


def _source(program: Program) -> str:
    processes = len(program.cluster.local_ranks) == 1 and program.pool.num_ranks > 1
    where = f"{program.pool.num_ranks} processes, by the clock" if processes else "simulated ranks, by CPU time"
    return f"measured by hgraph profile on {where} ({program.cluster.device.type}, torch {torch.__version__})"
