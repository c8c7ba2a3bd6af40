"""A seeded sweep over schemes, layer splits, overrides and batches on the virtual cluster."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from hgraph.annotation import Annotation, Subgroup
from hgraph.capture import Captured
from hgraph.placements import Replicate, Shard
from hgraph.strategy import Override, Scheme, Stage
from tests.test_executor import captured, check, plain_gpt, tied_llama, uneven_llama


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_random_schemes_overrides_and_batches(seed: int) -> None:
    draw = random.Random(seed)
    model, vocab_size = draw.choice([(uneven_llama(), 257), (tied_llama(), 61), (plain_gpt(), 61)])
    layers = captured(model).num_layers
    pp = draw.randint(1, layers)
    cuts = sorted(draw.choices(range(layers + 1), k=pp - 1))
    split = [stop - start for start, stop in itertools.pairwise([0, *cuts, layers])]
    stages = tuple(Stage(draw.randint(1, 4), count) for count in split)
    scheme = Scheme(stages, draw.choice(["1f1b", "gpipe"]))
    scheme = replace(scheme, overrides=tuple(random_override(draw, scheme, captured(model)) for _ in range(2)))
    lengths = [[draw.randint(1, 12) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 4))]
    check(model, scheme, lengths, vocab_size=vocab_size)


def random_override(draw: random.Random, scheme: Scheme, own: Captured) -> Override:
    """Some layout of the output of a layer, on some of its stage's ranks."""
    layer = draw.randrange(own.num_layers)
    starts = [0, *itertools.accumulate(stage.layers or 0 for stage in scheme.stages)]
    stage = next(s for s in range(scheme.pp) if starts[s] <= layer < starts[s + 1])
    ranks = list(scheme.stage_ranks(stage))
    held = draw.sample(ranks, draw.randint(1, len(ranks)))
    cut = draw.randint(1, len(held))
    groups = [tuple(group) for group in (held[:cut], held[cut:]) if group]
    placements = [Replicate(), Shard(0), Shard(1), Shard(2)]
    subgroups = tuple(Subgroup(group, (len(group),), (draw.choice(placements),)) for group in groups)
    return Override(f"{own.layers}.{layer}", str(Annotation(subgroups, draw.choice(placements))))
