"""The verifier: a program in float64 and the user's untouched module, trained side by side, compared after each step.

Compared are the loss, the gradient of every parameter (gathered before clipping), the gradient norm, and the weights
after the optimizer. The reference (`runtime/reference.py` and PyTorch's own AdamW) shares nothing with capture,
deduction, resharding or the sharded optimizer.

*Equal* means, per tensor, max|a - b| <= tolerance x max|b|. Below `GRADIENT_FLOOR` times the global gradient norm a
gradient counts as zero, for some are zero but for rounding. AdamW turns a rounding of e in a gradient near zero into a
change of up to lr x e / eps in a weight; weights may differ by as much as their gradients' own differences explain.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor, nn

from hgraph.capture import LossFunction
from hgraph.data.batches import GlobalBatch
from hgraph.data.packed import Packed
from hgraph.errors import InvalidInput, VerificationError
from hgraph.plan import SequencedPlan, StepPlan
from hgraph.profile import Profile, SchemeCost
from hgraph.strategy import Pool
from hgraph.topology import Topology
from runtime.cluster import Cluster
from runtime.facts import trained_names
from runtime.failure_channel import FailureChannel
from runtime.messages import Message
from runtime.micro_batches import Contents, pack_micro_batch
from runtime.optimizer import AdamW, learning_rate
from runtime.program import compile
from runtime.rank_step import RankOutcome, rank_step
from runtime.reference import reference_step
from runtime.verify_batches import Assignment, Trial, plan_of
from runtime.weights import WholeTensors
from strategies.options import PlannerOptions
from strategies.select import plan_step

__all__ = ["GRADIENT_FLOOR", "Comparison", "Deviation", "Verifier", "constant_profile"]

GRADIENT_FLOOR = 1e-14
_MAX_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one tensor is from the reference.

    `error` is the greatest difference over the greatest magnitude of the reference, scaled so that what the floor
    allows equals the tolerance: the tensor is equal where `error` is at most the tolerance.
    """

    tensor: str
    error: float

    def __str__(self) -> str:
        return f"{self.tensor}: {self.error:.1e}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One step, compared: the worst tensor first in `deviations`, and what moved between ranks."""

    step: int
    strategy: str
    kind: str
    loss: float
    tokens: int
    deviations: tuple[Deviation, ...]
    num_messages: int
    message_bytes: int

    @property
    def worst(self) -> Deviation:
        return self.deviations[0]


