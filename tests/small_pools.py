"""Pools, batches and single steps that several tests of training use."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hgraph.data import IGNORED_LABEL, GlobalBatch, make_batch, pack
from hgraph.strategy import Override, Pool, Replica, Scheme, Stage, Strategy
from runtime.optimizer import AdamW
from runtime.program import Program, compile
from runtime.rank_step import RankOutcome, StepFacts, rank_step
from runtime.reference import reference_step
from runtime.verifier import constant_profile
from runtime.verify_batches import Assignment, plan_of
from runtime.weights import gather

__all__ = [
    "Step",
    "assert_close",
    "draw_batch",
    "exact_program",
    "expected_step",
    "overridden",
    "pool",
    "restore",
    "run_step",
    "snapshot",
    "stages",
    "strategy",
    "train_step",
]


def strategy(name: str, *schemes: Scheme) -> Strategy:
    """Returns replicas of these schemes on consecutive ranks, from 0 on."""
    replicas: list[Replica] = []
    for scheme in schemes:
        first = sum(replica.scheme.num_ranks for replica in replicas)
        replicas.append(Replica(scheme, tuple(range(first, first + scheme.num_ranks))))
    return Strategy(name, tuple(replicas))


def stages(*tp_and_layers: tuple[int, int]) -> Scheme:
    """Returns a pipeline of stages of different tp."""
    return Scheme(tuple(Stage(tp, layers) for tp, layers in tp_and_layers))


def overridden(tp: int, **annotations: str) -> Scheme:
    """Returns one stage of `tp` ranks with overrides; a double underscore in a name stands for a dot."""
    overrides = tuple(Override(name.replace("__", "."), text) for name, text in annotations.items())
    return Scheme((Stage(tp),), overrides=overrides)


def pool(num_ranks: int, *strategies: Strategy) -> Pool:
    return Pool(num_ranks, strategies)


def draw_batch(seed: int, lengths: Sequence[int], vocab_size: int = 257, masked: Sequence[int] = ()) -> GlobalBatch:
    """Returns sequences of these lengths; those of `masked` carry no label."""
    generator = random.Random(seed)
    sequences = [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]
    labels = [[IGNORED_LABEL] * length if index in masked else None for index, length in enumerate(lengths)]
    return make_batch(sequences, labels)


def exact_program(
    model: nn.Module, loss: Callable[..., Tensor], pool: Pool, optimizer: AdamW | None = None, **options: Any
) -> Program:
    """Returns a program in float64 on simulated ranks, with made-up costs, planned in the step."""
    settings: dict[str, Any] = {"profile": constant_profile(pool), "depth": 0, "exact": True} | options
    return compile(model, loss, pool, optimizer=optimizer or AdamW(lr=1e-3), **settings)


@dataclass(frozen=True, slots=True)
class Step:
    """One step: loss, gradient norm, and whole gradients by first name."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]


def run_step(program: Program, batch: GlobalBatch, name: str, assignment: Assignment) -> Step:
    """Runs one step of strategy `name` by `assignment`; weights and optimizer stay as they are."""
    outcomes = _run(program, batch, name, assignment, update=False)
    outcome = next(iter(outcomes.values()))
    gradients = gather(program, {rank: own.gradients for rank, own in outcomes.items()})
    return Step(outcome.loss, outcome.grad_norm, gradients)


def train_step(program: Program, batch: GlobalBatch, name: str, assignment: Assignment) -> float:
    """Trains on a batch and returns its loss."""
    return next(iter(_run(program, batch, name, assignment, update=True).values())).loss


def _run(
    program: Program, batch: GlobalBatch, name: str, assignment: Assignment, *, update: bool
) -> dict[int, RankOutcome]:
    chosen = program.pool[name]
    plan = plan_of(assignment, chosen, program.profile, batch.lengths, program.step_count)
    facts = StepFacts(program.step_count, batch, (plan,), (chosen,))
    generators = {
        rank: rank_step(state, facts, keep_gradients=not update, update=update) for rank, state in program.ranks.items()
    }
    with torch.no_grad():
        return program.cluster.run(generators)


def expected_step(model: nn.Module, loss: Callable[..., Tensor], batch: GlobalBatch) -> Step:
    """Returns the same of the untouched module, sequence by sequence."""
    rows = [batch.sequence(index) for index in range(len(batch))]
    sequences = [pack([tokens], labels=[labels]) for tokens, labels in rows]
    value, gradients = reference_step(model, loss, sequences, batch.num_targets)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    return Step(value, norm, gradients)


def assert_close(got: Step, expected: Step, tolerance: float = 1e-10) -> None:
    """Raises where loss or a gradient differs by more than `tolerance` of its greatest value.

    Sums in float64 in another order differ by about 1e-15; a gradient below 1e-14 of the global norm counts as zero.
    """
    assert abs(got.loss - expected.loss) <= tolerance * abs(expected.loss)
    assert got.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        bound = max(tolerance * gradient.abs().max().item(), 1e-14 * expected.grad_norm)
        difference = (got.gradients[name] - gradient).abs().max().item()
        assert difference <= bound, f"{name}: {difference} above {bound}"


def snapshot(program: Program) -> dict[int, Any]:
    """Returns copies of the optimizer states of all ranks."""
    states = {}
    for rank, state in program.ranks.items():
        values = state.optimizer.state_dict()
        copied = {key: {n: t.clone() for n, t in own.items()} for key, own in values.items() if key != "step"}
        states[rank] = {"step": values["step"], **copied}
    return states


def restore(program: Program, states: dict[int, Any]) -> None:
    """Sets weights, moments and step counts back to those of `snapshot`."""
    for rank, state in program.ranks.items():
        state.optimizer.load_state_dict(states[rank])
