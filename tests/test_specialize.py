"""Memory that a Reshard may overwrite: only what nothing else sees."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from hgraph.graph import reshard
from passes.specialize import _owns_memory

aten = torch.ops.aten


def _memory_graph(*views: tuple[Any, ...], extra: str = "") -> tuple[fx.Node, fx.Node]:
    """A product seen through views by a last node, which is returned with what it uses.

    `extra` gives the "product" or the "view" a second user.
    """
    graph = fx.Graph()
    value = product = graph.call_function(aten.mul.Tensor, (graph.placeholder("x"), 2.0))
    for target, *arguments in views:
        value = graph.call_function(target, (value, *arguments))
    user = graph.call_function(aten.relu.default, (value,))
    if extra:
        graph.call_function(aten.neg.default, (product if extra == "product" else value,))
    return value, user


VIEWS = ((aten.reshape.default, [4, 6]), (aten.transpose.int, 0, 1), (aten.unsqueeze.default, 0))


@pytest.mark.parametrize(
    ("views", "extra", "owned"),
    [
        ((), "", True),
        ((), "product", False),
        (VIEWS, "", True),
        (VIEWS, "product", False),
        (VIEWS, "view", False),
        (((operator.getitem, 0),), "", True),
        (((aten.expand.default, [4, 6]),), "", False),
        (((aten.expand.default, [4, 6]), *VIEWS), "", False),
        (((reshard, "0[]", "0[]"),), "", False),
        (((reshard, "0[]", "0[]"), *VIEWS), "", False),
    ],
)
def test_only_memory_that_nothing_else_sees_may_be_overwritten(views: Any, extra: str, owned: bool) -> None:
    assert _owns_memory(*_memory_graph(*views, extra=extra)) is owned


@pytest.mark.parametrize("views", [(), VIEWS[:1]])
def test_an_input_is_never_overwritten(views: Any) -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for target, *arguments in views:
        value = graph.call_function(target, (value, *arguments))
    assert not _owns_memory(value, graph.call_function(aten.relu.default, (value,)))
