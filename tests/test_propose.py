"""Whole proposals on small clusters: what they promise, what they refuse, and what an interrupt leaves."""

from __future__ import annotations

import numpy as np
import pytest

from hgraph.communication_costs import CommunicationCosts
from hgraph.errors import InvalidInput
from hgraph.memory_model import ModelSizes
from hgraph.step_parts import StepClock
from hgraph.strategy_file import check_pool_text, write_pool
from hgraph.topology import Link, uniform
from strategies.length_data import LengthData, read_lengths, sample_batches
from strategies.proposal import Proposal, ProposalOptions
from strategies.propose import judge, planned_ms, propose
from strategies.scheme_table import SchemeLimits
from tests.proposals import nodes, profile, small_table

LENGTHS = LengthData(np.random.default_rng(0).lognormal(4.5, 1.2, 2000).astype(np.int64) + 1, "made up")


def drawn(count: int = 6, seed: int = 0, longest: int = 2000) -> list[tuple[int, ...]]:
    return sample_batches(LENGTHS, tokens=6000, longest=longest, count=count, seed=seed)


def proposed(**options: object) -> Proposal:
    return propose(
        small_table(), profile(), nodes(), drawn(), longest=2000,
        options=ProposalOptions(kept=6, finalists=8, **options),  # type: ignore[arg-type]
    )  # fmt: skip


def held_out_ms(proposal: Proposal, batches: list[tuple[int, ...]]) -> float:
    times = [
        min(
            planned_ms(strategy, profile(), batch, 8)
            for strategy, own in zip(proposal.pool.strategies, proposal.strategies, strict=True)
            if own.longest >= max(batch)
        )
        for batch in batches
    ]
    return float(np.mean(times))


def test_a_proposal_is_a_sound_pool() -> None:
    proposal = proposed()
    report = check_pool_text(write_pool(proposal.pool), "proposed")
    assert report.pool == proposal.pool and not report.problems and not report.notes
    assert max(own.longest for own in proposal.strategies) >= 2000
    assert sum(own.share for own in proposal.strategies) == pytest.approx(1.0)
    assert proposal.num_batches == 6 and not proposal.interrupted


def test_it_beats_equal_replicas_on_batches_it_has_not_seen() -> None:
    proposal = proposed()
    assert proposal.static_ms is not None and proposal.mean_ms < 0.9 * proposal.static_ms
    table, unseen = small_table(), drawn(seed=7)
    static = judge(table, profile(), nodes(), unseen, [(0, 0, 0, 2)], longest=2000)
    assert held_out_ms(proposal, unseen) < 0.9 * static.mean_ms


def test_a_clock_that_counts_communication_decides() -> None:
    """Each rank of a small replica gets more of the model; over slow links that costs more than it saves."""
    slow = uniform("slow", 2, 4, Link(1e-4, 0), Link(1.0, 0))
    costs = CommunicationCosts(ModelSizes(4, 64, 192, 4, 256), slow, planned_ranks=0)
    alone, timed = (
        propose(
            small_table(), profile(), nodes(), drawn(2, longest=800), longest=800, clock=clock,
            options=ProposalOptions(kept=6, finalists=8, size=1),
        )
        for clock in (None, StepClock("serial", costs))
    )  # fmt: skip
    assert alone.strategies[0].name != "tp4x2"
    (strategy,) = timed.pool.strategies
    assert strategy.name == "tp4x2"
    bridges_ms = sum(costs.bridge_ms(strategy, kind) for kind in ("parameters", "gradients"))
    computed_ms = np.mean([planned_ms(strategy, profile(), batch, 8) for batch in drawn(2, longest=800)])
    assert timed.mean_ms == pytest.approx(computed_ms + bridges_ms)


def test_it_says_what_each_strategy_is_worth() -> None:
    proposal = proposed(size=3)
    assert len(proposal.pool.strategies) == 3
    assert proposal.mean_ms == pytest.approx(held_out_ms(proposal, drawn()), rel=0.05)
    for own in proposal.strategies:
        assert own.without_ms is None or own.without_ms >= proposal.mean_ms


def test_the_same_arguments_give_the_same_pool() -> None:
    assert proposed() == proposed()


def test_more_strategies_are_no_slower() -> None:
    assert proposed(size=4).mean_ms <= proposed(size=2).mean_ms <= proposed(size=1).mean_ms


def test_the_longest_sequence_fits_though_no_batch_has_it() -> None:
    short = [tuple(min(length, 200) for length in batch) for batch in drawn(3)]
    proposal = propose(small_table(), profile(), nodes(), short, longest=1900, options=ProposalOptions(kept=4))
    assert max(own.longest for own in proposal.strategies) >= 1900


def test_a_longest_sequence_that_nothing_holds() -> None:
    with pytest.raises(InvalidInput, match="largest limit of the schemes is 2,000 tokens"):
        propose(small_table(), profile(), nodes(), drawn(2), longest=2001)


def test_no_batches() -> None:
    with pytest.raises(InvalidInput, match="at least one sampled batch"):
        propose(small_table(), profile(), nodes(), [], longest=100)


@pytest.mark.parametrize(("what", "done"), [("searching layouts", 2), ("planning", 1)])
def test_an_interrupt_gives_the_best_so_far(what: str, done: int) -> None:
    def interrupt(now: str, number: int, total: int) -> None:
        if (now, number) == (what, done):
            raise KeyboardInterrupt

    proposal = propose(small_table(), profile(), nodes(), drawn(), longest=2000, progress=interrupt)
    assert proposal.interrupted and proposal.pool.strategies
    assert proposal.num_batches == (2 if what == "searching layouts" else 6)
    assert max(own.longest for own in proposal.strategies) >= 2000


def test_an_interrupt_before_anything_was_found() -> None:
    def interrupt(now: str, number: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        propose(small_table(), profile(), nodes(), drawn(), longest=2000, progress=interrupt)


def test_schemes_that_fit_no_node_are_not_proposed() -> None:
    limits = SchemeLimits(ranks_per_node=2)
    table = small_table(8, limits)
    assert "tp4" not in map(str, table.schemes)
    batches = drawn(3, longest=800)
    proposal = propose(table, profile(), nodes(4, 2), batches, longest=800)
    assert all(replica.scheme in table.schemes for own in proposal.pool.strategies for replica in own.replicas)


def test_settings_that_make_no_proposal() -> None:
    for wrong in ({"size": 0}, {"most": 0}, {"gain": -0.1}, {"reach": -1.0}):
        with pytest.raises(InvalidInput, match=f"propose: expected {next(iter(wrong))} of"):
            ProposalOptions(**wrong)  # type: ignore[arg-type]


def test_shipped_lengths_are_read_by_name() -> None:
    """What the command line samples from: 200,000 tokens of them are a few hundred sequences."""
    batch = sample_batches(read_lengths("commoncrawl-like"), tokens=200_000, longest=32_768, count=1, seed=0)[0]
    assert 100 < len(batch) < 400
