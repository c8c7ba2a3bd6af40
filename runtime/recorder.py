"""Recorder: what a run shows while it runs and leaves in its folder.

`metrics.jsonl` and `plans.jsonl` have one JSON object a step; `config.yaml` is the resolved configuration.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from runtime.config import RunConfig, write_config
from runtime.program import Program, StepOutput

__all__ = ["Recorder", "metrics_of"]


def metrics_of(output: StepOutput) -> dict[str, Any]:
    """Returns the fields of one line of `metrics.jsonl`."""
    return {
        "step": output.step + 1,
        "strategy": output.strategy,
        "replicas": output.replicas_used,
        "loss": output.loss,
        "grad_norm": output.grad_norm,
        "tokens": output.tokens,
        "tokens_per_s": 1e3 * output.tokens / output.measured_ms if output.measured_ms else 0.0,
        "predicted_ms": output.plan.predicted_ms,
        "measured_ms": output.measured_ms,
        "plan_ms": output.plan.plan_ms,
        "plan_wait_ms": output.plan_wait_ms,
        "bridge_bytes": output.bridge_bytes,
        "compiled_graphs": output.compiled_graphs,
    }


class Recorder:
    """Writes and shows the steps of a run; on other ranks than the writer it does nothing.

    A run that is resumed after `steps_done` steps keeps what its folder says of these, and of no later one.
    """

    def __init__(self, config: RunConfig, *, is_writer: bool, steps_done: int = 0) -> None:
        self.config, self.is_writer, self.steps_done = config, is_writer, steps_done
        self._files: dict[str, IO[str]] = {}
        self._bar: tqdm | None = None  # type: ignore[type-arg]

    def __enter__(self) -> Recorder:
        if self.is_writer:
            folder = self.config.folder
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(write_config(self.config))
            # Steps count from 1 in metrics, from 0 in plans.
            for name, end in (("metrics", self.steps_done + 1), ("plans", self.steps_done)):
                path = folder / f"{name}.jsonl"
                kept = _lines_before(path, end)
                self._files[name] = path.open("w")
                self._files[name].writelines(kept)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for file in self._files.values():
            file.close()

    def say(self, text: str) -> None:
        """Shows a line."""
        if self.is_writer:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def start(self, program: Program) -> None:
        """Shows the pool and the bar."""
        if not self.is_writer:
            return
        for name, cost in program.profile.schemes.items():
            self.say(
                f"  {name:<16} at most {cost.max_tokens:5d} tokens; "
                f"{cost.a:.3e} s^2 + {cost.b:.3e} s per sequence + {cost.c:.2f} ms"
            )
        total = self.config.steps
        self._bar = tqdm(total=total, initial=self.steps_done, unit="step", file=sys.stderr, dynamic_ncols=True)

    def step(self, output: StepOutput) -> StepOutput:
        """Records one step and returns it."""
        if self.is_writer:
            fields = metrics_of(output)
            self._write("metrics", json.dumps(fields))
            self._write("plans", output.plan.to_json())
            self.say(_line(fields, len(output.plan.replicas)))
            if self._bar is not None:
                self._bar.update()
        return output

    def stop(self) -> None:
        """Takes the bar down."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, name: str, line: str) -> None:
        # Flushed line by line: an interrupted run keeps what it has measured.
        self._files[name].write(line + "\n")
        self._files[name].flush()


def _lines_before(path: Path, step: int) -> list[str]:
    """The whole lines of a file of steps before `step`; an interrupted run may have left part of a line."""
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if json.loads(line)["step"] < step]


def _line(fields: dict[str, Any], num_replicas: int) -> str:
    return (
        "step {step:>4}  {strategy:<11} replicas {replicas}/{num_replicas}  loss {loss:.4f}  norm {grad_norm:.3f}  "
        "{tokens:>6} tokens  {tokens_per_s:>6.0f} tokens/s  predicted {predicted_ms:>5.0f} ms  measured "
        "{measured_ms:>5.0f} ms  plan {plan_ms:>4.0f} ms, waited {plan_wait_ms:>3.0f}  bridge {mib:.1f} MiB"
    ).format(**fields, num_replicas=num_replicas, mib=fields["bridge_bytes"] / 2**20)
