"""Pipeline actions and schedules as values: what each stage does, in order.

An action is a computation (`F` forward, `B` backward) of one micro-batch on one stage, or one of its messages:
`SF`/`RF` send and receive forward activations, `SB`/`RB` backward gradients. Text form, which parses back: `0F3`
(stage 0, micro-batch 3), `0SF3>1` (to stage 1), `1RF3<0` (from stage 0). A message without peer is read as one between
neighbours.

A schedule has one list of actions per stage; every rank of a stage runs the same list. Text form, which parses back:

    1f1b stages=2 micro_batches=1
    0: 0F0 0SF0>1 0RB0<1 0B0
    1: 1RF0<0 1F0 1B0 1SB0>0

Invariants
----------
- Stage and micro-batch are not negative; messages have a peer, which is another stage; computations have none.
- Forward activations go to a later stage, gradients to an earlier one.
- A schedule has one list per stage, at least one stage; the actions of list s are of stage s; their micro-batches and
  peers are in range.
- `Action.parse(str(a)) == a`, `Schedule.parse(str(s)) == s`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from hgraph.errors import InvalidInput

__all__ = ["Action", "Edge", "Kind", "Schedule", "forward_edges"]

Kind: TypeAlias = Literal["F", "B", "SF", "RF", "SB", "RB"]
Edge: TypeAlias = tuple[int, int]

_ACTION = re.compile(r"(\d+)(F|B|SF|RF|SB|RB)(\d+)(?:([<>])(\d+))?")
_HEADER = re.compile(r"(\S+) stages=(\d+) micro_batches=(\d+)")
_NEIGHBOUR = {"SF": 1, "RF": -1, "SB": -1, "RB": 1}


@dataclass(frozen=True, slots=True)
class Action:
    """One computation or message of one micro-batch on one stage; `peer` is the other stage of a message."""

    kind: Kind
    stage: int
    micro_batch: int
    peer: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise InvalidInput(f"action: expected a kind among {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.stage < 0 or self.micro_batch < 0:
            raise InvalidInput(
                f"action: expected stage and micro-batch of 0 or more, got {self.stage} and {self.micro_batch}"
            )
        if self.is_compute and self.peer is not None:
            raise InvalidInput(f"action {self.stage}{self.kind}{self.micro_batch}: a computation has no peer")
        if not self.is_compute:
            self._check_peer()

    def _check_peer(self) -> None:
        later = _NEIGHBOUR[self.kind] > 0
        peer = self.peer
        if peer is None or peer < 0 or (peer <= self.stage if later else peer >= self.stage):
            raise InvalidInput(
                f"action {self.stage}{self.kind}{self.micro_batch}: expected a peer stage "
                f"{'after' if later else 'before'} stage {self.stage}, got {peer}"
            )

    @property
    def is_compute(self) -> bool:
        return self.kind in ("F", "B")

    @property
    def is_send(self) -> bool:
        return self.kind in ("SF", "SB")

    @property
    def is_receive(self) -> bool:
        return self.kind in ("RF", "RB")

    @property
    def other_end(self) -> Action:
        """The receive that belongs to a send, and the other way round."""
        assert self.peer is not None, f"{self} is no message"
        kind = cast(Kind, ("R" if self.is_send else "S") + self.kind[1])
        return Action(kind, self.peer, self.micro_batch, self.stage)

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.micro_batch}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.is_send else '<'}{self.peer}"

    @staticmethod
    def parse(text: str) -> Action:
        """Returns the action that `str` writes as `text`; a message without peer is between neighbours."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise InvalidInput(f"action: expected stage, kind, micro-batch, as in 0F3 or 0SF3>1, got {text!r}")
        stage, kind, arrow = int(match[1]), cast(Kind, match[2]), match[4]
        if arrow is not None and arrow != {"S": ">", "R": "<"}.get(kind[0]):
            raise InvalidInput(f"action {text.strip()}: expected > after a send and < after a receive")
        peer = int(match[5]) if arrow else None
        if peer is None and kind in _NEIGHBOUR:
            peer = stage + _NEIGHBOUR[kind]
        return Action(kind, stage, int(match[3]), peer)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each stage does, in order: `stages[s]` are the actions of stage s. See the module's text."""

    name: str
    num_stages: int
    num_micro_batches: int
    stages: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(tuple(actions) for actions in self.stages))
        if not self.name or any(character.isspace() for character in self.name):
            raise InvalidInput(f"schedule: expected a name without spaces, got {self.name!r}")
        if self.num_stages < 1 or self.num_micro_batches < 0:
            raise InvalidInput(
                f"schedule {self.name}: expected at least 1 stage and 0 micro-batches, "
                f"got {self.num_stages} and {self.num_micro_batches}"
            )
        if len(self.stages) != self.num_stages:
            raise InvalidInput(
                f"schedule {self.name}: expected one list of actions for each of {self.num_stages} stages, "
                f"got {len(self.stages)}"
            )
        for stage, actions in enumerate(self.stages):
            for action in actions:
                self._check_action(stage, action)

    def _check_action(self, stage: int, action: Action) -> None:
        if action.stage != stage:
            raise InvalidInput(f"schedule {self.name}: action {action} is in the list of stage {stage}")
        if action.micro_batch >= self.num_micro_batches:
            raise InvalidInput(
                f"schedule {self.name}: action {action}: expected a micro-batch below {self.num_micro_batches}"
            )
        if action.peer is not None and action.peer >= self.num_stages:
            raise InvalidInput(f"schedule {self.name}: action {action}: expected a peer below {self.num_stages}")

    @property
    def has_messages(self) -> bool:
        """Whether any action is a send or a receive, as after `lower`."""
        return any(not action.is_compute for actions in self.stages for action in actions)

    def __str__(self) -> str:
        lines = [f"{self.name} stages={self.num_stages} micro_batches={self.num_micro_batches}"]
        lines += [" ".join([f"{stage}:", *map(str, actions)]) for stage, actions in enumerate(self.stages)]
        return "\n".join(lines)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Returns the schedule that `str` writes as `text`."""
        header, *lines = text.strip().splitlines() or [""]
        match = _HEADER.fullmatch(header.strip())
        if match is None:
            raise InvalidInput(f"schedule: expected a first line like '1f1b stages=2 micro_batches=4', got {header!r}")
        stages = []
        for stage, line in enumerate(lines):
            label, _, actions = line.strip().partition(":")
            if label != str(stage):
                raise InvalidInput(f"schedule {match[1]}: expected a line that starts with '{stage}:', got {line!r}")
            stages.append(tuple(map(Action.parse, actions.split())))
        return Schedule(match[1], int(match[2]), int(match[3]), tuple(stages))


def forward_edges(edges: Iterable[Edge] | None, num_stages: int) -> tuple[Edge, ...]:
    """Returns the forward edges (from, to) sorted, each once; None means a plain pipeline, each stage to the next."""
    if edges is None:
        return tuple((stage, stage + 1) for stage in range(num_stages - 1))
    result = tuple(sorted(set(edges)))
    for source, target in result:
        if not 0 <= source < target < num_stages:
            raise InvalidInput(
                f"edges: expected pairs (from, to) with 0 <= from < to < {num_stages}, got ({source}, {target})"
            )
    return result
