"""Programs: a local graph as a Python generator that yields wherever ranks must talk.

A program's inputs are a dictionary by placeholder name; values are dropped at their last use, also from the caller's
dictionary where the placeholder is `saved` or `received`, so that peak memory is that of eager. `communicate(index,
value, may_overwrite)` is given by the runtime; it returns a generator whose result is the value under the target
annotation of `Program.reshards[index]`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hgraph.annotation import Annotation
from hgraph.graph import Shape, info
from hgraph.reshard_plan import ReshardPlan
from hgraph.shard_map import shard_map

__all__ = ["LocalReshard", "Program", "communicate", "compile_program", "local_length"]

CONSUMED_ROLES = ("saved", "received")


@dataclass(frozen=True, slots=True)
class LocalReshard:
    """A Reshard of a program. `plan` holds for every number of tokens; None where it must be made for each number."""

    source: Annotation
    target: Annotation
    shape: Shape
    dtype: torch.dtype
    plan: ReshardPlan | None
    label: str


@dataclass(frozen=True, slots=True)
class Program:
    """One compiled local graph. `graph` and `source` are for people; `run` is what executes."""

    graph: fx.Graph
    source: str
    run: Callable[..., Generator[Any, Any, dict[str, Tensor]]]
    reshards: tuple[LocalReshard, ...]


def communicate(value: Tensor | None, index: int, may_overwrite: bool) -> Tensor | None:
    """Stands in local graphs for Reshard number `index`; programs turn it into `yield from`.

    With `may_overwrite` nothing else uses the value's memory, so that an all-reduce may run in place.
    """
    raise AssertionError("communicate nodes are turned into `yield from`")


def local_length(annotation: str, shape: tuple[int, ...], dim: int, rank: int) -> int:
    """Returns the length of `dim` on `rank` for a concrete global shape."""
    return _local_shape(annotation, tuple(shape), rank)[dim]


@functools.lru_cache(maxsize=4096)
def _local_shape(annotation: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return shard_map(Annotation.parse(annotation), shape).local_shape(rank)


def compile_program(graph: fx.Graph, reshards: tuple[LocalReshard, ...]) -> Program:
    """Returns the program of a local graph."""
    constants: dict[str, Any] = {}
    # The unreachable yield makes a generator also of a program that never communicates.
    lines = ["def run(inputs, communicate):", "    if False:", "        yield"]
    last_use = _last_uses(graph)
    for node in graph.nodes:
        lines.append("    " + _statement(node, constants))
        dead = [used for used in last_use.get(node, ()) if used is not node]
        if node.op == "call_function" and not node.users:
            dead.append(node)
        if dead and node.op != "output":
            lines.append(f"    del {', '.join(used.name for used in dead)}")
    source = "\n".join(lines) + "\n"
    namespace: dict[str, Any] = dict(constants)
    exec(compile(source, "<hydraulis program>", "exec"), namespace)
    return Program(graph, source, namespace["run"], reshards)


def _last_uses(graph: fx.Graph) -> Mapping[fx.Node, list[fx.Node]]:
    seen: set[fx.Node] = set()
    result: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                result.setdefault(node, []).append(used)
    return result


def _statement(node: fx.Node, constants: dict[str, Any]) -> str:
    if node.op == "placeholder":
        take = "inputs.pop" if info(node).role in CONSUMED_ROLES else "inputs.__getitem__"
        return f"{node.name} = {take}({str(node.target)!r})"
    if node.op == "output":
        return f"return {_text(node.args[0], constants)}"
    if node.target is communicate:
        value, index, may_overwrite = node.args
        return f"{node.name} = yield from communicate({index}, {_text(value, constants)}, {may_overwrite})"
    if node.target is operator.getitem:
        return f"{node.name} = {_text(node.args[0], constants)}[{node.args[1]}]"
    arguments = [_text(argument, constants) for argument in node.args]
    arguments += [f"{name}={_text(value, constants)}" for name, value in node.kwargs.items()]
    return f"{node.name} = {_constant(node.target, constants)}({', '.join(arguments)})"


def _text(argument: Any, constants: dict[str, Any]) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{key!r}: {_text(value, constants)}" for key, value in argument.items()) + "}"
    if isinstance(argument, list | tuple):
        inner = ", ".join(_text(item, constants) for item in argument)
        return f"[{inner}]" if isinstance(argument, list) else f"({inner},)" if argument else "()"
    if argument is None or isinstance(argument, bool | int | str):
        return repr(argument)
    if isinstance(argument, float) and argument == argument and abs(argument) != float("inf"):
        return repr(argument)
    return _constant(argument, constants)


def _constant(value: Any, constants: dict[str, Any]) -> str:
    is_operator = isinstance(value, torch._ops.OpOverload)
    base = str(value).replace("::", "_") if is_operator else getattr(value, "__name__", "c")
    base = "".join(char if char.isalnum() else "_" for char in base).strip("_") or "c"
    base = f"run_{base}"  # nodes never begin so
    name, number = base, 0
    while name in constants and constants[name] is not value:
        number += 1
        name = f"{base}_{number}"
    constants[name] = value
    return name
