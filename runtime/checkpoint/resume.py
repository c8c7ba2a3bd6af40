"""Where a run of `hgraph train` begins: anew, or after a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hgraph.errors import InvalidInput
from runtime.checkpoint.folder import checkpoints_in, find_checkpoint, read_facts
from runtime.config import RunConfig

__all__ = ["Start", "start_of"]


@dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint to go on after (None: from the beginning) and the steps behind it."""

    checkpoint: Path | None = None
    steps_done: int = 0


def start_of(config: RunConfig, resume: Path | None) -> Start:
    """Returns where the run begins; `resume` is a checkpoint, or a folder of which the last complete one is meant.

    Raises `InvalidInput` where there is none, where no step would follow, and where the run would save among
    checkpoints that are not its own.
    """
    start = Start() if resume is None else _found(resume)
    if start.steps_done >= config.steps:
        raise InvalidInput(
            f"{start.checkpoint} has {start.steps_done} steps behind it, and the run has {config.steps}; say steps=N"
        )
    later = [path.name for path in checkpoints_in(config.checkpoints) if _steps_of(path) > start.steps_done]
    if later and start.checkpoint is not None:
        raise InvalidInput(
            f"{config.checkpoints} has later checkpoints than {start.checkpoint}: {', '.join(later)}; remove them, or "
            "give the run another --name"
        )
    if later and config.checkpoint.every is not None:
        raise InvalidInput(
            f"{config.checkpoints} has checkpoints of an earlier run: {', '.join(later)}; go on with --resume, remove "
            "them, or give the run another --name"
        )
    return start


def _found(resume: Path) -> Start:
    checkpoint = find_checkpoint(resume)
    return Start(checkpoint, _steps_of(checkpoint))


def _steps_of(checkpoint: Path) -> int:
    return int(read_facts(checkpoint)["step_count"])
