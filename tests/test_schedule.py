"""Schedules: text, building, lowering, and a checker that sees every broken property."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgraph.action import Action, Schedule, forward_edges
from hgraph.check_schedule import check_schedule
from hgraph.errors import InvalidInput, PlanError
from hgraph.schedule import build_schedule, lower
from hgraph.schedule_grid import schedule_grid

NAMES = ("gpipe", "1f1b")

LOWERED_1F1B = """\
1f1b stages=2 micro_batches=3
0: 0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0B0 0F2 0SF2>1 0RB1<1 0B1 0RB2<1 0B2
1: 1RF0<0 1F0 1B0 1SB0>0 1RF1<0 1F1 1B1 1SB1>0 1RF2<0 1F2 1B2 1SB2>0"""


def edited(schedule: Schedule, stage: int, old: str, new: str) -> Schedule:
    """Returns the schedule with part of the text of one stage's list replaced."""
    text = " ".join(map(str, schedule.stages[stage]))
    assert old in text
    actions = tuple(map(Action.parse, text.replace(old, new).split()))
    stages = tuple(actions if index == stage else row for index, row in enumerate(schedule.stages))
    return replace(schedule, stages=stages)


@st.composite
def edge_sets(draw: st.DrawFn, num_stages: int) -> tuple[tuple[int, int], ...]:
    """The neighbour edges and any others."""
    pairs = [(source, target) for target in range(num_stages) for source in range(target)]
    extra = draw(st.lists(st.sampled_from(pairs), max_size=4)) if pairs else []
    return (*forward_edges(None, num_stages), *extra)


class TestAction:
    @pytest.mark.parametrize("text", ["0F3", "1B2", "0SF3>1", "1RF3<0", "2SB11>0", "0RB11<2"])
    def test_text_parses_back(self, text: str) -> None:
        assert str(Action.parse(text)) == text

    @pytest.mark.parametrize(
        ("short", "full"), [("0SF3", "0SF3>1"), ("1RF3", "1RF3<0"), ("2SB1", "2SB1>1"), ("1RB1", "1RB1<2")]
    )
    def test_a_message_without_peer_is_between_neighbours(self, short: str, full: str) -> None:
        assert Action.parse(short) == Action.parse(full)

    def test_other_end_is_mutual(self) -> None:
        send = Action("SF", 0, 3, 2)
        assert send.other_end == Action("RF", 2, 3, 0)
        assert send.other_end.other_end == send

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("F3", "expected stage, kind, micro-batch, as in 0F3 or 0SF3>1, got 'F3'"),
            ("0W3", "expected stage, kind, micro-batch"),
            ("0F3>1", "expected > after a send and < after a receive"),
            ("0SF3<1", "expected > after a send and < after a receive"),
            ("1SF3>0", "expected a peer stage after stage 1, got 0"),
            ("1SF3>1", "expected a peer stage after stage 1, got 1"),
            ("0SB3", "expected a peer stage before stage 0, got -1"),
            ("1RF3<2", "expected a peer stage before stage 1, got 2"),
        ],
    )
    def test_wrong_text_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            Action.parse(text)

    def test_wrong_values_are_refused(self) -> None:
        with pytest.raises(InvalidInput, match="expected a kind among F, B, SF, RF, SB, RB, got 'W'"):
            Action("W", 0, 0)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="stage and micro-batch of 0 or more, got -1 and 0"):
            Action("F", -1, 0)
        with pytest.raises(InvalidInput, match="a computation has no peer"):
            Action("F", 0, 0, 1)
        with pytest.raises(InvalidInput, match="expected a peer stage after stage 0, got None"):
            Action("SF", 0, 0)


