"""The parts of a proposal: schemes that may be used, estimates, mixes, the choice of a pool, placement on nodes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgraph.errors import InvalidInput
from hgraph.profile import SchemeCost
from hgraph.scheme_text import parse_scheme
from hgraph.strategy import Strategy
from hgraph.topology import Link, Node, Topology
from strategies.layout_estimate import estimate_ms
from strategies.mixes import MixSearch, ideal_mix, usable_ranks
from strategies.placement import place_layout
from strategies.pool_choice import choose_pool
from strategies.propose import planned_ms
from strategies.scheme_table import SchemeLimits, layout_text, scheme_table
from tests.proposals import COSTS, all_layouts, nodes, profile, small_table

BATCH = (1500, 700, 640, 300, 250, 200, 150, 150, 100, 90, 80, 70, 60, 50, 40, 30, 20)
batches = st.lists(st.integers(1, 700), min_size=1, max_size=25)


# Schemes


def left_out(name: str, num_ranks: int = 8, **limits: object) -> str | None:
    cost = SchemeCost(0.0, 1.0, 1.0, 100)
    schemes = {parse_scheme("tp1"): cost, parse_scheme(name): cost}
    return scheme_table(schemes, num_ranks, SchemeLimits(**limits))[1].get(name)  # type: ignore[arg-type]


def test_a_scheme_needs_its_ranks() -> None:
    assert left_out("tp4.pp2") is None
    assert left_out("tp4.pp3") == "needs 12 ranks, there are 8"


def test_heads_and_layers_are_divided_evenly() -> None:
    assert left_out("tp8", heads=16) is None
    assert left_out("tp8", heads=12) == "12 attention heads are not divisible by its tp"
    assert left_out("tp1.pp4", layers=6) == "6 layers are not divisible by pp=4"
    assert left_out("tp1.pp4(2,2,1,1)", layers=6) is None


def test_a_stage_spans_nodes_only_where_that_was_measured() -> None:
    assert left_out("tp8", ranks_per_node=4) == "a stage of 8 ranks spans nodes of 4, and that was not measured"
    assert left_out("tp8", ranks_per_node=4, across=frozenset({"tp8"})) is None
    assert left_out("tp4.pp2", ranks_per_node=4) is None


def test_context_parallelism_is_asked_for() -> None:
    assert left_out("tp2.cp2") == "context parallelism can be planned, but not trained yet"
    assert left_out("tp2.cp2", with_cp=True) is None


def test_no_scheme_left() -> None:
    with pytest.raises(InvalidInput, match=r"expected at least one scheme.*tp4: needs 4 ranks, there are 2"):
        scheme_table({parse_scheme("tp4"): COSTS["tp4"]}, 2, SchemeLimits())


def test_layouts_have_names() -> None:
    table = small_table()
    assert [str(scheme) for scheme in table.schemes] == ["tp1", "tp2", "tp1.pp2", "tp4"]
    assert layout_text(table.schemes, (2, 1, 0, 1)) == "tp4+tp2+tp1x2"


# Estimates


def test_an_estimate_of_one_replica_by_hand() -> None:
    table = small_table(4, tp4=SchemeCost(1e-3, 0.5, 10.0, 100))
    own = sum(1e-3 * s * s + 0.5 * s for s in (80, 60, 30))
    assert estimate_ms(table, [(1,)], (30, 80, 60)) == pytest.approx([own + 10.0 * 2])


def test_a_layout_that_cannot_hold_a_sequence() -> None:
    table = small_table()
    times_ms = estimate_ms(table, [(8, 0, 0, 0), (0, 0, 0, 2)], (1500, 10))
    assert np.isinf(times_ms[0]) and np.isfinite(times_ms[1])


@settings(max_examples=15, deadline=None)
@given(batches)
def test_estimates_are_near_the_planner(lengths: list[int]) -> None:
    """Never much below what the planner reaches, and not far above: it packs and searches on top of the same choice."""
    table = small_table()
    layouts = [(0, 2, 0, 1), (0, 1, 1, 1), (4, 0, 0, 1)]
    times_ms = estimate_ms(table, layouts, lengths)
    for layout, estimated_ms in zip(layouts, times_ms.tolist(), strict=True):
        replicas = place_layout(table.schemes, layout, nodes())
        assert replicas is not None
        real_ms = planned_ms(Strategy("own", replicas), profile(), tuple(lengths), 8)
        assert 0.75 * estimated_ms <= real_ms <= 1.1 * estimated_ms


def test_several_sequences_at_once_are_spread_as_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 512 ranks eight go at once, unless one of them would wait for a long sequence while another is done."""
    table = small_table(512)
    layouts = [(128, 64, 32, 48), (0, 128, 0, 64), (0, 0, 0, 128), (480, 0, 0, 8), (512, 0, 0, 0)]
    many = np.random.default_rng(1).lognormal(5.0, 0.8, size=1_500).astype(np.int64).clip(1, 290).tolist()
    few = [1900, *[1000] * 8, *[10] * 300]
    at_once = [estimate_ms(table, layouts, lengths) for lengths in (many, few)]
    monkeypatch.setattr("strategies.layout_estimate.RANKS_AT_ONCE", 10_000)
    one_by_one = [estimate_ms(table, layouts, lengths) for lengths in (many, few)]
    assert np.array(at_once) == pytest.approx(np.array(one_by_one), rel=0.005)
    assert np.isinf(at_once).tolist() == [[False] * 5, [False] * 4 + [True]]


