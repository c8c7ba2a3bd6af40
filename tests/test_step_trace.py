"""Chrome traces of simulated steps: rows, times, messages, parts."""

from __future__ import annotations

import json
from typing import Any

from hgraph.step_graph import simulate_step
from hgraph.step_times import Bridging, ReplicaWork
from hgraph.step_trace import TracedPart, chrome_trace
from hgraph.strategy import Replica, Scheme, Strategy

STRATEGY = Strategy("mixed", (Replica(Scheme.uniform(2, 2), (0, 1, 2, 3)), Replica(Scheme.uniform(1), (4,))))


def trace(bridging: Bridging, offset_ms: float = 0.0, switch_ms: float = 0.0, **options: bool) -> list[dict[str, Any]]:
    works = [ReplicaWork("1f1b", 2, (3.0, 6.0), ((0.5, 0.25),)), ReplicaWork("1f1b", 1, (9.0,))]
    part = TracedPart(STRATEGY, simulate_step(works, bridging), [[10, 20], [30]], offset_ms, switch_ms)
    data = chrome_trace([part], **options)
    assert json.loads(json.dumps(data)) == data
    return data["traceEvents"]


def names(events: list[dict[str, Any]], kind: str) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == kind]


class TestRows:
    def test_a_process_per_replica_and_a_row_per_stage(self) -> None:
        events = trace(Bridging())
        assert names(events, "process_name") == [
            "bridges of mixed", "mixed, replica 0: tp2.pp2", "mixed, replica 1: tp1",
        ]  # fmt: skip
        assert names(events, "thread_name")[3:] == ["stage 0, ranks 0-1", "stage 1, ranks 2-3", "stage 0, rank 4"]

    def test_a_row_per_rank_on_demand(self) -> None:
        events = trace(Bridging(), per_rank=True)
        assert names(events, "thread_name")[3:5] == ["rank 0, stage 0", "rank 1, stage 0"]
        assert {event["tid"] for event in events if event["name"] == "F1" and event["pid"] == 1} == {0, 1, 2, 3}


class TestEvents:
    def test_computations_have_times_in_microseconds_and_tokens(self) -> None:
        last = [event for event in trace(Bridging()) if event["ph"] == "X" and event["pid"] == 2]
        assert sum(event["dur"] for event in last) == 9000.0
        assert {event["args"]["tokens"] for event in last} == {30}

    def test_messages_begin_at_the_send_and_end_at_the_arrival(self) -> None:
        ends = [event for event in trace(Bridging()) if event.get("cat") == "message" and event["name"] == "0SF1>1"]
        assert [event["ph"] for event in ends] == ["b", "e"]
        assert ends[1]["ts"] - ends[0]["ts"] == 250.0

    def test_bridges_and_switches(self) -> None:
        events = trace(Bridging(2.4, 4.8), offset_ms=5.0, switch_ms=2.0)
        bridges = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
        assert len([event for event in bridges if event["name"].startswith("gradients")]) == 24
        switch = next(event for event in bridges if event["name"] == "switch")
        assert (switch["ts"], switch["dur"]) == (3000.0, 2000.0)
        assert min(event["ts"] for event in bridges if event["name"].startswith("parameters")) == 5000.0
