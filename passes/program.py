"""Programs: a local graph as a Python generator that yields wherever ranks must talk.

A program's inputs are a dictionary by placeholder name; values are dropped at their last use, also from the caller's
dictionary where the placeholder is `saved` or `received`, so that peak memory is that of eager. Two functions are
given by the runtime. `communicate(index, value, may_overwrite)` returns a generator whose result is the value under the
target annotation of `Program.reshards[index]`. `deliver(name, value)` returns a generator that takes the gradient of a
parameter as soon as it is computed, so that it need not be kept and may leave while the program goes on. The other
outputs are returned by key.
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
DELIVERED = "gradient:"
"""How the keys of outputs begin that are delivered where they are computed."""


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
    lines = ["def run(inputs, communicate, deliver):", "    if False:", "        yield"]
    delivered, returned = _outputs(graph)
    last_use = _last_uses(graph, returned)
    used_later = {used for own in last_use.values() for used in own}
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"    return {_text(returned, constants)}")
            continue
        lines.append("    " + _statement(node, constants))
        lines += [f"    yield from deliver({name!r}, {node.name})" for name in delivered.get(node, ())]
        dead = [used for used in last_use.get(node, ()) if used is not node]
        if node not in used_later and (node.op == "call_function" or node in delivered):
            dead.append(node)
        if dead:
            lines.append(f"    del {', '.join(used.name for used in dead)}")
    source = "\n".join(lines) + "\n"
    namespace: dict[str, Any] = dict(constants)
    exec(compile(source, "<hydraulis program>", "exec"), namespace)
    return Program(graph, source, namespace["run"], reshards)


def _outputs(graph: fx.Graph) -> tuple[dict[fx.Node, list[str]], dict[str, fx.Node]]:
    """Returns the names of parameters whose gradient a node is, and the outputs by key that are returned at the end."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    values = output.args[0]
    assert isinstance(values, dict)
    delivered: dict[fx.Node, list[str]] = {}
    for key, node in values.items():
        if key.startswith(DELIVERED):
            delivered.setdefault(node, []).append(key.removeprefix(DELIVERED))
    return delivered, {key: node for key, node in values.items() if not key.startswith(DELIVERED)}


def _last_uses(graph: fx.Graph, returned: Mapping[str, fx.Node]) -> Mapping[fx.Node, list[fx.Node]]:
    """Returns the nodes whose value each node is the last to use; of the outputs, those that are returned."""
    seen: set[fx.Node] = set()
    result: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes if node.op != "output" else returned.values():
            if used not in seen:
                seen.add(used)
                result.setdefault(node, []).append(used)
    return result


def _statement(node: fx.Node, constants: dict[str, Any]) -> str:
    if node.op == "placeholder":
        take = "inputs.pop" if info(node).role in CONSUMED_ROLES else "inputs.__getitem__"
        return f"{node.name} = {take}({str(node.target)!r})"
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
