"""What a Reshard node does, in words: the collectives of its plan."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from torch import fx

from hgraph.annotation import Annotation
from hgraph.graph import Shape, evaluate_shape, info
from hgraph.reshard import plan_reshard
from hgraph.reshard_plan import Collective, Operation

__all__ = ["LOCAL", "reshard_text", "source_of", "words_of_reshard"]

LOCAL = "local slice"
"""What a Reshard is called that moves nothing between ranks."""

_PROBE_TOKENS, _PROBE_BOUNDARIES = 1013, 7
"""Sizes at which plans of symbolic shapes are made; what kind of communication they need does not depend on them."""


@functools.lru_cache(maxsize=4096)
def words_of_reshard(source: Annotation, target: Annotation, shape: Shape) -> str:
    """Returns what turns `source` into `target`, such as `all-reduce` or `2 x reduce-scatter, then send/recv`."""
    plan = plan_reshard(source, target, evaluate_shape(shape, _PROBE_TOKENS, _PROBE_BOUNDARIES))
    phases = [words for phase in plan.phases if (words := _phase_words(phase))]
    return ", then ".join(dict.fromkeys(phases)) or LOCAL


def source_of(node: fx.Node) -> Annotation:
    """Returns the annotation that a Reshard node starts from."""
    source = info(node).extra["source"]
    assert isinstance(source, Annotation)
    return source


def reshard_text(node: fx.Node) -> tuple[str, str]:
    """Returns what a Reshard node does, and its annotations as `source -> target`."""
    facts, source = info(node), source_of(node)
    assert facts.annotation is not None
    return words_of_reshard(source, facts.annotation, facts.shape), f"{source} -> {facts.annotation}"


def _phase_words(phase: Sequence[Operation]) -> str:
    collectives = Counter(o.kind.replace("_", "-") for o in phase if isinstance(o, Collective))
    words = [kind if count == 1 else f"{count} x {kind}" for kind, count in collectives.items()]
    if any(not isinstance(o, Collective) and o.sender != o.receiver for o in phase):
        words.append("send/recv")
    return " + ".join(words)
