"""Why a plan is what it is: micro-batches, the sequence that decides, what one more strategy would gain; a picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace

import pytest

from hgraph.check_plan import check_plan
from hgraph.pictures.plan_svg import Bar, Block, plan_svg
from hgraph.profile import Profile
from hgraph.strategy import Pool
from runtime.cli.plan_tables import Answered, lengths_text, picture_of
from strategies.explain import deciding, explain
from strategies.one_more import one_more, schemes_text
from strategies.options import PlannerOptions
from strategies.pricing import pool_bound_ms, priced, strategy_bound_ms
from strategies.select import plan_step
from tests.planner_reference import UNIFORM, batch, cluster, laptop, pool_of, profile_of, strategy

QUICK = PlannerOptions(program=False)
POOL, PROFILE = laptop()


def test_micro_batches_add_up() -> None:
    lengths = batch(4, 8_192, 1_500)
    plan = plan_step(POOL, PROFILE, lengths, options=QUICK)
    why = explain(plan, POOL, PROFILE, lengths)
    for row, planned in zip(why.replicas, plan.replicas, strict=True):
        assert tuple(own.sequences for own in row.micro_batches) == planned.micro_batches
        cost = PROFILE.schemes[row.scheme]
        for own in row.micro_batches:
            assert own.lengths == tuple(lengths[index] for index in own.sequences) and own.tokens == sum(own.lengths)
            assert own.ms == pytest.approx(sum(own.sequence_ms) + cost.c)
        assert row.stage_ms == pytest.approx(sum(own.ms for own in row.micro_batches))
        assert row.stage_ms <= row.predicted_ms * (1 + 1e-12)


def test_the_sequence_that_decides_and_the_step_without_it() -> None:
    lengths = [2000, *[20] * 8]
    plan = plan_step(POOL, PROFILE, lengths, options=QUICK)
    found = deciding(plan, explain(plan, POOL, PROFILE, lengths), POOL, PROFILE, lengths, QUICK)
    assert (found.sequence, found.length) == (0, 2000)
    assert found.own_ms <= plan.predicted_ms
    assert found.without_ms == plan_step(POOL, PROFILE, lengths[1:], options=QUICK).predicted_ms < plan.predicted_ms


def test_a_sequence_alone_decides_alone() -> None:
    plan = plan_step(POOL, PROFILE, [50], options=QUICK)
    found = deciding(plan, explain(plan, POOL, PROFILE, [50]), POOL, PROFILE, [50])
    assert (found.sequence, found.without_ms) == (0, None)


def test_one_more_strategy_finds_the_one_that_is_missing() -> None:
    lengths = batch(1, 6_000, 900)
    whole = plan_step(POOL, PROFILE, lengths, options=QUICK)
    lacking = Pool(4, tuple(one for one in POOL.strategies if one.name != whole.strategy))
    plan = plan_step(lacking, PROFILE, lengths, options=QUICK)
    found = one_more(plan, lacking, PROFILE, lengths)
    best = found.rows[0]
    missing = Counter(str(replica.scheme) for replica in POOL[whole.strategy].replicas)
    wanted = schemes_text([replica.scheme for replica in POOL[whole.strategy].replicas])
    assert sum(missing.values()) and best.strategy == wanted
    # Its bridges are taken to be those of the strategy that was taken.
    difference_ms = PROFILE.bridge_ms[plan.strategy] - PROFILE.bridge_ms[whole.strategy]
    assert best.predicted_ms == pytest.approx(whole.predicted_ms + difference_ms)
    assert best.gain == pytest.approx(1 - best.predicted_ms / plan.predicted_ms) and best.gain > 0
    assert all(row.bound_ms <= (row.predicted_ms or row.bound_ms) for row in found.rows)
    assert all(row.most_gain >= (row.gain or 0.0) - 1e-9 for row in found.rows)


def test_one_more_leaves_out_what_the_pool_has_and_counts_idle_ranks() -> None:
    costs = profile_of(tp1=(0, 1.0, 1, 100), tp2=(0, 0.4, 1, 200), tp3=(0, 0.1, 1, 400), nonsense=(0, 1, 1, 5))
    pool = pool_of(strategy("pair", UNIFORM(2), UNIFORM(2)))
    plan = plan_step(pool, costs, [90, 90, 90, 90], options=QUICK)
    found = one_more(plan, pool, costs, [90, 90, 90, 90])
    assert found.num_tried == 3, "4 x tp1, one tp3, tp2 and 2 x tp1; 2 x tp2 is there, and nonsense is no scheme"
    assert [(row.strategy, row.idle_ranks) for row in found.rows] == [("tp3", 1)]
    assert found.rows[0].predicted_ms == pytest.approx(37.0) and found.rows[0].gain == pytest.approx(1 - 37 / 73)


def test_one_more_says_where_nothing_is_to_be_gained() -> None:
    costs = profile_of(tp1=(0, 1.0, 1, 100), tp2=(0, 0.1, 1, 200))
    pool = pool_of(strategy("pair", UNIFORM(2), UNIFORM(2)))
    plan = plan_step(pool, costs, [90, 90], options=QUICK)
    found = one_more(plan, pool, costs, [90, 90])
    assert found.rows == () and found.num_tried == 2 and found.best_bound_ms > plan.predicted_ms


def test_one_more_on_64_ranks() -> None:
    pool, profile = cluster()
    lengths = batch(0, 200_000, 30_000, spread=1.6)
    plan = plan_step(pool, profile, lengths, options=QUICK)
    found = one_more(plan, pool, profile, lengths)
    assert found.num_tried >= 5
    assert all(row.idle_ranks >= 0 for row in found.rows)


def test_prices_under_the_same_costs_are_the_same() -> None:
    lengths = batch(2, 8_192, 1_500)
    plan = plan_step(POOL, PROFILE, lengths, options=QUICK)
    again = priced(plan, POOL, PROFILE, lengths)
    check_plan(again, POOL, PROFILE, lengths)
    assert again.predicted_ms == pytest.approx(plan.predicted_ms) and again.bound_ms <= plan.predicted_ms
    other = Profile({name: replace(cost, c=cost.c + 5) for name, cost in PROFILE.schemes.items()}, {})
    dearer = priced(plan, POOL, other, lengths)
    check_plan(dearer, POOL, other, lengths)
    assert pool_bound_ms(POOL, other, lengths) <= plan_step(POOL, other, lengths).predicted_ms


def test_a_bound_without_a_plan() -> None:
    for one in POOL.strategies:
        alone = Pool(POOL.num_ranks, (one,))
        plan = plan_step(alone, PROFILE, [700, 300, 20], options=QUICK)
        assert 0 < strategy_bound_ms(one, PROFILE, [700, 300, 20]) <= plan.predicted_ms * (1 + 1e-12)
    assert strategy_bound_ms(POOL["tp1x4"], PROFILE, [2000]) == float("inf")


def test_schemes_and_lengths_as_text() -> None:
    assert schemes_text([UNIFORM(8, 3), *[UNIFORM(4)] * 3, UNIFORM(2)]) == "tp8.pp3 + 3 x tp4 + tp2"
    assert lengths_text([20, 300, 20, 7, 300]) == "2x300,2x20,7"


def boxes(text: str, classes: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(text)
    return [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if element.get("class") == classes]


def test_the_picture_has_a_bar_per_replica_stacked_by_cost() -> None:
    lengths = [2000, 900, 700, 300, 300, 20, 20]
    plan = plan_step(POOL, PROFILE, lengths, options=replace(QUICK, only="pp2+tp1x2"))
    text = picture_of(Answered(plan, explain(plan, POOL, PROFILE, lengths), POOL, PROFILE, lengths, ""))
    assert text == picture_of(Answered(plan, explain(plan, POOL, PROFILE, lengths), POOL, PROFILE, lengths, ""))
    drawn = [box for name in ("even", "odd", "deciding") for box in boxes(text, name)][3:]
    number = sum(len(replica.micro_batches) for replica in plan.replicas)
    assert len(drawn) + 2 >= number and len(boxes(text, "deciding")) == 2, "one in the legend, one in a bar"
    assert len(boxes(text, "waits")) == 2, "a pipeline waits; the legend says what that looks like"
    scale = 980.0 / plan.predicted_ms
    widest = max(float(box.get("width", "0")) for box in drawn)
    times = [PROFILE.cost(replica.scheme) for replica in POOL["pp2+tp1x2"].replicas]
    longest_ms = max(
        cost.micro_batch_ms([lengths[index] for index in own])
        for cost, planned in zip(times, plan.replicas, strict=True)
        for own in planned.micro_batches
    )
    assert widest == pytest.approx(longest_ms * scale, abs=0.1)
    for words in ("0 tp1.pp2(3,1)", "1 tp1", "predicted", "lower bound of the pool"):
        assert words in text


def test_a_picture_of_many_replicas_and_of_nothing() -> None:
    many = [Bar(f"{n} tp1", (Block(1.0, "5", "five"),), 1.0) for n in range(64)]
    low, tall = plan_svg(many, "many", step_ms=1.0, bound_ms=1.0), plan_svg(many[:2], "two", step_ms=1.0, bound_ms=1.0)
    assert len(boxes(low, "even")) == 65 and boxes(low, "even")[1].get("height") == "11"
    assert boxes(tall, "even")[1].get("height") == "27"
    assert "nothing to do" in plan_svg([Bar("0", (), 0.0)], "none", step_ms=0.0, bound_ms=0.0)
