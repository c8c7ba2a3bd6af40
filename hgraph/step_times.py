"""Time of a whole step: bridges in, the schedule of every replica with its messages, bridges out.

A step begins with the bridge that brings parameters from the optimizer layout and ends with the one that takes
gradients back. Both are cut into `NUM_BUCKETS` buckets of equal time, in the order of the layers: bucket k is the k-th
part of the model. A stage's first forward pass is cut alike, and each cut waits for its bucket; its last backward pass
gives the buckets back, last layers first, and a bucket of gradients leaves when every replica has given its own. So
bridges hide behind computation as far as order allows. What communication costs the computation beside it is not in it.

`step_ms` is a recurrence; `hgraph/step_graph.py` keeps every task of the same step. A test holds them to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hgraph.errors import InvalidInput
from hgraph.simulate import FORWARD_SHARE

__all__ = ["NUM_BUCKETS", "Bridging", "Overlap", "ReplicaWork", "flow_ms", "stage_buckets", "step_ms"]

NUM_BUCKETS = 24
"""Divides by 1, 2, 3, 4, 6, 8, 12 stages."""

Overlap: TypeAlias = Literal["overlapped", "serial"]


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """What one replica runs in a step, on equal stages.

    `micro_batch_ms[m]` is the time of micro-batch m in one stage, forward and backward together, in running order;
    `transfer_ms[s][m]` the time of its message from stage s to the next (and of the gradient back), none where empty.
    """

    schedule: str
    num_stages: int
    micro_batch_ms: tuple[float, ...]
    transfer_ms: tuple[tuple[float, ...], ...] = ()
    forward_share: float = FORWARD_SHARE

    def __post_init__(self) -> None:
        if not 1 <= self.num_stages <= NUM_BUCKETS or self.schedule not in ("gpipe", "1f1b"):
            raise InvalidInput(
                f"replica work: expected 1 to {NUM_BUCKETS} stages and schedule 'gpipe' or '1f1b', got "
                f"{self.num_stages} and {self.schedule!r}"
            )
        sizes = {len(row) for row in self.transfer_ms}
        if self.transfer_ms and (len(self.transfer_ms) != self.num_stages - 1 or sizes - {len(self.micro_batch_ms)}):
            raise InvalidInput(
                f"replica work: expected transfer_ms of {self.num_stages - 1} rows of {len(self.micro_batch_ms)}, got "
                f"{len(self.transfer_ms)} rows of {sorted(sizes)}"
            )

    def message_ms(self, boundary: int, micro_batch: int) -> float:
        """Returns the time of a message between stage `boundary` and the next."""
        return self.transfer_ms[boundary][micro_batch] if self.transfer_ms else 0.0


@dataclass(frozen=True, slots=True)
class Bridging:
    """Times in ms of the bridges around a step, and whether they overlap with computation."""

    parameters_ms: float = 0.0
    gradients_ms: float = 0.0
    overlap: Overlap = "overlapped"

    @property
    def ms(self) -> float:
        return self.parameters_ms + self.gradients_ms


def flow_ms(work: ReplicaWork) -> float:
    """Returns sum t + (stages - 1) max t, without messages."""
    times_ms = work.micro_batch_ms
    return sum(times_ms) + (work.num_stages - 1) * max(times_ms) if times_ms else 0.0


def stage_buckets(stage: int, num_stages: int) -> range:
    """Returns the buckets of a stage, in the order of its layers; each of up to `NUM_BUCKETS` stages has some."""
    return range(-(-stage * NUM_BUCKETS // num_stages), -(-(stage + 1) * NUM_BUCKETS // num_stages))


def step_ms(replicas: Sequence[ReplicaWork], bridging: Bridging | None = None) -> float:
    """Returns the time in ms of a step of these replicas between its bridges; 0.0 for nothing at all."""
    bridging = bridging or Bridging()
    if bridging.overlap == "serial":
        return bridging.ms + max((_Pipeline(work, 0.0).run() for work in replicas), default=0.0)
    end_ms, ready_ms = bridging.parameters_ms, [0.0] * NUM_BUCKETS
    for work in replicas:
        pipeline = _Pipeline(work, bridging.parameters_ms)
        end_ms = max(end_ms, pipeline.run())
        ready_ms = [max(old, new) for old, new in zip(ready_ms, pipeline.gradients_ready_ms(), strict=True)]
    sent_ms = bridging.parameters_ms
    for bucket in reversed(range(NUM_BUCKETS)):
        sent_ms = max(sent_ms, ready_ms[bucket]) + bridging.gradients_ms / NUM_BUCKETS
    return max(end_ms, sent_ms)


class _Pipeline:
    """Runs the schedule of one replica; each computation is visited after what it waits for."""

    def __init__(self, work: ReplicaWork, parameters_ms: float) -> None:
        self.work = work
        self.bucket_ms = parameters_ms / NUM_BUCKETS
        self.forward_ms = [time * work.forward_share for time in work.micro_batch_ms]
        self.backward_ms = [time - forward for time, forward in zip(work.micro_batch_ms, self.forward_ms, strict=True)]
        self.free_ms = [0.0] * work.num_stages
        self.forward_end_ms = [[0.0] * len(self.forward_ms) for _ in range(work.num_stages)]
        self.backward_end_ms = [[0.0] * len(self.forward_ms) for _ in range(work.num_stages)]
        self.last_backward_ms = [0.0] * work.num_stages

    def run(self) -> float:
        """Returns when the last stage to end has ended."""
        for is_forward, stage, micro_batch in _visits(self.work):
            if is_forward:
                self._forward(stage, micro_batch)
            else:
                self._backward(stage, micro_batch)
        return max(self.free_ms)

    def _forward(self, stage: int, micro_batch: int) -> None:
        start_ms = self.free_ms[stage]
        if stage:
            arrival_ms = self.forward_end_ms[stage - 1][micro_batch] + self.work.message_ms(stage - 1, micro_batch)
            start_ms = max(start_ms, arrival_ms)
        end_ms = start_ms + self.forward_ms[micro_batch]
        if micro_batch == 0:
            # Cut as the buckets are, each cut waiting for its own; buckets arrive evenly, so first or last decides.
            own = stage_buckets(stage, self.work.num_stages)
            first_ms = (own[0] + 1) * self.bucket_ms + self.forward_ms[0]
            last_ms = (own[-1] + 1) * self.bucket_ms + self.forward_ms[0] / len(own)
            end_ms = max(end_ms, first_ms, last_ms)
        self.free_ms[stage] = self.forward_end_ms[stage][micro_batch] = end_ms

    def _backward(self, stage: int, micro_batch: int) -> None:
        start_ms = self.free_ms[stage]
        if stage + 1 < self.work.num_stages:
            arrival_ms = self.backward_end_ms[stage + 1][micro_batch] + self.work.message_ms(stage, micro_batch)
            start_ms = max(start_ms, arrival_ms)
        self.last_backward_ms[stage] = start_ms
        self.free_ms[stage] = self.backward_end_ms[stage][micro_batch] = start_ms + self.backward_ms[micro_batch]

    def gradients_ready_ms(self) -> list[float]:
        """Returns when each bucket of gradients is there: the last backward pass gives the last layers first."""
        ready_ms = [0.0] * NUM_BUCKETS
        if not self.backward_ms:
            return ready_ms
        for stage in range(self.work.num_stages):
            own = stage_buckets(stage, self.work.num_stages)
            for position, bucket in enumerate(reversed(own), start=1):
                ready_ms[bucket] = self.last_backward_ms[stage] + self.backward_ms[-1] * position / len(own)
        return ready_ms


def _visits(work: ReplicaWork) -> Iterator[tuple[bool, int, int]]:
    """Yields (is forward, stage, micro-batch) so that each comes after all that it waits for.

    In 1F1B, backward of micro-batch j comes on stage s right before forward of m = j + stages - s: going through m, and
    for each m through the stages in order, it has been seen on the next stage in the round before.
    """
    num_stages, num_micro_batches = work.num_stages, len(work.micro_batch_ms)
    if work.schedule == "gpipe":
        for micro_batch in range(num_micro_batches):
            yield from ((True, stage, micro_batch) for stage in range(num_stages))
        for micro_batch in range(num_micro_batches):
            yield from ((False, stage, micro_batch) for stage in reversed(range(num_stages)))
        return
    for m in range(num_micro_batches + num_stages):
        for stage in range(num_stages):
            if 0 <= m - num_stages + stage < num_micro_batches:
                yield False, stage, m - num_stages + stage
            if m < num_micro_batches:
                yield True, stage, m
