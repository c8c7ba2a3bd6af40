"""What the time of a step is made of, and sentences that say why a rung of the ladder gains what it gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from hgraph.profile import Profile
from hgraph.step_parts import Part, StepClock
from hgraph.step_times import flow_ms

if TYPE_CHECKING:
    from strategies.ladder import LadderResult

__all__ = ["StepFacts", "mean_facts", "rung_note", "step_facts"]

NOTHING = 0.01
"""A rung that gains less than this share gains nothing."""
BOUND = 0.9
"""The longest sequence decides a step where it takes this share of it or more."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Of the computation of one step, or the mean over steps.

    `longest_share`: the least time in which the replica that has the longest sequence can run it alone, over the step;
    `imbalance`: slowest replica over the mean; `fixed_share`: part of all replicas' time that is c; `padding_share`:
    part of all tokens that is padding; `slowest_padding_share`: the same of the slowest replica; `micro_batches`: their
    number; `rank_ms`: what all micro-batches take, times the ranks that each occupies, in ms.
    """

    longest_share: float
    imbalance: float
    fixed_share: float
    padding_share: float
    slowest_padding_share: float
    micro_batches: float
    rank_ms: float


def step_facts(parts: Sequence[Part], profile: Profile, lengths: Sequence[int]) -> StepFacts:
    """Returns the facts of one step."""
    longest = max(range(len(lengths)), key=lambda index: (lengths[index], -index))
    longest_ms = total_ms = work_ms = fixed_ms = mean_ms = rank_ms = 0.0
    tokens = count = slowest_tokens = slowest_padding = 0
    for part in parts:
        own_ms = [flow_ms(work) for work in StepClock().works(part)]
        total_ms += max(own_ms)
        mean_ms += sum(own_ms) / len(own_ms)
        slowest = part.replicas[own_ms.index(max(own_ms))]
        slowest_tokens += sum(one.tokens for one in slowest)
        slowest_padding += sum(one.tokens - sum(lengths[index] for index in one.sequences) for one in slowest)
        for replica, own in zip(part.strategy.replicas, part.replicas, strict=True):
            cost = profile.cost(replica.scheme)
            busy_ms = sum(one.ms for one in own)
            work_ms += busy_ms
            rank_ms += busy_ms * replica.scheme.num_ranks
            fixed_ms += cost.c * len(own)
            tokens += sum(one.tokens for one in own)
            count += len(own)
            if any(longest in one.sequences for one in own):
                longest_ms = replica.scheme.pp * cost.micro_batch_ms([lengths[longest]])
    return StepFacts(
        longest_ms / total_ms,
        total_ms / mean_ms,
        fixed_ms / work_ms,
        1.0 - sum(lengths) / tokens,
        slowest_padding / max(1, slowest_tokens),
        float(count),
        rank_ms,
    )


def mean_facts(facts: Sequence[StepFacts]) -> StepFacts:
    """Returns the mean of each fact."""
    columns = zip(*map(astuple, facts), strict=True)
    return StepFacts(*(sum(column) / len(facts) for column in columns))


def rung_note(result: LadderResult, key: str) -> str:
    """Returns one sentence on what decides the rung `key`, from the facts of its steps; empty for the first rung."""
    before = result.before(key)
    if before is None:
        return ""
    one, last = result[key], result[before]
    gain = sum(last.ms) / sum(one.ms) - 1.0
    gains = f"gains {gain:.1%}" if gain >= NOTHING else "gains nothing" if gain > -NOTHING else f"loses {-gain:.1%}"
    return f"{gains}: {_REASONS[key](result, key, before)}{_other_layout(result, key, before)}"


def _padding(result: LadderResult, key: str, before: str) -> str:
    was = result[before].facts
    of_all, of_slowest = f"{was.padding_share:.1%} of all tokens", f"{was.slowest_padding_share:.1%} of those"
    return f"padding was {of_all} and {of_slowest} of the slowest replica, and costs b without a"


def _balance(result: LadderResult, key: str, before: str) -> str:
    was, now = result[before].facts, result[key].facts
    text = f"slowest replica over mean {was.imbalance:.2f} before, {now.imbalance:.2f} now"
    return text + _longest(now)


def _packing(result: LadderResult, key: str, before: str) -> str:
    was, now = result[before].facts, result[key].facts
    counts = f"{was.micro_batches:.1f} micro-batches a step before, {now.micro_batches:.1f} now"
    text = f"{counts}; c is {now.fixed_share:.1%} of the work"
    return text + _longest(now)


def _unequal(result: LadderResult, key: str, before: str) -> str:
    one = result[key]
    if one.layout == result[before].layout:
        text = f"of all strategies that hold the context window, none beats {one.layout} for all steps"
        return text + _longest(one.facts)
    text = f"{one.layout} in place of {result[before].layout}, by the calibration batches"
    return text + _longest(one.facts)


def _choice(result: LadderResult, key: str, before: str) -> str:
    counts = Counter(result[key].strategies)
    name, count = counts.most_common(1)[0]
    several = "one strategy" if len(counts) == 1 else f"{len(counts)} strategies"
    text = f"{several} in {len(result[key].strategies)} steps, {name} in {count}"
    return text + _longest(result[key].facts)


def _other_layout(result: LadderResult, key: str, before: str) -> str:
    """Returns a remark where the calibration batches have led to another layout than on the rung before."""
    one, last = result[key].layout, result[before].layout
    if key in ("unequal", "pool") or one == last:
        return ""
    return f"; {one} in place of {last}, by the calibration batches"


def _longest(facts: StepFacts) -> str:
    share = f"the longest sequence alone takes {min(facts.longest_share, 1.0):.0%} of a step"
    return f"; {share}, and bounds it" if facts.longest_share >= BOUND else f"; {share}"


_REASONS = {
    "static": _padding,
    "balanced": _balance,
    "fine": _packing,
    "planned": _balance,
    "unequal": _unequal,
    "pool": _choice,
}
