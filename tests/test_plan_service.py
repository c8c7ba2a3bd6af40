"""The planner process: ahead of time, without torch, and never the reason that training stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hgraph.check_plan import check_plan
from hgraph.errors import InvalidInput, PlanError
from strategies.options import PlannerOptions
from strategies.select import plan_step
from strategies.service import PlanService
from tests.planner_reference import batch, laptop

POOL, PROFILE = laptop()
OPTIONS = PlannerOptions(max_nodes=3)


@pytest.fixture(scope="module")
def service() -> Iterator[PlanService]:
    with PlanService(POOL, PROFILE, OPTIONS, depth=3) as running:
        yield running


def wait_until_gone(process_id: int, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{process_id}/stat") as status:
                if status.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_plans_come_back_by_step_and_equal_those_made_here(service: PlanService) -> None:
    batches = {step: batch(step, 8_192, 1_500) for step in (5, 6, 7)}
    for step, lengths in batches.items():
        service.submit(step, lengths)
    assert service.num_ahead == 3
    for step in (7, 5, 6):
        plan = service.result(step, timeout_s=120)
        check_plan(plan, POOL, PROFILE, batches[step])
        assert plan.plan_ms > 0 and service.last_wait_ms >= 0
        assert replace(plan, plan_ms=0.0) == plan_step(POOL, PROFILE, batches[step], step=step, options=OPTIONS)
    assert service.num_ahead == 0


def test_a_plan_made_ahead_is_not_waited_for(service: PlanService) -> None:
    service.submit(1, [10, 20])
    service.submit(2, [10, 20])
    service.result(2, timeout_s=120)
    service.result(1, timeout_s=120)
    assert service.last_wait_ms < 50


def test_the_queue_is_bounded_and_says_what_to_do(service: PlanService) -> None:
    for step in (1, 2, 3):
        service.submit(step, [10, 20])
    with pytest.raises(InvalidInput, match=r"3 steps are ahead already \(depth 3\); take the result of step 1 first"):
        service.submit(4, [10])
    with pytest.raises(InvalidInput, match="step 2 has been submitted already"):
        service.submit(2, [10])
    with pytest.raises(InvalidInput, match=r"step 9 was not submitted; waiting are \[1, 2, 3\]"):
        service.result(9)
    for step in (1, 2, 3):
        service.result(step, timeout_s=120)


def test_errors_are_raised_for_their_step_only(service: PlanService) -> None:
    service.submit(1, [10, 5_000])
    service.submit(2, [10])
    with pytest.raises(InvalidInput, match="plan: sequence 1 has 5,000 tokens; the largest limit of the pool is 4,096"):
        service.result(1, timeout_s=120)
    assert service.result(2, timeout_s=120).step == 2


def test_a_timeout_names_the_step_which_stays_submitted(service: PlanService) -> None:
    os.kill(service.process_id, signal.SIGSTOP)
    try:
        service.submit(8, [10, 20])
        with pytest.raises(PlanError, match="no plan of step 8 after 0.2 s; the planner is still at work"):
            service.result(8, timeout_s=0.2)
    finally:
        os.kill(service.process_id, signal.SIGCONT)
    assert service.result(8, timeout_s=120).step == 8


def test_the_process_imports_the_planner_and_not_torch(service: PlanService) -> None:
    service.submit(1, [10, 20])
    service.result(1, timeout_s=120)
    with open(f"/proc/{service.process_id}/maps") as maps:
        mapped = maps.read()
    assert "highs" in mapped and "libtorch" not in mapped
    code = "import sys, strategies.service, strategies.select; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout == "False\n"


def test_the_process_ignores_the_interrupt_of_the_terminal(service: PlanService) -> None:
    os.kill(service.process_id, signal.SIGINT)
    service.submit(1, [10, 20])
    assert service.result(1, timeout_s=120).solver == "heuristic"
    assert os.getsid(service.process_id) != os.getsid(0)


def test_a_killed_process_is_replaced_by_planning_here() -> None:
    with PlanService(POOL, PROFILE, OPTIONS) as service:
        service.submit(1, [10, 20])
        os.kill(service.process_id, signal.SIGKILL)
        lengths = batch(2, 8_192, 1_500)
        service.submit(2, lengths)
        assert service.result(1).solver == "heuristic (planner process: it ended by SIGKILL)"
        plan = service.result(2)
        check_plan(plan, POOL, PROFILE, lengths)
        assert plan.solver == "heuristic (planner process: it ended by SIGKILL)" and plan.plan_ms > 0
        service.submit(3, [])
        with pytest.raises(InvalidInput, match="got an empty batch"):
            service.result(3)


def test_closing_ends_the_process() -> None:
    service = PlanService(POOL, PROFILE, OPTIONS)
    process_id = service.process_id
    service.close()
    service.close()
    assert wait_until_gone(process_id)


PARENT = """
import os, sys
from strategies.service import PlanService
from tests.planner_reference import laptop
service = PlanService(*laptop())
service.submit(1, [10, 20])
assert service.result(1).solver == "heuristic"
if sys.argv[1] == "fork" and os.fork() == 0:
    import time
    time.sleep(60)
    os._exit(0)
print(service.process_id, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("holder", ["alone", "fork"])
def test_the_process_dies_with_its_parent(holder: str) -> None:
    """With `fork` a child of the parent keeps the socket open; the death of the parent itself has to be noticed."""
    if holder == "fork" and not hasattr(os, "pidfd_open"):
        pytest.skip("this system cannot watch a process")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, holder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    process_id = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    gone = wait_until_gone(process_id)
    if holder == "fork":
        os.killpg(parent.pid, signal.SIGKILL)
    parent.stdout.close()
    assert gone


def test_depth_is_checked() -> None:
    with pytest.raises(InvalidInput, match="expected a depth of 1 or more, got 0"):
        PlanService(POOL, PROFILE, OPTIONS, depth=0)


def test_a_script_without_a_main_guard_works(tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "script.py"
    script.write_text(
        "from strategies.service import PlanService\nfrom tests.planner_reference import laptop\nprint('start')\n"
        "with PlanService(*laptop()) as service:\n"
        "    service.submit(0, [10, 20])\n    print(service.result(0).strategy)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    answer = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    assert answer.stdout.splitlines()[0] == "start" and len(answer.stdout.splitlines()) == 2
