"""Ctrl-C, SIGTERM and death of a job of several processes, whatever its processes are in the middle of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from runtime.processes import Process, descendants, kill
from tests.jobs import alive, gone_within, members_of

RANK = r"""
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path
from runtime.interrupts import ends_when_interrupted

def started():
    Path(sys.argv[1], os.environ.get("RANK", "0")).touch()

def deadlock():
    # Waits below Python for ever: no signal handler of Python runs, as in a collective whose other ranks have ended.
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    started()
    library.pthread_mutex_lock(mutex)

def helper():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    deadlock()

def deaf():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started()
    time.sleep(300)

def swallow():
    started()
    while True:
        try:
            time.sleep(300)
        except KeyboardInterrupt:
            pass

def destructor():
    class Waits:
        def __del__(self):
            started()
            time.sleep(300)
    Waits()
    time.sleep(300)

with ends_when_interrupted(lambda: sys.stderr.write("interrupted\n"), 0.3):
    globals()[sys.argv[2 + int(os.environ.get("RANK", "0"))]]()
"""
ASK = "import sys; from runtime.launch import launch; sys.exit(launch(len(sys.argv[2:]), 'rank_script', sys.argv[1:]))"
NUMBERS = [signal.SIGINT, signal.SIGTERM]


Start: TypeAlias = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts an interpreter that finds `rank_script`, in the folder of the test; kills it if the test has not."""
    (tmp_path / "rank_script.py").write_text(RANK)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, *arguments]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for job in started:
        job.kill()
        job.communicate()


def wait_for(folder: Path, num_ranks: int, job: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 240
    while len([rank for rank in range(num_ranks) if (folder / str(rank)).exists()]) < num_ranks:
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["deadlock", "swallow", "destructor"])
def test_a_rank_ends_wherever_its_main_thread_is(tmp_path: Path, start: Start, kind: str) -> None:
    rank = start("-m", "rank_script", str(tmp_path), kind)
    wait_for(tmp_path, 1, rank)
    rank.send_signal(signal.SIGINT)
    _, err = rank.communicate(timeout=60)
    assert (rank.returncode, err) == (130, "interrupted\n")


EARLY = """
import os, signal, sys
from runtime.interrupts import ends_when_interrupted

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
os.kill(os.getpid(), signal.SIGINT)
print("starts")
with ends_when_interrupted(lambda: print("interrupted"), 60.0):
    print("not reached")
"""
TWICE = """
import os, signal, sys
from runtime.interrupts import ends_when_interrupted

with ends_when_interrupted(lambda: print("interrupted"), 60.0):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        print("cleaned up")
        sys.exit("another rank has ended")
"""


@pytest.mark.parametrize(("code", "text"), [(EARLY, "starts\n"), (TWICE, "cleaned up\n")])
def test_an_interrupt_waits_for_the_start_and_leaves_time_to_clean_up(code: str, text: str) -> None:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, f"{text}interrupted\n", "")


@pytest.mark.gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_ranks_that_are_blocked_or_deaf_and_their_helpers(
    tmp_path: Path, start: Start, number: int
) -> None:
    job = start("-c", ASK, str(tmp_path), "deadlock", "deaf", "helper")
    wait_for(tmp_path, 3, job)
    members = members_of(job.pid)
    assert len(members) == 5, "a launcher, three ranks, a helper"
    job.send_signal(number)
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (128 + number, "interrupted\n" * 2), "the deaf one says nothing"
    assert gone_within(5.0, members), alive(members)


@pytest.mark.gloo
@pytest.mark.timeout(400)
def test_a_job_ends_with_the_process_that_was_asked_for_it(tmp_path: Path, start: Start) -> None:
    job = start("-c", ASK, str(tmp_path), "deadlock", "deaf")
    wait_for(tmp_path, 2, job)
    members = members_of(job.pid)
    job.kill()
    assert gone_within(60.0, members), alive(members)


SCRIPT = """
import os, sys
from pathlib import Path
import torch
from torch import nn
import hgraph as hg
from hgraph.profile import Profile, SchemeCost
from runtime.calibrate import calibrate

def started():
    Path(sys.argv[1], os.environ["RANK"]).touch()

def profile(program):
    if sys.argv[2] == "calibrates":
        started()
        while True:
            calibrate(program, hg.MemoryLimits(budget_mib=12))
    return Profile({"tp1": SchemeCost(0, 1.0, 1.0, 100)}, {})

POOL = "{version: 1, ranks: 2, strategies: [{name: two, replicas: [{tp: 1, count: 2}]}]}"
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 32))
loss = lambda model, packed: hg.data.token_loss(model(packed.tokens[None])[0], packed)
with hg.compile(model, loss, hg.parse_pool(POOL, "pool"), profile=profile) as program:
    documents = hg.data.TokenDataset([range(n) for n in (20, 3, 30, 7)])
    for batch in program.ahead(hg.data.global_batches(documents, tokens_per_step=50, max_steps=100_000)):
        if program.step(batch).step == 3:
            started()
"""


@pytest.mark.gloo
@pytest.mark.timeout(400)
@pytest.mark.long
@pytest.mark.parametrize("doing", ["trains", "calibrates"])
def test_an_interrupt_ends_the_script_of_a_user_under_torchrun(tmp_path: Path, start: Start, doing: str) -> None:
    """Nothing of ours handles signals there: ranks leave what they wait in, and the planner ends with them."""
    (tmp_path / "script.py").write_text(SCRIPT)
    job = start("-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py", str(tmp_path), doing)
    wait_for(tmp_path, 2, job)
    members = members_of(job.pid)
    assert len(members) == (3 if doing == "trains" else 2), "two ranks, a planner"
    job.send_signal(signal.SIGINT)
    assert gone_within(60.0, [job.pid, *members]), alive(members)
    _, err = job.communicate(timeout=60)
    assert job.returncode != 0 and err.count("KeyboardInterrupt") >= 2, "both ranks end by it, none by SIGKILL"


ASKED = """
import sys, time, types
from pathlib import Path
import runtime.config
from runtime.cli import main

def waits(*_):
    Path(sys.argv[1], "0").touch()
    time.sleep(300)

if sys.argv[2] == "before ranks are launched":
    runtime.config.load_config = waits
else:
    sys.modules["runtime.train"] = types.SimpleNamespace(train=waits)
main(["train", "config.yaml"])
"""


@pytest.mark.parametrize("when", ["before ranks are launched", "in the only process"])
def test_sigterm_ends_the_process_that_was_asked_as_ctrl_c_does(tmp_path: Path, start: Start, when: str) -> None:
    (tmp_path / "config.yaml").write_text("num_processes: 1\n")
    asked = start("-c", ASKED, str(tmp_path), when)
    wait_for(tmp_path, 1, asked)
    asked.send_signal(signal.SIGTERM)
    _, err = asked.communicate(timeout=60)
    assert (asked.returncode, err) == (143, "terminated\n")


def test_descendants_are_found_across_sessions_and_killed() -> None:
    code = "import subprocess, sys; subprocess.run(['sleep', '300'], start_new_session=True)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline_s = time.monotonic() + 60
    while not (found := descendants(parent.pid)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    (child,) = found
    kill([Process(child.pid, child.started + 1)])
    assert alive([child.pid]), "a later process with the same number is another"
    kill(found)
    assert parent.wait(60) == 0
    assert not descendants(parent.pid)
