"""Verify: every strategy of a pool, and a random walk over them, trains exactly as the user's untouched module.

What is compared, and what counts as equal: `runtime/verifier.py`. On which batches: `runtime/verify_batches.py`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path

from torch import nn

from hgraph.capture import LossFunction
from hgraph.data.batches import GlobalBatch
from hgraph.errors import InvalidInput, VerificationError
from hgraph.strategy import Pool
from runtime.cluster import Cluster
from runtime.optimizer import AdamW
from runtime.program import Program
from runtime.verifier import Comparison, Deviation, Verifier
from runtime.verify_batches import KINDS, Trial, draw_trial, random_assignment

__all__ = ["StrategyResult", "VerifyReport", "run_verification", "verify"]

_WALK = "random walk"


@dataclass(frozen=True, slots=True)
class StrategyResult:
    """All steps of one strategy, or of the random walk: the worst loss, gradient and weight of them all.

    `num_messages` and `message_bytes` count what moved between all ranks, a collective as one message.
    """

    name: str
    replicas: str
    steps: int
    tokens: int
    loss: Deviation
    gradient: Deviation
    weight: Deviation
    num_messages: int
    message_bytes: int

    @property
    def worst(self) -> Deviation:
        return max(self.loss, self.gradient, self.weight, key=attrgetter("error"))


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was compared. `failure` says where the first difference was; the comparison ended there. Empty: none."""

    results: tuple[StrategyResult, ...]
    tolerance: float
    seed: int
    num_ranks: int
    cluster: str
    num_parameters: int
    failure: str = ""

    def to_json(self) -> str:
        """Returns one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> VerifyReport:
        """Returns the report that `to_json` wrote."""
        data = json.loads(text)
        results = [
            StrategyResult(**{**one, **{kind: Deviation(**one[kind]) for kind in ("loss", "gradient", "weight")}})
            for one in data["results"]
        ]
        return VerifyReport(**{**data, "results": tuple(results)})


def verify(
    model: nn.Module,
    loss: LossFunction,
    pool: Pool | str | Path,
    *,
    batches: Iterable[GlobalBatch] | None = None,
    steps: int = len(KINDS),
    walk: int | None = None,
    seed: int = 0,
    tolerance: float = 1e-10,
    optimizer: AdamW | None = None,
    cluster: Cluster | None = None,
    timeout_s: float = 120.0,
) -> VerifyReport:
    """Returns what was compared; raises `VerificationError` naming strategy, step, tensor and error. Collective.

    Everything runs in float64, on copies of `model`. Each strategy of the pool trains on `steps` batches, then `walk`
    steps (by default twice the number of strategies) take a random one each; weights and moments go on from step to
    step. Batches are those of `batches` in turn, or small ones of every kind of `KINDS`; who runs what is drawn from
    `seed` (the kind `planned`: the planner's choice).
    """
    verifier = Verifier(
        model, loss, pool, seed=seed, tolerance=tolerance, optimizer=optimizer, cluster=cluster, timeout_s=timeout_s
    )
    report = run_verification(verifier, batches=batches, steps=steps, walk=walk, seed=seed)
    if report.failure:
        raise VerificationError(report.failure)
    return report


def run_verification(
    verifier: Verifier,
    *,
    batches: Iterable[GlobalBatch] | None = None,
    steps: int = len(KINDS),
    walk: int | None = None,
    seed: int = 0,
) -> VerifyReport:
    """As `verify`, but a difference is told in the report's `failure`."""
    if steps < 1:
        raise InvalidInput(f"verify: expected steps of 1 or more, got {steps}")
    generator = random.Random(seed)
    names = [strategy.name for strategy in verifier.program.pool.strategies]
    length = 2 * len(names) if walk is None else walk
    routes = [(name, [name] * steps) for name in names]
    routes += [(_WALK, [generator.choice(names) for _ in range(length)])] if length else []
    trials = _Trials(verifier.program, None if batches is None else list(batches), generator)
    results: list[StrategyResult] = []
    failure = ""
    for title, route in routes:
        done, failure = _follow(route, verifier, trials)
        results.append(_result(title, verifier.program.pool, done))
        if failure:
            break
    return _report(verifier, results, seed, failure)


class _Trials:
    """The batches, one after another."""

    def __init__(self, program: Program, batches: list[GlobalBatch] | None, generator: random.Random) -> None:
        if batches is not None and not batches:
            raise InvalidInput("verify: expected at least one batch, got none; leave out `batches` for drawn ones")
        self.program, self.batches, self.generator = program, batches, generator
        self.count = 0

    def next(self, name: str) -> Trial:
        """Returns the next batch and who of strategy `name` runs what of it."""
        strategy = self.program.pool[name]
        number, self.count = self.count, self.count + 1
        if self.batches is not None:
            batch = self.batches[number % len(self.batches)]
            return Trial("given", batch, random_assignment(strategy, len(batch), self.generator))
        kind = list(KINDS)[number % len(KINDS)]
        return draw_trial(kind, strategy, self.program.vocab_size or 2, self.generator)


def _follow(route: Sequence[str], verifier: Verifier, trials: _Trials) -> tuple[list[Comparison], str]:
    """Trains along the strategies named; returns the comparisons up to the first failure, and its text."""
    done: list[Comparison] = []
    for name in route:
        done.append(verifier.run(trials.next(name), name))
        failure = verifier.failure_text(done[-1])
        if failure:
            return done, failure
    return done, ""


def _result(title: str, pool: Pool, done: Sequence[Comparison]) -> StrategyResult:
    known = {strategy.name: strategy for strategy in pool.strategies}
    text = " + ".join(str(replica.scheme) for replica in known[title].replicas) if title in known else ""
    found = [deviation for comparison in done for deviation in comparison.deviations]

    def worst(kind: str) -> Deviation:
        return max((one for one in found if one.tensor.startswith(kind)), key=attrgetter("error"))

    return StrategyResult(
        name=title,
        replicas=text,
        steps=len(done),
        tokens=sum(comparison.tokens for comparison in done),
        loss=worst("loss"),
        gradient=worst("gradient"),
        weight=worst("weight"),
        num_messages=sum(comparison.num_messages for comparison in done),
        message_bytes=sum(comparison.message_bytes for comparison in done),
    )


def _report(verifier: Verifier, results: Sequence[StrategyResult], seed: int, failure: str) -> VerifyReport:
    program = verifier.program
    is_virtual = len(program.cluster.local_ranks) == program.cluster.num_ranks
    return VerifyReport(
        results=tuple(results),
        tolerance=verifier.tolerance,
        seed=seed,
        num_ranks=program.cluster.num_ranks,
        cluster="virtual cluster" if is_virtual else "processes over gloo",
        num_parameters=sum(math.prod(facts.shape) for facts in program.captured.parameters),
        failure=failure,
    )
