"""Calibration: costs of a program's schemes, fitted to what its compiled programs took on this machine.

`calibrate` is what a run does before its first step; results are kept by what they depend on. `profile_of` is what
`hgraph profile` does: more points, some of them held out to tell the error. Both make one profile file
(docs/profiles.md). How it is measured is in `runtime/measure.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hgraph.cost_fit import fit_nonnegative, relative_errors
from hgraph.errors import InvalidInput
from hgraph.graph import annotated_text
from hgraph.memory_model import MemoryModel
from hgraph.profile import Profile
from hgraph.profile_file import FitError, ProfileFile, SchemeProfile, read_profile_file, write_profile_file
from hgraph.strategy import Scheme
from hgraph.strategy_file import write_pool
from runtime.measure import Sample, Sampling, Tick, measure, measure_bridges
from runtime.memory import MIB, optimizer_bytes, scheme_memory, token_limit
from runtime.program_cost import scheme_stage_memory

if TYPE_CHECKING:
    from runtime.program import Program

__all__ = ["MemoryLimits", "calibrate", "max_tokens_of", "profile_of", "token_limits"]

_LONG_S = 1.0
"""What takes so many seconds before the first step is not repeated."""

_VERSION = 3
"""Raised by whoever changes what calibration runs, times or fits: profiles that were kept before do not count then."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What bounds the tokens of a micro-batch: `max_tokens` by scheme text, else a budget per rank in MiB."""

    budget_mib: float | None = 1024.0
    max_tokens: Mapping[str, int] = field(default_factory=dict)


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
    of positions, if it has one, leave, and with shorter ones instead of the others; each `repeats` times, but once
    where that takes a second. With `cache`, a folder, results are kept there by what they depend on.
    """
    tokens = token_limits(program, limits)
    path = None if cache is None else Path(cache) / f"profile-{_key(program, tokens, lengths, repeats)}.yaml"
    known = program.cluster.broadcast(read_profile_file(path) if path is not None and path.exists() else None)
    if known is None:
        known = profile_of(program, limits, Sampling(tuple(lengths), repeats, long_s=_LONG_S), progress=progress)
        if path is not None and 0 in program.cluster.local_ranks:
            write_profile_file(path, known)
    return known.profile(program.pool.num_ranks)


def profile_of(
    program: Program,
    limits: MemoryLimits,
    sampling: Sampling,
    *,
    progress: Callable[[str], None] | None = None,
    tick: Tick | None = None,
) -> ProfileFile:
    """Returns costs and memory of every scheme of the program's pool, and bridge times of its strategies. Collective.

    `progress` is told what is being measured, `tick` called after every run (`runtime.measure.num_runs` in all).
    """
    tokens = token_limits(program, limits)
    schemes: dict[str, SchemeProfile] = {}
    bridges: dict[str, float] = {}
    for number, strategy in enumerate(program.pool.strategies, 1):
        if progress is not None:
            progress(f"calibrating {number}/{len(program.pool.strategies)}: {strategy.name}")
        bridges[strategy.name] = measure_bridges(program, strategy, sampling.repeats, tick)
        fresh = {str(r.scheme): r.scheme for r in strategy.replicas if str(r.scheme) not in schemes}
        samples = measure(program, strategy, tuple(fresh.values()), tokens, sampling, tick)
        for name, scheme in fresh.items():
            schemes[name] = _scheme_profile(program, scheme, samples[name], limits)
    budget = limits.budget_mib
    total = float(optimizer_bytes(program.captured))
    memory = None if budget is None else MemoryModel(budget_mib=budget, optimizer_bytes=total, source=_MEMORY_SOURCE)
    return program.cluster.broadcast(ProfileFile(schemes, bridges, memory=memory))


_MEMORY_SOURCE = "expressions of the compiled programs (hgraph dump shows them), not the allocator"


def token_limits(program: Program, limits: MemoryLimits) -> dict[str, int]:
    """Returns the token limit of a micro-batch under every scheme of the pool."""
    return {str(scheme): max_tokens_of(program, scheme, limits) for scheme in program.pool.schemes}


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


def _scheme_profile(program: Program, scheme: Scheme, samples: Sequence[Sample], limits: MemoryLimits) -> SchemeProfile:
    a, b, c = _fit(str(scheme), [sample for sample in samples if not sample.held_out])
    given = limits.max_tokens.get(str(scheme))
    compiled = program.compiled[str(scheme)]
    memory = () if given is not None else scheme_stage_memory(compiled, program.captured, program.pool.num_ranks)
    held_out = [sample for sample in samples if sample.held_out]
    return SchemeProfile(a, b, c, "measured", given, memory, _error((a, b, c), held_out))


def _fit(name: str, samples: Sequence[Sample]) -> tuple[float, float, float]:
    """a, b and c of 0 or more, by least relative errors over all runs."""
    if not samples:
        raise InvalidInput(f"calibration: nothing was measured for scheme {name}")
    rows = np.array([_row(sample) for sample in samples for _ in sample.ms])
    ms = np.array([max(ms, 1e-6) for sample in samples for ms in sample.ms])
    a, b, c = map(float, fit_nonnegative(rows, ms))
    return a, b, c


def _error(coefficients: tuple[float, float, float], samples: Sequence[Sample]) -> FitError | None:
    if not samples:
        return None
    predicted = np.array([np.dot(_row(sample), coefficients) for sample in samples])
    measured = np.array([max(float(np.median(sample.ms)), 1e-6) for sample in samples])
    errors = relative_errors(predicted, measured)
    return FitError(round(float(np.median(errors)), 4), round(float(errors.max()), 4), len(errors))


def _row(sample: Sample) -> list[float]:
    return [float(sum(s * s for s in sample.lengths)), float(sum(sample.lengths)), 1.0]


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
