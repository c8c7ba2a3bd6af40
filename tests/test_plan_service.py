"""The planner process: ahead of time, without torch, and never the reason that training stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hgraph.check_plan import check_plan
from hgraph.errors import InvalidInput, PlanError
from hgraph.plan import StepPlan
from strategies.ahead import PlanAhead, PlannedStep
from strategies.anytime import AnytimePlanner
from strategies.options import PlannerOptions
from strategies.select import plan_step
from strategies.service import PlanService
from tests.planner_reference import batch, laptop

POOL, PROFILE = laptop()
OPTIONS = PlannerOptions(gap=0.0, max_nodes=3)
"""No gap is good enough, so that every plan passes the solver."""


@pytest.fixture(scope="module")
def service() -> Iterator[PlanService]:
    with PlanService(POOL, PROFILE, OPTIONS, PlanAhead(3, workers=1)) as running:
        wait_until_ready(running)
        yield running


def wait_until_ready(service: PlanService, count: int = 1) -> None:
    """Until a process is ready, steps are planned in this one."""
    with service._changed:
        assert service._changed.wait_for(lambda: service._num_ready >= count, 240)


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


def untimed(plan: StepPlan) -> StepPlan:
    return replace(plan, plan_ms=0.0)


def batches_of(steps: Sequence[int]) -> dict[int, list[int]]:
    return {step: batch(step, 3_000, 1_000) for step in steps}


def run(service: PlanService, steps: Sequence[int], depth: int) -> dict[int, PlannedStep]:
    """Returns the plans of steps, as training takes them: in order, `depth` of them ahead."""
    batches, planned, waiting = batches_of(steps), {}, list(steps)
    for step in steps:
        while waiting and service.num_ahead < depth:
            service.submit(waiting[0], batches[waiting.pop(0)])
        planned[step] = service.result(step, timeout_s=240)
    return planned


def test_plans_come_back_by_step_and_equal_those_made_here(service: PlanService) -> None:
    batches = batches_of((5, 6, 7))
    for step, lengths in batches.items():
        service.submit(step, lengths)
    assert service.num_ahead == 3
    for step in (7, 5, 6):
        planned = service.result(step, timeout_s=240)
        check_plan(planned.plan, POOL, PROFILE, batches[step])
        first = plan_step(POOL, PROFILE, batches[step], step=step, options=replace(OPTIONS, program=False))
        best = plan_step(POOL, PROFILE, batches[step], step=step, options=OPTIONS)
        assert untimed(planned.plan) == best
        times = planned.times
        assert 0 < times.latency_ms <= times.total_ms == planned.plan.plan_ms and times.waited_ms >= 0
        assert (
            times.runs == best.runs
            and bool(times.runs) == (first.gap > 0)
            and times.first_predicted_ms == first.predicted_ms
        )
        assert planned.gain == pytest.approx(1 - best.predicted_ms / first.predicted_ms)
    assert service.num_ahead == 0


def test_a_plan_made_ahead_is_not_waited_for(service: PlanService) -> None:
    service.submit(1, [10, 20])
    service.submit(2, [10, 20])
    service.result(2, timeout_s=240)
    assert service.result(1, timeout_s=240).times.waited_ms < 50


def test_the_queue_is_bounded_and_says_what_to_do(service: PlanService) -> None:
    for step in (1, 2, 3):
        service.submit(step, [10, 20])
    with pytest.raises(InvalidInput, match=r"3 steps are ahead already \(depth 3\); take the result of step 1 first"):
        service.submit(4, [10])
    with pytest.raises(InvalidInput, match="step 2 has been submitted already"):
        service.submit(2, [10])
    with pytest.raises(InvalidInput, match=r"step 9 was not submitted; waiting are \[1, 2, 3\]"):
        service.result(9)
    service.drop(2)
    for step in (1, 3):
        service.result(step, timeout_s=240)
    assert service.num_ahead == 0


def test_errors_are_raised_for_their_step_only(service: PlanService) -> None:
    service.submit(1, [10, 5_000])
    service.submit(2, [10])
    with pytest.raises(InvalidInput, match="plan: sequence 1 has 5,000 tokens; the largest limit of the pool is 4,096"):
        service.result(1, timeout_s=240)
    assert service.result(2, timeout_s=240).plan.step == 2


def test_a_timeout_names_the_step_which_stays_submitted(service: PlanService) -> None:
    (process_id,) = service.process_ids
    os.kill(process_id, signal.SIGSTOP)
    try:
        service.submit(8, [10, 20])
        with pytest.raises(PlanError, match="no plan of step 8 after 0.2 s; the planner is still at work"):
            service.result(8, timeout_s=0.2)
    finally:
        os.kill(process_id, signal.SIGCONT)
    assert service.result(8, timeout_s=240).plan.step == 8


@pytest.mark.long  # two processes of its own
def test_a_step_whose_solver_does_not_return_takes_its_first_plan() -> None:
    """The process is stopped between the first answer and the last one; the one after it is planned as ever."""
    batches = batches_of((1, 2))
    with PlanService(POOL, PROFILE, OPTIONS, PlanAhead(3)) as service:
        wait_until_ready(service)
        task = _submitted(service, 1, batches[1])
        with service._changed:  # the thread that would take the last answer waits
            assert service._changed.wait_for(lambda: task.first is not None, 240)
            os.kill(service.process_ids[0], signal.SIGSTOP)
            task.last = None
        service.submit(2, batches[2])
        planned = service.result(1, timeout_s=0.3)
        first = plan_step(POOL, PROFILE, batches[1], step=1, options=replace(OPTIONS, program=False))
        assert planned.plan.solver == "heuristic (planner process: no better plan after 0.3 s)"
        assert replace(untimed(planned.plan), solver="heuristic") == first
        assert untimed(service.result(2, timeout_s=240).plan) == plan_step(
            POOL, PROFILE, batches[2], step=2, options=OPTIONS
        )


def _submitted(service: PlanService, step: int, lengths: list[int]) -> Any:
    service.submit(step, lengths)
    return service._pending[step]


def test_the_process_imports_the_planner_and_not_torch(service: PlanService) -> None:
    service.submit(1, [10, 20])
    service.result(1, timeout_s=240)
    deadline_s = time.monotonic() + 120
    while "highs" not in (mapped := Path(f"/proc/{service.process_ids[0]}/maps").read_text()):
        assert time.monotonic() < deadline_s, "it warms up as soon as it has nothing to plan"
        time.sleep(0.05)
    assert "libtorch" not in mapped
    code = "import sys, strategies.service, strategies.select; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert answer.stdout == "False\n"


def test_the_process_ignores_the_interrupt_of_the_terminal(service: PlanService) -> None:
    (process_id,) = service.process_ids
    os.kill(process_id, signal.SIGINT)
    service.submit(1, [10, 20])
    assert service.result(1, timeout_s=240).plan.solver == "heuristic"
    assert os.getsid(process_id) != os.getsid(0)


def test_plans_are_the_same_whatever_the_number_of_processes_and_after_a_restart(service: PlanService) -> None:
    """A resumed job plans its steps as the job that was broken off would have: by other processes, with no history."""
    steps = range(20, 26)
    alone = run(service, steps, 3)
    with PlanService(POOL, PROFILE, OPTIONS, PlanAhead(4, workers=3)) as several:
        with several._changed:
            several._add_worker()
            several._add_worker()
        wait_until_ready(several, 3)
        resumed = run(several, steps[2:], 4)
        assert len(several.process_ids) == 3
    for step in steps[2:]:
        assert untimed(resumed[step].plan) == untimed(alone[step].plan)
        check_plan(resumed[step].plan, POOL, PROFILE, batches_of([step])[step])


def test_a_process_is_added_where_one_falls_behind() -> None:
    with PlanService(POOL, PROFILE, OPTIONS, PlanAhead(4, workers=2)) as service:
        wait_until_ready(service)
        assert len(service.process_ids) == 1 and service.take_notes() == []
        (slow,) = service.process_ids
        os.kill(slow, signal.SIGSTOP)
        for step in (1, 2, 3):
            service.submit(step, [10, 20])
        with pytest.raises(PlanError, match="no plan of step 1"):
            service.result(1, timeout_s=0.1)
        assert service.result(2, timeout_s=240).plan.step == 2
        assert service.result(3, timeout_s=240).plan.step == 3
        assert service.take_notes() == ["a step waited for its plan: 2 planner processes from now on"]
        os.kill(slow, signal.SIGCONT)
        assert service.result(1, timeout_s=240).plan.step == 1
        assert len(service.process_ids) == 2


def test_a_step_that_does_not_wait_takes_its_first_plan_and_says_so() -> None:
    lengths = batches_of([1])[1]
    first = plan_step(POOL, PROFILE, lengths, step=1, options=replace(OPTIONS, program=False))
    assert first.gap > 0
    with PlanService(POOL, PROFILE, OPTIONS, PlanAhead(2, wait="first")) as service:
        service.submit(1, lengths)
        planned = service.result(1)  # long before the process has started
        assert planned.plan.solver == "heuristic (not waited for a better plan)" and not planned.times.runs
        assert replace(untimed(planned.plan), solver="heuristic") == first
        service.submit(2, lengths)
        task = service._pending[2]
        with service._changed:
            assert service._changed.wait_for(lambda: task.last is not None, 240)
        assert untimed(service.result(2).plan) == plan_step(POOL, PROFILE, lengths, step=2, options=OPTIONS)


def test_no_process_works_on_a_step_that_was_taken() -> None:
    """The process is stopped until the step has been taken, so it cannot be done before."""
    lengths = batches_of([1])[1]
    answers = list(AnytimePlanner(POOL, PROFILE, OPTIONS).answers(lengths, 1))
    assert len(answers) > 1 and answers[-1].plan is not None and answers[-1].plan.runs
    with PlanService(POOL, PROFILE, OPTIONS, PlanAhead(2, workers=1, wait="first")) as service:
        wait_until_ready(service)
        (process_id,) = service.process_ids
        os.kill(process_id, signal.SIGSTOP)
        task = _submitted(service, 1, lengths)
        while task.process is None:
            time.sleep(0.001)
        assert service.result(1).plan.solver == "heuristic (not waited for a better plan)"
        os.kill(process_id, signal.SIGCONT)
        service.submit(2, lengths)
        after = service._pending[2]
        with service._changed:
            assert service._changed.wait_for(lambda: after.last is not None, 240)
        assert task.last is not None and not task.last.plan.runs, "nothing came after its first plan"
        assert untimed(service.result(2).plan) == plan_step(POOL, PROFILE, lengths, step=2, options=OPTIONS)
        assert service.process_ids == (process_id,)


def test_the_first_steps_do_not_wait_for_a_process_to_start() -> None:
    with PlanService(POOL, PROFILE, OPTIONS, PlanAhead(2)) as service:
        while not service.process_ids:
            time.sleep(0.001)
        os.kill(service.process_ids[0], signal.SIGSTOP)  # as if it took for ever to start
        assert service._num_ready == 0
        lengths = batches_of([1])[1]
        service.submit(1, lengths)
        planned = service.result(1)
        assert untimed(planned.plan) == plan_step(POOL, PROFILE, lengths, step=1, options=OPTIONS)
        assert planned.times.waited_ms >= planned.times.total_ms > 0


def test_a_killed_process_is_replaced_and_the_plans_are_the_same() -> None:
    with PlanService(POOL, PROFILE, OPTIONS, PlanAhead(4)) as service:
        wait_until_ready(service)
        (before,) = service.process_ids
        os.kill(before, signal.SIGKILL)
        lengths = batches_of([2])[2]
        service.submit(2, lengths)
        assert untimed(service.result(2, timeout_s=240).plan) == plan_step(
            POOL, PROFILE, lengths, step=2, options=OPTIONS
        )
        assert service.process_ids != (before,)
        (note,) = service.take_notes()
        assert note == "a planner process has ended while it planned step 2 (it ended by SIGKILL); replaced"
        assert service.take_notes() == []


@dataclass(frozen=True, slots=True)
class Fatal(PlannerOptions):
    """Ends the process that reads them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


