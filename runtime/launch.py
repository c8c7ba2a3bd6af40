"""Starts a job of N processes on this machine by torchrun's launcher, and ends all of them together.

Three layers: the process that was asked, the launcher, the ranks. Ranks have sessions of their own, so no signal to a
group reaches all of them. The launcher learns from a pipe that closes that the job is to end, or that the process that
was asked has died, whichever way. It interrupts the ranks, which end by themselves (`runtime/interrupts.py`); what is
left after a grace period is killed, process by process.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runtime.interrupts import INTERRUPTED, TERMINATED, leave
from runtime.processes import descendants, kill

__all__ = ["is_launched", "is_launched_here", "launch"]

_GRACE_S = 5.0
_POLL_S = 0.2
_RUN_PREFIX = "hgraph-"


def is_launched() -> bool:
    """Whether this process was started by torchrun, or by `launch`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched_here() -> bool:
    """Whether this process was started by `launch`, which itself says that the job was interrupted."""
    return is_launched() and os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_RUN_PREFIX)


def launch(num_processes: int, module: str, arguments: Sequence[str]) -> int:
    """Runs `python -m module arguments` in `num_processes` processes and returns the job's exit code.

    SIGINT (Ctrl-C) or SIGTERM ends every process of the job, within seconds; the code is then 130 or 143. A second one
    does not wait. SIGINT is blocked in a rank until it unblocks it (`ends_when_interrupted`).
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "runtime.launch", str(ours), str(num_processes), module, *arguments]
    with _noting_signals() as told:
        with _blocked():
            # A session of its own: Ctrl-C at a terminal reaches this process alone, which passes it on in order.
            job = subprocess.Popen(command, env=environment, pass_fds=[ours], start_new_session=True)
        os.close(ours)
        while not told and job.poll() is None:
            _wait(job, _POLL_S)
        if told:
            _end(job, theirs, told)
            return TERMINATED if told[0] == signal.SIGTERM else INTERRUPTED
        os.close(theirs)
        return job.returncode


@contextmanager
def _noting_signals() -> Iterator[list[int]]:
    """Notes SIGINT and SIGTERM in the list it gives."""
    told: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda received, _: told.append(received)) for number in numbers}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _blocked() -> Iterator[None]:
    """Blocks SIGINT in this thread; a process started meanwhile inherits that, until it is ready to be interrupted."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(job: subprocess.Popen[bytes], timeout_s: float) -> None:
    try:
        job.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return


def _end(job: subprocess.Popen[bytes], handle: int, told: Sequence[int]) -> None:
    """Ends launcher and ranks; kills them after the grace period, or when told again."""
    members = descendants(job.pid)  # now: whoever loses its parent cannot be found any more
    deadline_s, already = time.monotonic() + _GRACE_S, len(told)
    os.close(handle)
    while job.poll() is None and time.monotonic() < deadline_s and len(told) == already:
        _wait(job, _POLL_S)
    members |= descendants(job.pid)
    job.kill()
    kill(members)
    job.wait()


def _main(handle: int, num_processes: int, module: str, arguments: Sequence[str]) -> int:
    """The launcher's own process. Ranks say themselves what went wrong; the launcher's report would bury it."""
    # SIGINT stays blocked in this thread, so that ranks start with it blocked; the thread that watches takes it.
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    threading.Thread(target=_watch_parent, args=(handle,), daemon=True).start()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"{_RUN_PREFIX}{uuid.uuid4().hex}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 1
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED
    return 0


def _watch_parent(handle: int) -> None:
    """Waits until the other end of the pipe closes; then interrupts this process, and kills what does not end."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.read(handle, 1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_GRACE_S)
    kill(descendants(os.getpid()))
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    leave(_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
