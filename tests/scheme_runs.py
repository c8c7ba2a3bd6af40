"""Runs a compiled scheme on the virtual cluster and compares it with the untouched module, sequence by sequence.

Equal to 1e-10 means, per tensor, max|a - b| <= 1e-10 max|b|, with 1e-14 of the global gradient norm as floor (some
gradients are zero analytically): float64 sums in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hgraph.capture import Captured
from hgraph.data.packed import Packed, num_targets
from hgraph.shard_map import shard_map
from hgraph.strategy import Replica, Scheme
from passes.pipelines import CompiledScheme, compile_scheme
from runtime.executor import MicroBatchResult, RankExecutor
from runtime.messages import Message
from runtime.reference import LossFunction, reference_step
from runtime.virtual_cluster import VirtualCluster

__all__ = ["Outcome", "assert_equal_to_reference", "denominator_of", "run_compiled", "run_scheme"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Loss and gradients of one step, by first parameter name; what ranks sent; most live micro-batches by rank."""

    loss: float
    gradients: Mapping[str, Tensor]
    log: tuple[Message, ...]
    peaks: Mapping[int, int]


def denominator_of(batches: Sequence[Packed]) -> int:
    return sum(map(num_targets, batches))


def run_scheme(
    captured: Captured, scheme: Scheme, model: nn.Module, batches: Sequence[Packed], denominator: float | None = None
) -> Outcome:
    """Compiles `scheme` and runs one step. `captured` is normalised."""
    return run_compiled(compile_scheme(captured, scheme), captured, model, batches, denominator)


def run_compiled(
    compiled: CompiledScheme,
    captured: Captured,
    model: nn.Module,
    batches: Sequence[Packed],
    denominator: float | None = None,
    first_rank: int = 0,
) -> Outcome:
    """Runs one step of the replica on ranks from `first_rank`. `denominator` is by default the number of labels."""
    count = denominator_of(batches) if denominator is None else denominator
    scale = torch.tensor(1 / count if count else 0.0, dtype=torch.float64)
    replica = Replica(compiled.scheme, tuple(range(first_rank, first_rank + compiled.scheme.num_ranks)))
    executors = {rank: RankExecutor(compiled, replica, rank, captured.buffers, torch.float64) for rank in replica.ranks}
    values = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    cluster = VirtualCluster(first_rank + len(replica.ranks))
    with torch.no_grad():
        results = cluster.run(
            {rank: own.run(_local(own, rank, values), batches, scale) for rank, own in executors.items()}
        )
    loss = sum(float(result.loss) for result in results.values()) * float(scale)
    peaks = {rank: result.peak_live_micro_batches for rank, result in results.items()}
    return Outcome(loss, _gradients(executors, results, captured), tuple(cluster.log), peaks)


def _local(executor: RankExecutor, rank: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    local = {}
    for name, annotation in executor.parameters.items():
        box = shard_map(annotation, values[name].shape).piece(rank).box
        local[name] = values[name][tuple(slice(start, stop) for start, stop in box)].clone()
    return local


def _gradients(
    executors: Mapping[int, RankExecutor], results: Mapping[int, MicroBatchResult], captured: Captured
) -> dict[str, Tensor]:
    """Adds up each distinct term of every piece once; ties are summed."""
    gradients = {}
    for facts in captured.parameters:
        total, found = torch.zeros(facts.shape, dtype=torch.float64), False
        for stage in sorted({executor.stage for executor in executors.values()}):
            own = {rank: executor for rank, executor in executors.items() if executor.stage == stage}
            for name in facts.names:
                found |= _add_terms(total, name, own, results)
        if found:
            gradients[facts.name] = total
    return gradients


def _add_terms(
    total: Tensor, name: str, executors: Mapping[int, RankExecutor], results: Mapping[int, MicroBatchResult]
) -> bool:
    """Adds the gradient of one use of a parameter to `total`: every term once, of several families that hold it one."""
    annotation = next((own.gradients[name] for own in executors.values() if name in own.gradients), None)
    if annotation is None or all(name not in results[rank].gradients for rank in annotation.ranks):
        return False
    pieces = shard_map(annotation, total.shape).pieces
    missing = torch.ones(total.shape, dtype=torch.bool)
    for family in sorted({piece.family for piece in pieces}):
        value, held = torch.zeros_like(total), torch.zeros_like(missing)
        for term in sorted({piece.term for piece in pieces if piece.family == family}):
            part, written = torch.zeros_like(total), torch.zeros_like(missing)
            for piece in (p for p in pieces if (p.family, p.term) == (family, term)):
                at = tuple(slice(start, stop) for start, stop in piece.box)
                own = results[piece.rank].gradients[name]
                # Copies may have been summed in another order.
                torch.testing.assert_close(own[written[at]], part[at][written[at]], rtol=1e-10, atol=1e-13)
                part[at], written[at] = own, True
            value += part
            held |= written
        total += value.masked_fill(~(held & missing), 0)
        missing &= ~held
    assert not missing.any(), f"gradient of {name}: some elements are on no rank"
    return True


def assert_equal_to_reference(
    outcome: Outcome,
    model: nn.Module,
    loss: LossFunction,
    sequences: Sequence[Packed],
    denominator: float | None = None,
) -> None:
    """Raises where loss or any gradient is not equal to 1e-10."""
    count = denominator_of(sequences) if denominator is None else denominator
    expected_loss, expected = reference_step(model, loss, sequences, count)
    assert abs(outcome.loss - expected_loss) <= 1e-10 * abs(expected_loss) + 1e-14
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    for name, gradient in expected.items():
        got = outcome.gradients.get(name, torch.zeros_like(gradient))
        difference = (got - gradient).abs().max().item() if gradient.numel() else 0.0
        bound = 1e-10 * gradient.abs().max().item() + 1e-14 * norm
        assert difference <= bound, f"gradient of {name}: differs by {difference}, allowed {bound}"
