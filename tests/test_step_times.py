"""Times of whole steps: the recurrence against the task graph, and both against numbers by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgraph.errors import InvalidInput
from hgraph.simulate import schedule_ms
from hgraph.step_graph import simulate_step
from hgraph.step_times import NUM_BUCKETS, Bridging, Overlap, ReplicaWork, flow_ms, stage_buckets, step_ms

MS = st.floats(0.0, 50.0)


@st.composite
def works(draw: st.DrawFn) -> ReplicaWork:
    num_stages = draw(st.integers(1, 5))
    times = tuple(draw(st.lists(MS, max_size=7)))
    rows = draw(st.lists(st.lists(MS, min_size=len(times), max_size=len(times)), min_size=4, max_size=4))
    transfer = tuple(map(tuple, rows[: num_stages - 1])) if draw(st.booleans()) else ()
    return ReplicaWork(draw(st.sampled_from(["1f1b", "gpipe"])), num_stages, times, transfer)


class TestAgreement:
    @given(st.lists(works(), max_size=3), MS, MS, st.sampled_from(["overlapped", "serial"]))
    @settings(deadline=None, max_examples=40)
    def test_the_recurrence_is_the_task_graph(
        self, replicas: list[ReplicaWork], parameters_ms: float, gradients_ms: float, overlap: Overlap
    ) -> None:
        bridging = Bridging(parameters_ms, gradients_ms, overlap)
        end_ms = max(task.end_ms for task in simulate_step(replicas, bridging))
        assert step_ms(replicas, bridging) == pytest.approx(end_ms, rel=1e-9, abs=1e-9)

    @given(works())
    @settings(deadline=None)
    def test_without_communication_it_is_the_planners_time(self, work: ReplicaWork) -> None:
        work = ReplicaWork(work.schedule, work.num_stages, work.micro_batch_ms)
        expected = schedule_ms(work.schedule, work.num_stages, work.micro_batch_ms)
        assert step_ms([work]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


class TestByHand:
    def test_a_message_delays_both_passes(self) -> None:
        # 0F 0-1, message 0.5, 1F 1.5-2.5, 1B 2.5-4.5, message 0.5, 0B 5-7.
        work = ReplicaWork("1f1b", 2, (3.0,), ((0.5,),))
        assert step_ms([work]) == pytest.approx(7.0)

    def test_serial_bridges_add_up(self) -> None:
        work = ReplicaWork("1f1b", 1, (3.0, 6.0))
        assert step_ms([work], Bridging(2.0, 4.0, "serial")) == pytest.approx(15.0)

    def test_short_bridges_hide_but_for_one_bucket_each(self) -> None:
        # The forward pass takes 24, a bucket of parameters 0.1: only the first is waited for, and the last gradient.
        work = ReplicaWork("1f1b", 1, (72.0,))
        assert step_ms([work], Bridging(2.4, 4.8)) == pytest.approx(0.1 + 72.0 + 0.2)

    def test_long_bridges_hide_the_computation(self) -> None:
        # A cut of the forward pass, 1 ms, follows the last of 2400 ms; one of the backward pass, 2 ms, comes first.
        work = ReplicaWork("1f1b", 1, (72.0,))
        assert step_ms([work], Bridging(2400.0, 2400.0)) == pytest.approx(2400.0 + 1.0 + 2.0 + 2400.0)

    def test_gradients_wait_for_the_slowest_replica(self) -> None:
        fast, slow = ReplicaWork("1f1b", 1, (24.0,)), ReplicaWork("1f1b", 1, (48.0,))
        assert step_ms([fast, slow], Bridging(0.0, 2.4)) == pytest.approx(48.1)

    def test_an_idle_replica_and_no_replica_wait_for_the_bridges_alone(self) -> None:
        assert step_ms([ReplicaWork("1f1b", 2, ())], Bridging(3.0, 4.0)) == pytest.approx(7.0)
        assert step_ms([], Bridging(3.0, 4.0, "serial")) == 7.0
        assert step_ms([]) == 0.0

    def test_flow(self) -> None:
        assert flow_ms(ReplicaWork("1f1b", 3, (2.0, 5.0))) == 7.0 + 2 * 5.0
        assert flow_ms(ReplicaWork("1f1b", 3, ())) == 0.0


@given(st.integers(1, NUM_BUCKETS))
def test_stages_share_all_buckets_in_order(num_stages: int) -> None:
    own = [list(stage_buckets(stage, num_stages)) for stage in range(num_stages)]
    assert all(own)
    assert [bucket for buckets in own for bucket in buckets] == list(range(NUM_BUCKETS))


class TestWrongInput:
    def test_schedule_and_stages(self) -> None:
        with pytest.raises(
            InvalidInput, match="expected 1 to 24 stages and schedule 'gpipe' or '1f1b', got 1 and 'zb'"
        ):
            ReplicaWork("zb", 1, ())
        with pytest.raises(InvalidInput, match="got 25 and '1f1b'"):
            ReplicaWork("1f1b", 25, ())

    def test_transfers(self) -> None:
        with pytest.raises(InvalidInput, match=r"expected transfer_ms of 1 rows of 2, got 1 rows of \[1\]"):
            ReplicaWork("1f1b", 2, (1.0, 2.0), ((1.0,),))