class Verifier:
    """Two trainings side by side: a program in float64 and the untouched module. `model` itself is left as it is.

    Attributes: `program`; `reference`, the module that is trained by it; `tolerance`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        pool: Pool | str | Path,
        *,
        seed: int = 0,
        tolerance: float = 1e-10,
        optimizer: AdamW | None = None,
        cluster: Cluster | None = None,
        timeout_s: float = 120.0,
        channel: FailureChannel | None = None,
        topology: Topology | None = None,
        bucket_mb: float = 25.0,
    ) -> None:
        _refuse_meta(model)
        self.loss, self.tolerance = loss, tolerance
        self.optimizer = optimizer or AdamW(lr=1e-3)
        self.program = compile(
            copy.deepcopy(model).double(),
            loss,
            pool,
            optimizer=self.optimizer,
            seed=seed,
            profile=lambda program: constant_profile(program.pool),
            depth=0,
            exact=True,
            cluster=cluster,
            timeout_s=timeout_s,
            channel=channel,
            topology=topology,
            bucket_mb=bucket_mb,
        )
        self.reference = copy.deepcopy(model).double()
        self._adamw = _reference_optimizer(self.reference, self.optimizer)
        facts = self.program.captured.parameters
        self._gradients = WholeTensors(self.program, trained_names(self.program.captured))
        self._weights = WholeTensors(self.program, {one.name for one in facts})
        self._steps_done = 0
        self._explained = dict.fromkeys(dict(self.reference.named_parameters()), 0.0)

    def step(
        self, batch: GlobalBatch, strategy: str, assignment: Assignment | None = None, kind: str = "given"
    ) -> Comparison:
        """Trains both on `batch`; raises `VerificationError` where they differ. Collective."""
        comparison = self.run(Trial(kind, batch, assignment), strategy)
        text = self.failure_text(comparison)
        if text:
            raise VerificationError(text)
        return comparison

    def run(self, trial: Trial, strategy: str) -> Comparison:
        """Trains both on the trial's batch and returns how they compare, the same on every rank. Collective."""
        return self.run_plan(trial, self._plan(trial, strategy))

    def run_plan(self, trial: Trial, plan: StepPlan | SequencedPlan) -> Comparison:
        """Does the same by a given plan, of one strategy or of several that take turns. Collective."""
        program, number = self.program, self.program.step_count
        outcomes, messages = self._program_step(trial, plan)
        gradients = self._gradients.gather({rank: outcome.gradients for rank, outcome in outcomes.items()})
        weights = self._weights.gather({rank: state.weights() for rank, state in program.ranks.items()})
        outcome = next(iter(outcomes.values()))
        deviations: tuple[Deviation, ...] = ()
        if 0 in program.cluster.local_ranks:
            deviations = self._compare(trial.batch, outcome, gradients, weights)
        deviations = program.cluster.broadcast(deviations)
        sent = [message for part in program.cluster.gather(messages) for message in part]
        num_bytes = sum(message.num_bytes for message in sent)
        tokens = trial.batch.num_tokens
        return Comparison(number, plan.strategy, trial.kind, outcome.loss, tokens, deviations, len(sent), num_bytes)

    @property
    def reference_state(self) -> Mapping[Tensor, Mapping[str, Tensor]]:
        """The moments of the reference's optimizer, by its parameters."""
        return self._adamw.state

    def failure_text(self, comparison: Comparison) -> str:
        """Returns what is different and where; empty where the comparison holds."""
        worst = comparison.worst
        if worst.error <= self.tolerance:
            return ""
        bad = [deviation for deviation in comparison.deviations if not deviation.error <= self.tolerance]
        others = f" ({len(bad)} of {len(comparison.deviations)} values differ)" if len(bad) > 1 else ""
        return (
            f"strategy {comparison.strategy}, step {comparison.step} ({comparison.kind}): {worst.tensor} differs from "
            f"the untouched module by {worst.error:.1e} of its greatest magnitude; expected at most "
            f"{self.tolerance:.0e}{others}"
        )

    def _plan(self, trial: Trial, strategy: str) -> StepPlan:
        program, lengths = self.program, trial.batch.lengths
        if trial.assignment is not None:
            return plan_of(trial.assignment, program.pool[strategy], program.profile, lengths, program.step_count)
        plan = plan_step(program.pool, program.profile, lengths, options=PlannerOptions(only=strategy))
        return replace(plan, step=program.step_count)

    def _program_step(
        self, trial: Trial, plan: StepPlan | SequencedPlan
    ) -> tuple[Mapping[int, RankOutcome], list[Message]]:
        program = self.program
        program.check(plan, trial.batch.lengths)
        facts = program.step_facts(trial.batch, plan)
        generators = {rank: rank_step(state, facts, keep_gradients=True) for rank, state in program.ranks.items()}
        with torch.no_grad():
            outcomes = program.cluster.run(generators)
        program.step_count += 1
        logs = [(rank, message) for rank in outcomes for message in program.cluster.log_of(rank)]
        return outcomes, [message for rank, message in logs if _counts(message, rank)]

    def _compare(
        self, batch: GlobalBatch, outcome: RankOutcome, gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> tuple[Deviation, ...]:
        sequences = [_alone(batch, index, self.program.contents) for index in range(len(batch))]
        loss, expected = reference_step(self.reference, self.loss, sequences, batch.num_targets)
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in expected.values()))
        floor = GRADIENT_FLOOR * norm
        found = [
            self._deviation("loss", outcome.loss, loss),
            self._deviation("gradient norm", outcome.grad_norm, norm),
        ]
        for name in (name for name, _ in self.reference.named_parameters() if name in gradients or name in expected):
            own, other = (one.get(name, torch.zeros(())) for one in (gradients, expected))
            found.append(self._deviation(f"gradient of {name}", own, other, floor))
        rate = self._reference_update(expected, batch.num_targets)
        for name, parameter in self.reference.named_parameters():
            if name in gradients and name in expected:
                difference = _greatest(gradients[name] - expected[name])
                self._explained[name] += 2.0 * rate / self.optimizer.eps * difference
            found.append(self._deviation(f"weight {name}", weights[name], parameter.detach(), self._explained[name]))
        return tuple(sorted(found, key=attrgetter("error"), reverse=True))

    def _reference_update(self, gradients: Mapping[str, Tensor], num_targets: int) -> float:
        """Trains the reference; returns the learning rate (0 where there was nothing to learn)."""
        if num_targets == 0:
            return 0.0
        self._steps_done += 1
        rate = learning_rate(self.optimizer, self._steps_done)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        for name, parameter in self.reference.named_parameters():
            parameter.grad = gradients[name].clone() if name in gradients else None
        if self.optimizer.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.reference.parameters(), self.optimizer.max_grad_norm)
        self._adamw.step()
        return rate

    def _deviation(self, name: str, got: Tensor | float, expected: Tensor | float, floor: float = 0.0) -> Deviation:
        """`floor` is an absolute difference that is allowed in any case."""
        got, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (got, expected))
        difference = _greatest(got - expected)
        allowed = max(self.tolerance * _greatest(expected), floor)
        if difference == 0.0:
            return Deviation(name, 0.0)
        comparable = math.isfinite(difference) and 0.0 < allowed < math.inf
        return Deviation(name, difference / allowed * self.tolerance if comparable else math.inf)


def constant_profile(pool: Pool) -> Profile:
    """Returns made-up costs for every scheme of the pool; numbers do not depend on who runs what."""
    cost = SchemeCost(a=1e-4, b=1e-2, c=0.1, max_tokens=_MAX_TOKENS)
    return Profile({str(scheme): cost for scheme in pool.schemes}, {})


def _refuse_meta(model: nn.Module) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if names:
        raise InvalidInput(
            f"verify: {len(names)} parameters are on meta, {names[0]} for one; the untouched module must be able to "
            "run. Build the model on the CPU"
        )


def _reference_optimizer(model: nn.Module, config: AdamW) -> torch.optim.AdamW:
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[config.decays(name)].append(parameter)
    settings = [
        {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0}
        for decays, parameters in groups.items()
        if parameters
    ]
    return torch.optim.AdamW(settings, lr=config.lr, betas=config.betas, eps=config.eps)


def _alone(batch: GlobalBatch, index: int, contents: Contents) -> Packed:
    return pack_micro_batch(batch, [index], contents)


def _counts(message: Message, rank: int) -> bool:
    """Whether `rank` is the one that counts a message: a collective once, a message where it was sent."""
    return message.kind != "receive" and (message.kind == "send" or rank == min(message.ranks))


def _greatest(values: Tensor) -> float:
    """The greatest magnitude; infinite where any value is not a number, so that it passes no comparison."""
    if not values.numel():
        return 0.0
    greatest = values.abs().max().item()
    return greatest if math.isfinite(greatest) else math.inf
