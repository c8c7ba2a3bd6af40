"""A small run that is saved and resumed: model, data, optimizer, and programs for any pool (used by several tests)."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from hgraph.data import BatchState, GlobalBatch, GlobalBatches, TokenDataset, global_batches
from hgraph.plan import StepPlan
from hgraph.strategy import Pool, Scheme
from runtime.optimizer import AdamW
from runtime.program import Program
from runtime.step_output import StepOutput
from runtime.weights import gather
from strategies.options import PlannerOptions
from strategies.select import plan_step
from tests.models import language_loss, llama
from tests.small_pools import exact_program, pool, stages, strategy

__all__ = ["FOUR", "assert_same_state", "batches", "model", "program", "state_of", "train"]

U = Scheme.uniform
FOUR = pool(
    4, strategy("tp2+tp1x2", U(2), U(1), U(1)), strategy("tp4", U(4)), strategy("tp3,tp1", stages((3, 1), (1, 1)))
)
OPTIMIZER = AdamW(lr=1e-3, warmup_steps=2, total_steps=9, max_grad_norm=0.5, no_decay=("*norm*",))
VOCABULARY = 31


def model(seed: int = 0, **sizes: object) -> nn.Module:
    return llama(seed, **({"hidden": 24, "ffn": 25, "vocab_size": VOCABULARY} | sizes))


def program(pool: Pool = FOUR, own: nn.Module | None = None, optimizer: AdamW = OPTIMIZER, **options: Any) -> Program:
    return exact_program(model() if own is None else own, language_loss, pool, optimizer, **options)


def batches(start: BatchState | None = None, *, seed: int = 3, length: int = 25, first_token: int = 1) -> GlobalBatches:
    """Returns shuffled batches of 4 out of 25 sequences, 7 to an epoch."""
    generator = random.Random(0)
    rows = [[generator.randrange(VOCABULARY) for _ in range(generator.randint(3, 20))] for _ in range(length)]
    rows[0][0] = first_token
    return global_batches(TokenDataset(rows), sequences_per_step=4, seed=seed, start=start)


def train(program: Program, last_step: int) -> list[StepOutput]:
    """Trains on what follows, until `last_step` steps are done; the strategies of the pool take turns."""
    steps = []
    for batch in batches(program.next_batch):
        if program.step_count == last_step:
            break
        steps.append(program.run_plan(batch, _plan_in_turn(program, batch)))
    return steps


def _plan_in_turn(program: Program, batch: GlobalBatch) -> StepPlan:
    strategies = program.pool.strategies
    options = PlannerOptions(only=strategies[program.step_count % len(strategies)].name)
    plan = plan_step(program.pool, program.profile, batch.lengths, step=program.step_count + 1, options=options)
    return program.cluster.broadcast(plan)


def state_of(program: Program) -> dict[str, dict[str, Tensor]]:
    """Returns whole weights and moments, by kind and name. Collective."""
    states = {rank: state.optimizer.state_dict() for rank, state in program.ranks.items()}
    kinds = ("master", "exp_avg", "exp_avg_sq")
    with torch.no_grad():
        return {kind: gather(program, {rank: state[kind] for rank, state in states.items()}) for kind in kinds}


def assert_same_state(got: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    """Raises where a tensor differs by more than 1e-10 of its greatest value (sums in another order: about 1e-14)."""
    for kind, tensors in expected.items():
        assert got[kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            difference = (got[kind][name] - tensor).abs().max().item()
            assert difference <= 1e-10 * tensor.abs().max().item(), f"{kind} {name}: {difference}"
