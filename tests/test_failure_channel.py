"""The failure channel without a job: who is reported, who is waited for, and who is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hgraph.errors import RankFailed
from runtime.failure_channel import Failure, FailureChannel, rank_guard


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def channel_of(store: dist.TCPStore, rank: int, num_ranks: int = 2, stale_s: float = 0.3) -> FailureChannel:
    return FailureChannel(store, rank, num_ranks, heartbeat_s=0.02, stale_s=stale_s, exit_when_stuck=False)


def test_the_first_report_wins(store: dist.TCPStore) -> None:
    first, second = channel_of(store, 0), channel_of(store, 1)
    assert first.first_failure() is None
    second.report(ValueError("first line\nsecond line"))
    first.report(RuntimeError("connection closed"))
    assert first.first_failure() == second.first_failure() == Failure(1, "ValueError: first line")
    assert first.diagnose() == "first failure: rank 1: ValueError: first line"


def test_a_rank_without_a_sign_of_life_is_reported_by_the_one_before(store: dist.TCPStore) -> None:
    channels = [channel_of(store, rank, 3, stale_s=1.0) for rank in range(3)]
    for channel in channels:
        channel.start()
    try:
        channels[2]._stopped.set()  # ends its thread without a farewell, as a killed process does
        # On a busy machine the one that watches may come late: it is asked again.
        expected = "first failure: rank 2: no sign of life for 1 s (killed or frozen)"
        assert any(channels[0].diagnose() == expected for _ in range(10))
    finally:
        for channel in channels[:2]:
            channel.stop()


def test_a_rank_that_finished_is_not_missed(store: dist.TCPStore) -> None:
    watching, finished = channel_of(store, 0), channel_of(store, 1)
    watching.start()
    finished.start()
    finished.stop()
    assert watching.diagnose() == "no rank has reported a failure"
    watching.stop()


def test_a_store_that_is_gone_is_rank_0s_failure() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    channel = channel_of(client, 1)
    channel.start()
    del store
    assert channel.diagnose() == (
        "first failure: rank 0: the store does not answer; the process that hosts it (on rank 0's node) has ended"
    )
    channel.report(ValueError("something else"))
    channel.stop()


def test_the_guard_reports_what_leaves_it_and_says_farewell(store: dist.TCPStore) -> None:
    with pytest.raises(KeyError), rank_guard(channel_of(store, 1)):
        raise KeyError("layers.0")
    assert channel_of(store, 0).first_failure() == Failure(1, "KeyError: 'layers.0'")
    with rank_guard(channel_of(store, 0)) as channel:
        assert channel.rank == 0


def test_sigterm_becomes_an_error_that_names_the_first_failure(store: dist.TCPStore) -> None:
    channel_of(store, 1).report(ValueError("empty batch"))
    before = signal.getsignal(signal.SIGTERM)
    text = r"rank 0: told to end \(SIGTERM\); first failure: rank 1: ValueError: empty batch"
    with pytest.raises(RankFailed, match=text), rank_guard(channel_of(store, 0)):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5.0)
    assert signal.getsignal(signal.SIGTERM) == before


STUCK = """
import time
import torch.distributed as dist
from runtime.failure_channel import FailureChannel, rank_guard

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
FailureChannel(store, 1, 2).report(ValueError("empty batch"))
with rank_guard(FailureChannel(store, 0, 2, heartbeat_s=0.05, grace_s=0.2)):
    time.sleep(60.0)
"""


def test_a_rank_that_hangs_where_no_error_reaches_it_is_ended() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=55.0)
    assert ended.returncode == 1
    assert ended.stderr == "rank 0: ended while it waited; first failure: rank 1: ValueError: empty batch\n"