def test_where_every_process_ends_steps_are_planned_here() -> None:
    with PlanService(POOL, PROFILE, Fatal(), PlanAhead(4, workers=1)) as service:
        wait_until_ready(service)
        batches = batches_of((1, 2, 3))
        for step, lengths in batches.items():
            service.submit(step, lengths)
        for step, lengths in batches.items():
            plan = service.result(step, timeout_s=240).plan
            check_plan(plan, POOL, PROFILE, lengths)
            assert plan.solver.startswith("heuristic (planner process: ") and plan.plan_ms > 0
        service.submit(4, [5_000])
        with pytest.raises(InvalidInput, match="sequence 0 has 5,000 tokens"):
            service.result(4)
        notes = service.take_notes()
        assert notes[:3] == 3 * ["a planner process has ended while it started (it ended with exit code 3); replaced"]
        assert notes[3].endswith("(it ended with exit code 3); not replaced: the heuristic plans from now on")
        assert len(notes) == 4


@pytest.mark.long
def test_memory_is_bounded(service: PlanService) -> None:
    """What 60 steps left is what 20 steps left: nothing is kept of a step that was taken."""
    used = []
    for round in range(3):
        run(service, range(100 * round, 100 * round + 20), 3)
        used.append(_resident_kib(service.process_ids[0]))
    assert used[2] - used[0] < 8 * 1024
    assert not service._pending and not service._queue


