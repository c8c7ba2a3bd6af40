"""Recorder: what a run shows while it runs and leaves in its folder.

`metrics.jsonl` and `plans.jsonl` (`runtime/saved_plans.py`) have one JSON object a step; `config.yaml` is the resolved
configuration.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from hgraph.annotation import ranks_text
from runtime.config import RunConfig, write_config
from runtime.program import Program
from runtime.saved_plans import saved_plan
from runtime.step_output import StepOutput

__all__ = ["Recorder", "metrics_of", "step_line"]


def metrics_of(output: StepOutput) -> dict[str, Any]:
    """Returns the fields of one line of `metrics.jsonl`."""
    return {
        "step": output.step,
        "strategy": output.strategy,
        "replicas": output.replicas_used,
        "idle_ranks": list(output.idle_ranks),
        "loss": output.loss,
        "grad_norm": output.grad_norm,
        "tokens": output.tokens,
        "tokens_per_s": 1e3 * output.tokens / output.measured_ms if output.measured_ms else 0.0,
        "predicted_ms": output.plan.predicted_ms,
        "measured_ms": output.measured_ms,
        "solver": output.plan.solver,
        "bound_programs": output.solver_runs.bound,
        "bound_gain": output.bound_gain,
        "integer_programs": output.solver_runs.integer,
        "solver_gain": output.solver_gain,
        "first_plan_ms": output.plan_times.latency_ms if output.plan_times is not None else None,
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
        self._program: Program | None = None
        self._bar: tqdm | None = None  # type: ignore[type-arg]

    def __enter__(self) -> Recorder:
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

    def open(self) -> None:
        """Opens the files of the run: not before its first step, so that one that fails leaves an earlier one alone."""
        if not self.is_writer:
            return
        folder = self.config.folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(write_config(self.config))
        for name in ("metrics", "plans"):
            path = folder / f"{name}.jsonl"
            kept = _lines_before(path, self.steps_done + 1)
            self._files[name] = path.open("w")
            self._files[name].writelines(kept)

    def start(self, program: Program) -> None:
        """Opens the files, and shows the pool and the bar."""
        if not self.is_writer:
            return
        self.open()
        self._program = program
        for name, cost in program.profile.schemes.items():
            self.say(
                f"  {name:<16} at most {cost.max_tokens:5,d} tokens; a micro-batch takes {cost.c:.1f} ms, and "
                f"{cost.b:.3f} n + {cost.a:.2e} n^2 ms for each sequence of n tokens"
            )
        # A log file gets a line of the bar now and then; a terminal keeps it moving.
        interval_s = 0.1 if sys.stderr.isatty() else 30.0
        self._bar = tqdm(
            total=self.config.steps,
            initial=self.steps_done,
            unit="step",
            file=sys.stderr,
            dynamic_ncols=True,
            mininterval=interval_s,
        )

    def step(self, output: StepOutput, lengths: Sequence[int]) -> StepOutput:
        """Records one step on sequences of `lengths`, and returns it."""
        if self.is_writer and self._program is not None:
            fields = metrics_of(output)
            self._write("metrics", json.dumps(fields))
            self._write("plans", saved_plan(output.plan, self._program.pool, lengths, output.step).to_json())
            for note in self._program.planning.take_notes():
                self.say(f"planner: {note}")
            self.say(step_line(fields, len(output.plan.replicas)))
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


def step_line(fields: dict[str, Any], num_replicas: int) -> str:
    """Returns the line that a run shows of a step, from the fields of `metrics_of`."""
    idle = fields["idle_ranks"]
    idle_text = f" (idle: rank{'s' if len(idle) > 1 else ''} {ranks_text(idle)})" if idle else ""
    return (
        "step {step:>3}  {strategy:<10} {replicas}/{num_replicas} replicas{idle_text}  "
        "loss {loss:.4f}  norm {grad_norm:.3f}  {tokens:>6,} tokens  {tokens_per_s:>5,.0f}/s  "
        "predicted {predicted_ms:>5,.0f}, took {measured_ms:>5,.0f} ms  "
        "plan {plan_ms:.0f}, waited {plan_wait_ms:.0f} ms  bridge {mib:.1f} MiB"
    ).format(**fields, num_replicas=num_replicas, idle_text=idle_text, mib=fields["bridge_bytes"] / 2**20)