# Mixes


def test_the_ideal_mix_is_no_slower_than_any_layout() -> None:
    table = small_table()
    ideal_ms, mix_T = ideal_mix(table, 8, BATCH)
    assert mix_T @ table.size_T <= 8.0 + 1e-9
    assert ideal_ms <= estimate_ms(table, all_layouts(table, 8), BATCH).min()


def test_a_sequence_that_no_scheme_holds() -> None:
    with pytest.raises(InvalidInput, match="a sequence has 2,001 tokens; the largest limit of the schemes is 2,000"):
        ideal_mix(small_table(), 8, (2001,))


@pytest.mark.parametrize("num_ranks", [8, 12])
def test_the_search_finds_the_best_of_all_layouts(num_ranks: int) -> None:
    table = small_table(num_ranks)
    search = MixSearch(table, num_ranks)
    for seed in range(8):
        lengths = np.random.default_rng(seed).integers(1, 1200, size=30).tolist()
        least_ms = estimate_ms(table, all_layouts(table, num_ranks), lengths).min()
        assert min(search.run(lengths).values()) <= least_ms * 1.01


def test_ranks_that_no_replica_fills() -> None:
    cost = COSTS["tp4"]
    table = small_table(11, tp4=cost, tp2=cost)
    assert usable_ranks(table, 11) == 10
    layouts = MixSearch(table, 11).run((500, 100))
    assert layouts and all(sum(layout * table.size_T) == 10 for layout in layouts)


# The choice of a pool


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_choosing_is_near_the_best_pool(seed: int) -> None:
    times_SB = np.random.default_rng(seed).uniform(1.0, 2.0, size=(9, 12))
    choice = choose_pool(times_SB, np.ones(12), most=3)
    best_ms = min(times_SB[list(rows)].min(axis=0).mean() for rows in combinations(range(9), 3))
    assert choice.means_ms[-1] == pytest.approx(times_SB[list(choice.members)].min(axis=0).mean())
    assert best_ms * (1 - 1e-12) <= choice.means_ms[-1] <= best_ms * 1.03


def test_more_members_never_cost() -> None:
    times_SB = np.random.default_rng(1).uniform(1.0, 2.0, size=(20, 30))
    means_ms = choose_pool(times_SB, np.ones(30), most=8).means_ms
    assert len(means_ms) == 8 and list(means_ms) == sorted(means_ms, reverse=True)


def test_a_pool_holds_every_batch_whatever_the_gain() -> None:
    """The second row is needed for the last batch alone, which hardly counts."""
    times_SB = np.array([[1.0, 1.0, np.inf], [5.0, 5.0, 5.0], [0.99, 1.0, np.inf]])
    choice = choose_pool(times_SB, np.array([1.0, 1.0, 1e-6]), most=3, gain=0.5)
    assert 1 in choice.members and len(choice.members) == 2


def test_a_small_gain_ends_it() -> None:
    times_SB = np.array([[1.0, 1.0], [0.999, 2.0], [2.0, 0.5]])
    assert len(choose_pool(times_SB, np.ones(2), most=3, gain=0.01).members) == 2
    assert len(choose_pool(times_SB, np.ones(2), most=3).members) == 2  # rows 1 and 2 are the best there is


# Placement


def ranks_of(layout: tuple[int, ...], topology: Topology, num_ranks: int = 8) -> list[tuple[int, ...]] | None:
    replicas = place_layout(small_table(num_ranks).schemes, layout, topology)
    return None if replicas is None else [replica.ranks for replica in replicas]


def test_replicas_follow_one_another() -> None:
    assert ranks_of((1, 1, 0, 1), nodes()) == [(0, 1, 2, 3), (4, 5), (6,)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_stage_leaves_its_node(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(all_layouts(small_table(), 8)))
    topology = nodes()
    replicas = place_layout(small_table().schemes, layout, topology)
    assert replicas is not None
    assert sorted(rank for replica in replicas for rank in replica.ranks) == list(range(8))
    for replica in replicas:
        for stage in range(replica.scheme.pp):
            assert len({topology.node_of[rank] for rank in replica.stage_ranks(stage)}) == 1


def test_a_stage_wider_than_a_node_takes_whole_nodes() -> None:
    assert ranks_of((0, 1, 0, 1), nodes(4, 2)) == [(0, 1, 2, 3), (4, 5)]


def test_widths_that_leave_gaps() -> None:
    """Two stages of three ranks do not fit onto nodes of four together with one of two on a single node."""
    table = small_table(8, tp3=COSTS["tp2"], tp2=COSTS["tp2"])
    assert place_layout(table.schemes, (1, 2), nodes()) is None
    link = Link(1.0, 0.0)
    uneven = Topology("uneven", (Node("a", (0, 1, 2), link, link), Node("b", (3, 4, 5, 6, 7), link, link)))
    replicas = place_layout(table.schemes, (1, 2), uneven)
    assert replicas is not None and [replica.ranks for replica in replicas] == [(0, 1, 2), (3, 4, 5), (6, 7)]