def _resident_kib(process_id: int) -> int:
    with open(f"/proc/{process_id}/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1])


def test_nobody_is_busy_while_there_is_nothing_to_plan(service: PlanService) -> None:
    def busy_s() -> float:
        with open(f"/proc/{service.process_ids[0]}/stat") as status:
            fields = status.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + time.process_time()

    before_s = busy_s()
    time.sleep(0.5)
    assert busy_s() - before_s < 0.1


def test_closing_ends_the_process() -> None:
    service = PlanService(POOL, PROFILE, OPTIONS)
    wait_until_ready(service)
    (process_id,) = service.process_ids
    service.close()
    service.close()
    assert wait_until_gone(process_id)
    assert not any(thread.is_alive() for thread in service._threads)


PARENT = """
import os, sys, time
from hgraph.profile import Profile, SchemeCost
from hgraph.strategy import Pool, Replica, Scheme, Strategy
from strategies.service import PlanService
pool = Pool(1, (Strategy("one", (Replica(Scheme.uniform(), (0,)),)),))
service = PlanService(pool, Profile({"tp1": SchemeCost(0, 1, 1, 100)}, {}))
with service._changed:
    service._changed.wait_for(lambda: service._num_ready > 0)
if sys.argv[1] == "fork" and os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print(service.process_ids[0], flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("holder", [pytest.param("alone", marks=pytest.mark.long), "fork"])
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
        PlanService(POOL, PROFILE, OPTIONS, PlanAhead(0))
    for wrong, text in (({"depth": -1}, "a depth"), ({"workers": 0}, "workers"), ({"wait": "last"}, "wait of 'best'")):
        with pytest.raises(InvalidInput, match=f"planning ahead: expected {text}"):
            PlanAhead(**wrong)  # type: ignore[arg-type]


def test_a_script_without_a_main_guard_works(tmp_path) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "script.py"
    script.write_text(PARENT.partition("if sys.argv")[0] + "service.close()\nprint('once')\n")
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    answer = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, env=environment, check=True
    )
    assert answer.stdout == "once\n"
