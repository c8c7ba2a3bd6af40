"""Starts a job of N processes on this machine by torchrun's launcher, and ends all of them together."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence

__all__ = ["is_launched", "launch"]

_GRACE_S = 15.0


def is_launched() -> bool:
    """Whether this process was started by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(num_processes: int, module: str, arguments: Sequence[str]) -> int:
    """Runs `python -m module arguments` in `num_processes` processes and returns the job's exit code.

    Ctrl-C reaches every process; what has not ended after a grace period is killed. 130 means interrupted.
    """
    command = [sys.executable, "-m", "runtime.launch", str(num_processes), module, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"}
    # A session of its own, so that one signal to the group ends launcher and ranks, however they were started.
    job = subprocess.Popen(command, env=environment, start_new_session=True)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return job.wait()
    except KeyboardInterrupt:
        _end(job)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
        if job.poll() is None:
            _end(job)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _end(job: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(job.pid, number)
            job.wait(_GRACE_S)
        except ProcessLookupError:
            return
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
        return


def _main(num_processes: int, module: str, arguments: Sequence[str]) -> int:
    """The launcher's own process. Ranks say themselves what went wrong; the launcher's report would bury it."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
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
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