class TestScheduleValue:
    def test_text_parses_back(self) -> None:
        schedule = lower(build_schedule("1f1b", 2, 3))
        assert str(schedule) == LOWERED_1F1B
        assert Schedule.parse(LOWERED_1F1B) == schedule

    def test_empty_lists_parse_back(self) -> None:
        schedule = build_schedule("gpipe", 2, 0)
        assert str(schedule) == "gpipe stages=2 micro_batches=0\n0:\n1:"
        assert Schedule.parse(str(schedule)) == schedule

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "expected a first line like '1f1b stages=2 micro_batches=4', got ''"),
            ("x stages=2 micro_batches=0\n0:", "expected one list of actions for each of 2 stages, got 1"),
            ("x stages=1 micro_batches=1\n1: 1F0", "expected a line that starts with '0:'"),
            ("x stages=2 micro_batches=1\n0: 1F0\n1:", "action 1F0 is in the list of stage 0"),
            ("x stages=1 micro_batches=1\n0: 0F1", "action 0F1: expected a micro-batch below 1"),
            ("x stages=1 micro_batches=1\n0: 0SF0>1", "action 0SF0>1: expected a peer below 1"),
            ("x stages=0 micro_batches=1", "expected at least 1 stage and 0 micro-batches, got 0 and 1"),
        ],
    )
    def test_wrong_text_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            Schedule.parse(text)

    def test_name_has_no_spaces(self) -> None:
        with pytest.raises(InvalidInput, match="expected a name without spaces, got 'my schedule'"):
            Schedule("my schedule", 1, 0, ((),))


class TestBuild:
    def test_gpipe(self) -> None:
        assert str(build_schedule("gpipe", 2, 2)).splitlines()[1:] == ["0: 0F0 0F1 0B0 0B1", "1: 1F0 1F1 1B0 1B1"]

    def test_1f1b_runs_ahead_by_the_stages_that_follow(self) -> None:
        lines = str(build_schedule("1f1b", 3, 4)).splitlines()[1:]
        assert lines[0] == "0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
        assert lines[1] == "1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"
        assert lines[2] == "2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"

    def test_fewer_micro_batches_than_stages(self) -> None:
        assert str(build_schedule("1f1b", 4, 1)).splitlines()[1:] == [
            "0: 0F0 0B0",
            "1: 1F0 1B0",
            "2: 2F0 2B0",
            "3: 3F0 3B0",
        ]

    @pytest.mark.parametrize("name", NAMES)
    def test_no_micro_batch_gives_empty_lists(self, name: str) -> None:
        assert build_schedule(name, 3, 0).stages == ((), (), ())

    def test_unknown_name(self) -> None:
        with pytest.raises(InvalidInput, match="expected a name among gpipe, 1f1b, got 'zb'"):
            build_schedule("zb", 1, 1)


class TestLower:
    @given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(0, 9), st.data())
    @settings(max_examples=60, deadline=None)
    def test_lowered_schedules_pass_the_checker(self, name: str, num_stages: int, v: int, data: st.DataObject) -> None:
        edges = data.draw(edge_sets(num_stages))
        compute = build_schedule(name, num_stages, v)
        schedule = lower(compute, edges)
        check_schedule(schedule, edges)
        without = tuple(tuple(action for action in row if action.is_compute) for row in schedule.stages)
        assert without == compute.stages
        assert Schedule.parse(str(schedule)) == schedule

    def test_one_stage_has_no_messages(self) -> None:
        schedule = build_schedule("1f1b", 1, 3)
        assert lower(schedule) == schedule

    def test_a_value_that_skips_a_stage(self) -> None:
        schedule = lower(build_schedule("gpipe", 3, 1), ((0, 1), (1, 2), (0, 2)))
        assert str(schedule).splitlines()[1:] == [
            "0: 0F0 0SF0>1 0SF0>2 0RB0<1 0RB0<2 0B0",
            "1: 1RF0<0 1F0 1SF0>2 1RB0<2 1B0 1SB0>0",
            "2: 2RF0<0 2RF0<1 2F0 2B0 2SB0>0 2SB0>1",
        ]

    def test_receives_keep_the_order_of_sends_when_stages_disagree(self) -> None:
        text = "x stages=2 micro_batches=2\n0: 0F0 0F1 0B0 0B1\n1: 1F1 1F0 1B0 1B1"
        schedule = lower(Schedule.parse(text))
        assert str(schedule).splitlines()[2].startswith("1: 1RF0<0 1RF1<0 1F1 1F0")
        check_schedule(schedule)

    def test_computations_that_wait_for_each_other(self) -> None:
        circle = Schedule.parse("x stages=2 micro_batches=2\n0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1")
        with pytest.raises(PlanError, match="the computations 0B0, 1F1 wait for each other"):
            lower(circle)

    def test_edges_go_forward(self) -> None:
        with pytest.raises(InvalidInput, match=r"expected pairs .* with 0 <= from < to < 2, got \(1, 0\)"):
            lower(build_schedule("1f1b", 2, 1), ((1, 0),))

    def test_lowering_twice_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="expected computations only"):
            lower(lower(build_schedule("1f1b", 2, 1)))


