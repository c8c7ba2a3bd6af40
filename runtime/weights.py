"""Weights: first values, gathering whole tensors, and writing them back into the user's module."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hgraph.annotation import replicated
from hgraph.bridge_plan import plan_bridge
from hgraph.bundles import TensorReshard
from hgraph.capture import ParameterFacts
from runtime.bridge import Bridge
from runtime.bridge_planner import bucket_elements
from runtime.layouts import optimizer_annotation

if TYPE_CHECKING:
    from runtime.program import Program

__all__ = ["WholeTensors", "gather", "initial_value", "write_back"]

_STANDARD_DEVIATION = 0.02


def initial_value(parameter: Tensor, facts: ParameterFacts, seed: int) -> Tensor:
    """Returns the parameter itself, or, where it is on meta, a value made from the seed and its name alone.

    Matrices are normal with deviation 0.02; vectors are ones where the name ends in `weight` (norms), else zeros.
    """
    if parameter.device.type != "meta":
        return parameter
    if len(facts.shape) < 2:
        return torch.full(facts.shape, 1.0 if facts.name.endswith("weight") else 0.0, dtype=facts.dtype)
    generator = torch.Generator().manual_seed((seed << 32) ^ zlib.crc32(facts.name.encode()))
    return torch.randn(facts.shape, generator=generator, dtype=facts.dtype) * _STANDARD_DEVIATION


def gather(program: Program, shards: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns whole tensors, by the parameters' first names, from shards in the optimizer layout. Collective.

    `shards` gives, for each local rank, its shards by name; names that no rank gives are left out.
    """
    return WholeTensors(program, {name for own in shards.values() for name in own}).gather(shards)


class WholeTensors:
    """Gathers the tensors of certain names again and again; planned once."""

    def __init__(self, program: Program, names: Collection[str]) -> None:
        num_ranks = program.pool.num_ranks
        everywhere = replicated(range(num_ranks))
        reshards = [
            TensorReshard(facts.name, optimizer_annotation(facts.shape, num_ranks), everywhere, facts.shape)
            for facts in program.captured.parameters
            if facts.name in names
        ]
        size = bucket_elements(program.bucket_mb, program.master_dtype)
        plan = plan_bridge(reshards, program.topology, bucket_elements=size)
        self._cluster = program.cluster
        self._bridges = {
            rank: Bridge(plan, rank, program.master_dtype, program.cluster.device)
            for rank in program.cluster.local_ranks
        }

    def gather(self, shards: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns whole tensors, by the parameters' first names, from each local rank's shards. Collective."""
        generators = {rank: self._bridges[rank].run(own, "gather whole tensors") for rank, own in shards.items()}
        return next(iter(self._cluster.run(generators).values()))


@torch.no_grad()
def write_back(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies whole weights into the module's parameters; those on meta get memory first."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if any(parameter.device.type == "meta" for parameter in named.values()):
        model.to_empty(device="cpu")
        named = dict(model.named_parameters(remove_duplicate=False))
    for name, value in weights.items():
        named[name].copy_(value)
