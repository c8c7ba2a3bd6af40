"""Times of schedules: the fast recurrence, the simulator, closed forms and bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgraph.action import Schedule
from hgraph.errors import InvalidInput, PlanError
from hgraph.schedule import build_schedule, lower
from hgraph.simulate import SimulatedStep, schedule_bound_ms, schedule_ms, schedules_ms, simulate

NAMES = st.sampled_from(["gpipe", "1f1b"])
TIMES = st.lists(st.floats(0.0, 100.0), max_size=10)


def simulated(name: str, num_stages: int, times: list[float]) -> SimulatedStep:
    forward = [time / 3 for time in times]
    backward = [time - third for time, third in zip(times, forward, strict=True)]
    return simulate(build_schedule(name, num_stages, len(times)), forward, backward)


class TestScheduleMs:
    @given(NAMES, st.integers(1, 6), TIMES)
    @settings(deadline=None)
    def test_equals_the_simulator(self, name: str, num_stages: int, times: list[float]) -> None:
        # Same dependences; GPipe's closed form adds in another order, so equal to rounding.
        total_ms = simulated(name, num_stages, times).total_ms
        assert schedule_ms(name, num_stages, times) == pytest.approx(total_ms, rel=1e-12)

    @given(NAMES, st.integers(1, 6), st.integers(0, 9), st.integers(1, 4))
    def test_many_at_once_are_the_same(self, name: str, num_stages: int, count: int, rows: int) -> None:
        times = np.random.default_rng(num_stages + 10 * count).random((rows, count)) * 100
        one_by_one = [schedule_ms(name, num_stages, row) for row in times.tolist()]
        assert schedules_ms(name, num_stages, times).tolist() == pytest.approx(one_by_one, rel=1e-12)

    @given(NAMES, st.integers(1, 6), TIMES)
    def test_lies_above_the_bound(self, name: str, num_stages: int, times: list[float]) -> None:
        assert schedule_ms(name, num_stages, times) >= schedule_bound_ms(num_stages, times) * (1 - 1e-12)

    @given(st.integers(1, 6), st.integers(1, 9), st.floats(0.1, 10))
    def test_equal_micro_batches_take_the_flow_sum_in_both(self, num_stages: int, count: int, time: float) -> None:
        flow_ms = (count + num_stages - 1) * time
        assert schedule_ms("gpipe", num_stages, [time] * count) == pytest.approx(flow_ms, rel=1e-12)
        assert schedule_ms("1f1b", num_stages, [time] * count) == pytest.approx(flow_ms, rel=1e-12)

    @given(st.integers(1, 6), st.lists(st.floats(0.0, 100.0), min_size=1, max_size=10))
    @settings(deadline=None)
    def test_gpipe_is_the_flow_sum(self, num_stages: int, times: list[float]) -> None:
        flow_ms = sum(times) + (num_stages - 1) * max(times)
        assert simulated("gpipe", num_stages, times).total_ms == pytest.approx(flow_ms, rel=1e-12)

    def test_1f1b_gains_by_order_over_the_flow_sum(self) -> None:
        times = [9.0, 3.0, 3.0, 3.0, 3.0, 3.0]
        best = min(schedule_ms("1f1b", 3, order) for order in set(itertools.permutations(times)))
        assert best < schedule_ms("gpipe", 3, times)

    def test_bound_of_each_kind(self) -> None:
        assert schedule_bound_ms(3, [4.0, 2.0, 3.0]) == 9 + 2 * 2
        assert schedule_bound_ms(3, [9.0, 1.0]) == 3 * 9
        assert schedule_bound_ms(3, []) == 0.0

    @pytest.mark.parametrize("name", ["gpipe", "1f1b"])
    def test_no_micro_batch_takes_no_time(self, name: str) -> None:
        assert schedule_ms(name, 4, []) == 0.0

    def test_wrong_input(self) -> None:
        with pytest.raises(InvalidInput, match="expected num_stages of 1 or more, got 0"):
            schedule_ms("1f1b", 0, [1.0])
        with pytest.raises(InvalidInput, match="expected schedule 'gpipe' or '1f1b', got 'zb'"):
            schedule_ms("zb", 1, [1.0])


class TestSimulate:
    def test_times_by_hand(self) -> None:
        # Stage 1 is twice as slow. 0F 0-1, 1F 1-3, 1B 3-7, 0B 7-9; then the next micro-batch's share.
        step = simulate(build_schedule("1f1b", 2, 1), [[1.0], [2.0]], [[2.0], [4.0]])
        assert step.total_ms == 9.0
        assert step.busy_ms == (3.0, 6.0)
        assert step.idle_ms == (6.0, 3.0)
        assert step.bubble == 0.5
        assert [str(action) for action in step.critical_path if action.is_compute] == ["0F0", "1F0", "1B0", "0B0"]

    def test_transfers_delay_the_receiver_only(self) -> None:
        step = simulate(build_schedule("gpipe", 2, 2), 1.0, 2.0, transfer_ms=0.5)
        by_action = {str(span.action): (span.start_ms, span.end_ms) for row in step.spans for span in row}
        assert by_action["0F1"] == (1.0, 2.0)
        assert by_action["1F0"] == (1.5, 2.5)
        assert by_action["0B0"] == (6.0, 8.0)
        assert step.total_ms == 10.0

    def test_values_that_skip_a_stage_arrive_by_their_own_edge(self) -> None:
        compute = build_schedule("1f1b", 3, 2)
        edges = ((0, 1), (1, 2), (0, 2))
        step = simulate(compute, 1.0, 2.0, edges=edges)
        assert step.schedule == lower(compute, edges)
        assert step.total_ms == simulate(compute, 1.0, 2.0).total_ms

    @given(NAMES, st.integers(1, 5), st.integers(0, 8))
    @settings(deadline=None)
    def test_lowered_and_not_lowered_agree(self, name: str, num_stages: int, count: int) -> None:
        schedule = build_schedule(name, num_stages, count)
        times = [1.0 + index % 3 for index in range(count)]
        assert simulate(schedule, times, times, 0.25) == simulate(lower(schedule), times, times, 0.25)

    def test_peak_of_live_micro_batches(self) -> None:
        assert simulate(build_schedule("gpipe", 3, 5), 1.0, 2.0).peak_micro_batches == (5, 5, 5)
        assert simulate(build_schedule("1f1b", 3, 5), 1.0, 2.0).peak_micro_batches == (3, 2, 1)
        assert simulate(build_schedule("1f1b", 3, 2), 1.0, 2.0).peak_micro_batches == (2, 2, 1)

    def test_peak_of_live_tokens(self) -> None:
        tokens = [10, 1, 1, 8]
        step = simulate(build_schedule("1f1b", 2, 4), 1.0, 2.0, tokens=tokens)
        assert step.peak_tokens == (11, 10)
        assert simulate(build_schedule("1f1b", 2, 4), 1.0, 2.0).peak_tokens is None

    @given(NAMES, st.integers(1, 5), st.lists(st.floats(0.1, 10), min_size=1, max_size=7), st.floats(0, 2))
    @settings(deadline=None)
    def test_critical_path_lasts_the_whole_step(
        self, name: str, num_stages: int, times: list[float], transfer_ms: float
    ) -> None:
        step = simulate(build_schedule(name, num_stages, len(times)), times, times, transfer_ms)
        messages = sum(action.is_receive for action in step.critical_path)
        # A receive on the path either waited for its message (one transfer) or for its own stage (none).
        longest = sum(times[action.micro_batch] for action in step.critical_path if action.is_compute)
        assert longest <= step.total_ms * (1 + 1e-12)
        assert step.total_ms <= (longest + messages * transfer_ms) * (1 + 1e-12)

    def test_empty_step(self) -> None:
        step = simulate(build_schedule("1f1b", 2, 0), 1.0, 2.0)
        assert (step.total_ms, step.bubble, step.critical_path) == (0.0, 0.0, ())

    def test_wrong_input(self) -> None:
        schedule = build_schedule("1f1b", 2, 3)
        with pytest.raises(InvalidInput, match=r"forward_ms: expected one number, 3 numbers .* or 2 rows of 3"):
            simulate(schedule, [1.0, 2.0], 1.0)
        with pytest.raises(InvalidInput, match="backward_ms: expected finite times of 0 or more"):
            simulate(schedule, 1.0, -1.0)
        with pytest.raises(InvalidInput, match="expected transfer_ms of 0 or more, got -1"):
            simulate(schedule, 1.0, 1.0, -1.0)
        with pytest.raises(InvalidInput, match="expected tokens of 3 micro-batches, got 1 numbers"):
            simulate(schedule, 1.0, 1.0, tokens=[4])

    def test_schedules_that_hang(self) -> None:
        missing = Schedule.parse("x stages=2 micro_batches=1\n0: 0F0 0RB0 0B0\n1: 1RF0 1F0 1B0 1SB0")
        with pytest.raises(PlanError, match="1RF0<0 waits for 0SF0>1, which nobody sends"):
            simulate(missing, 1.0, 1.0)
        circle = Schedule.parse("x stages=2 micro_batches=1\n0: 0RB0 0F0 0SF0 0B0\n1: 1RF0 1F0 1B0 1SB0")
        with pytest.raises(PlanError, match=r"actions wait for each other in a circle: .*0RB0<1"):
            simulate(circle, 1.0, 1.0)
