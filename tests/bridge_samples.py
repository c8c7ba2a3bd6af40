"""Random topologies, and pairs and lists of tensors on them, for tests of routes and bridges, from hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from hgraph.bundles import TensorReshard
from hgraph.topology import Link, Node, Topology
from tests.annotations import annotations, layouts, shapes

__all__ = ["BridgeSample", "bridge_samples", "nodes", "topologies"]

LOCAL, NETWORK = Link(100.0, 1.0), Link(10.0, 5.0)


def nodes(*groups: tuple[int, ...]) -> Topology:
    """Returns one node per group of ranks."""
    return Topology("test", tuple(Node(f"node{i}", ranks, LOCAL, NETWORK) for i, ranks in enumerate(groups)))


@st.composite
def topologies(draw: st.DrawFn, max_ranks: int = 16, max_nodes: int = 3) -> Topology:
    """Draws one to `max_nodes` nodes of any sizes, with one to `max_ranks` ranks in any order."""
    num_ranks = draw(st.integers(1, max_ranks))
    ranks = draw(st.permutations(range(num_ranks)))
    num_nodes = draw(st.integers(1, min(max_nodes, num_ranks)))
    cuts = sorted(draw(st.permutations(range(1, num_ranks)))[: num_nodes - 1])
    return nodes(*(tuple(ranks[start:stop]) for start, stop in zip([0, *cuts], [*cuts, num_ranks], strict=True)))


@dataclass(frozen=True, slots=True, repr=False)
class BridgeSample:
    """Tensors to reshard on a topology; its text can be read in a failing example."""

    topology: Topology
    reshards: tuple[TensorReshard, ...]

    def __repr__(self) -> str:
        tensors = "; ".join(f"{str(r.source)!r} -> {str(r.target)!r} for {r.shape}" for r in self.reshards)
        return f"{tensors} on nodes {[node.ranks for node in self.topology.nodes]}"


@st.composite
def bridge_samples(draw: st.DrawFn, num_tensors: int = 1, max_ranks: int = 16) -> BridgeSample:
    """Draws tensors of shapes of their own; half of them keep their groups and meshes."""
    topology = draw(topologies(max_ranks))
    reshards = []
    for number in range(num_tensors):
        shape = draw(shapes())
        layout = draw(layouts(topology.num_ranks))
        source = draw(annotations(shape, layout))
        target = draw(annotations(shape, layout if draw(st.booleans()) else draw(layouts(topology.num_ranks))))
        reshards.append(TensorReshard(f"tensor{number}", source, target, shape))
    return BridgeSample(topology, tuple(reshards))