class TestCheck:
    @pytest.mark.parametrize(
        ("stage", "old", "new", "message"),
        [
            (0, "0F2 0SF2>1", "0SF2>1", "stage 0: expected 0F2 exactly once, got it 0 times"),
            (1, "1B2", "1B2 1B2", "stage 1: expected 1B2 exactly once, got it 2 times"),
            (1, "1F0 1B0", "1B0 1F0", "stage 1: expected 1B0 after 1F0, got it before"),
            (0, "0SF1>1 ", "", "expected 0SF1>1 1 times, got it 0 times; add it with `lower`"),
            (1, "1RF1<0", "1RF1<0 1RF1<0", "expected 1RF1<0 1 times, got it 2 times; a message is passed once"),
            (0, "0F0 0SF0>1", "0SF0>1 0F0", "expected 0SF0>1 after 0F0, which produces the value"),
            (1, "1RF0<0 1F0", "1F0 1RF0<0", "expected 1RF0<0 before 1F0, which needs the value"),
            (1, "1RF0<0 1F0", "1RF1<0 1RF0<0 1F0", "expected 1RF1<0 1 times, got it 2 times"),
        ],
    )
    def test_each_property_is_seen(self, stage: int, old: str, new: str, message: str) -> None:
        broken = edited(Schedule.parse(LOWERED_1F1B), stage, old, new)
        with pytest.raises(PlanError, match=r"schedule 1f1b \(2 stages\): .*") as error:
            check_schedule(broken)
        assert message in str(error.value)

    def test_messages_along_no_edge(self) -> None:
        schedule = lower(build_schedule("gpipe", 3, 1), ((0, 1), (1, 2), (0, 2)))
        with pytest.raises(PlanError, match=r"no such message along the edges \[\(0, 1\), \(1, 2\)\]"):
            check_schedule(schedule)

    def test_computations_alone_are_not_enough(self) -> None:
        with pytest.raises(PlanError, match="add it with `lower`"):
            check_schedule(build_schedule("1f1b", 2, 1))

    def test_order_of_messages(self) -> None:
        text = (
            "x stages=2 micro_batches=2\n0: 0F0 0F1 0SF0 0SF1 0RB0 0RB1 0B0 0B1\n1: 1RF1 1RF0 1F0 1F1 1B0 1SB0 1B1 1SB1"
        )
        with pytest.raises(
            PlanError, match=r"stages 0 to 1 are received in another order .* expected 1RF0<0, got 1RF1<0"
        ):
            check_schedule(Schedule.parse(text))

    def test_deadlock_shows_the_grid_with_an_arrow(self) -> None:
        text = (
            "x stages=2 micro_batches=2\n0: 0F0 0SF0 0RB0 0B0 0F1 0SF1 0RB1 0B1\n1: 1RF0 1F0 1RF1 1F1 1B0 1SB0 1B1 1SB1"
        )
        with pytest.raises(PlanError) as error:
            check_schedule(Schedule.parse(text))
        assert str(error.value).splitlines() == [
            "schedule x (2 stages): deadlock: 0RB0<1 waits for 1SB0>0; 1RF1<0 waits for 0SF1>1",
            "        stage 0     stage 1",
            "step 0  0F0         .",
            "step 1  0SF0>1      .",
            "step 2  .           1RF0<0",
            "step 3  .           1F0",
            "step 4  --> 0RB0<1  --> 1RF1<0",
        ]


class TestGrid:
    def test_text(self) -> None:
        assert schedule_grid(build_schedule("1f1b", 2, 2)).splitlines() == [
            "1f1b: 2 stages, 2 micro-batches, 33% idle",
            "        |0                         9|",
            "stage 0 |F0=F1=......B0----...B1----|  33% idle",
            "stage 1 |...F0=B0----F1=B1----......|  33% idle",
        ]

    def test_rows_stay_within_the_columns(self) -> None:
        lines = schedule_grid(build_schedule("1f1b", 3, 40), max_columns=60).splitlines()
        assert max(map(len, lines)) <= 60 + len("stage 0 || 100% idle")

    def test_nothing_to_do(self) -> None:
        assert schedule_grid(build_schedule("gpipe", 2, 0)) == "gpipe: 2 stages, 0 micro-batches, nothing to do"
