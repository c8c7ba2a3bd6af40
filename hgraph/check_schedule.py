"""Proves that a lowered schedule is complete and cannot hang, without knowing how it was made.

Properties
----------
- Every stage runs F and B of every micro-batch exactly once, B after F.
- Every forward edge carries each micro-batch's activation once and its gradient once: a send and the receive at the
  other end; nothing else is sent.
- A send comes after the computation that produces the value, a receive before the computation that needs it.
- The receives of a pair of stages come in the order of its sends.
- A dry run with sends that do not block and receives that do comes to its end.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from hgraph.action import Action, Edge, Schedule, forward_edges
from hgraph.errors import PlanError

__all__ = ["check_schedule"]

_ROWS_SHOWN = 12


def check_schedule(schedule: Schedule, edges: Iterable[Edge] | None = None) -> None:
    """Raises `PlanError`, naming the property, the action and what was expected, unless every property holds.

    `edges` are the forward edges (from, to) between stages; None means each stage to the next.
    """
    checked_edges = forward_edges(edges, schedule.num_stages)
    _check_computations(schedule)
    _check_messages(schedule, checked_edges)
    _check_positions(schedule)
    _check_order(schedule, checked_edges)
    _dry_run(schedule)


def _fail(schedule: Schedule, message: str) -> PlanError:
    return PlanError(f"schedule {schedule.name} ({schedule.num_stages} stages): {message}")


def _check_computations(schedule: Schedule) -> None:
    for stage, actions in enumerate(schedule.stages):
        positions = {action: index for index, action in enumerate(actions)}
        counts = Counter(action for action in actions if action.is_compute)
        for m in range(schedule.num_micro_batches):
            forward, backward = Action("F", stage, m), Action("B", stage, m)
            for action in (forward, backward):
                count = counts[action]
                if count != 1:
                    raise _fail(schedule, f"stage {stage}: expected {action} exactly once, got it {count} times")
            if positions[backward] < positions[forward]:
                raise _fail(schedule, f"stage {stage}: expected {backward} after {forward}, got it before")


def _check_messages(schedule: Schedule, edges: tuple[Edge, ...]) -> None:
    expected: set[Action] = set()
    for source, target in edges:
        for m in range(schedule.num_micro_batches):
            activation, gradient = Action("SF", source, m, target), Action("SB", target, m, source)
            expected |= {activation, activation.other_end, gradient, gradient.other_end}
    counts = Counter(action for actions in schedule.stages for action in actions if not action.is_compute)
    for action in sorted(expected | set(counts), key=lambda action: (action.stage, action.micro_batch, str(action))):
        wanted = int(action in expected)
        got = counts[action]
        if got == wanted:
            continue
        why = "add it with `lower`" if wanted else f"there is no such message along the edges {list(edges)}"
        if got and wanted:
            why = "a message is passed once"
        raise _fail(schedule, f"stage {action.stage}: expected {action} {wanted} times, got it {got} times; {why}")


def _check_positions(schedule: Schedule) -> None:
    for stage, actions in enumerate(schedule.stages):
        positions = {action: index for index, action in enumerate(actions)}
        for action, index in positions.items():
            if action.is_compute:
                continue
            computation = Action("F" if action.kind[1] == "F" else "B", stage, action.micro_batch)
            if action.is_send and index < positions[computation]:
                raise _fail(schedule, f"stage {stage}: expected {action} after {computation}, which produces the value")
            if action.is_receive and index > positions[computation]:
                raise _fail(schedule, f"stage {stage}: expected {action} before {computation}, which needs the value")


def _check_order(schedule: Schedule, edges: tuple[Edge, ...]) -> None:
    for source, target in (*edges, *((target, source) for source, target in edges)):
        sends = [action.other_end for action in schedule.stages[source] if action.is_send and action.peer == target]
        receives = [action for action in schedule.stages[target] if action.is_receive and action.peer == source]
        for sent, received in zip(sends, receives, strict=True):
            if sent == received:
                continue
            raise _fail(
                schedule,
                f"messages of stages {source} to {target} are received in another order than they are sent: "
                f"expected {sent}, got {received}",
            )


def _dry_run(schedule: Schedule) -> None:
    """Runs every stage one action a step, as far as messages have come."""
    waiting = [deque(actions) for actions in schedule.stages]
    arrived: set[Action] = set()
    rows: list[list[Action | None]] = []
    while any(waiting):
        ready = [bool(queue) and (not queue[0].is_receive or queue[0] in arrived) for queue in waiting]
        if not any(ready):
            stuck = [queue[0] if queue else None for queue in waiting]
            raise _fail(schedule, _deadlock_text(rows, stuck))
        rows.append([queue.popleft() if go else None for queue, go in zip(waiting, ready, strict=True)])
        arrived |= {action.other_end for action in rows[-1] if action is not None and action.is_send}


def _deadlock_text(rows: list[list[Action | None]], stuck: list[Action | None]) -> str:
    """Returns the grid of the dry run, a row per step and a column per stage, and what each stage waits for."""
    waits = [f"{action} waits for {action.other_end}" for action in stuck if action is not None]
    header = ["", *(f"stage {stage}" for stage in range(len(stuck)))]
    first = max(0, len(rows) - _ROWS_SHOWN)
    cells = [header]
    for step, row in enumerate(rows[first:], start=first):
        cells.append([f"step {step}", *("." if action is None else str(action) for action in row)])
    cells.append([f"step {len(rows)}", *("done" if action is None else f"--> {action}" for action in stuck)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([f"deadlock: {'; '.join(waits)}", *lines])
