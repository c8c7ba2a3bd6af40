"""The table of sharding rules: operator -> rule. An operator that is not here is an error; there is no default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

import hgraph.packed_attention  # noqa: F401  (defines the operators)
from hgraph.errors import RuleError
from hgraph.graph import neighbourhood, where
from passes.rules import attention, contractions, elementwise, views
from passes.rules.sharding import OpSharding

__all__ = ["RULES", "Rule", "rule_of"]

aten = torch.ops.aten
Rule = Callable[[fx.Node], list[OpSharding]]

_TABLE: list[tuple[Rule, tuple[Any, ...]]] = [
    (
        elementwise.nonlinear,
        (
            aten.add.Scalar,
            aten.sub.Scalar,
            aten.rsub.Scalar,
            aten.pow.Scalar,
            aten.pow.Tensor_Tensor,
            aten.cos.default,
            aten.sin.default,
            aten.exp.default,
            aten.log.default,
            aten.rsqrt.default,
            aten.sqrt.default,
            aten.reciprocal.default,
            aten.abs.default,
            aten.sigmoid.default,
            aten.sigmoid_backward.default,
            aten.tanh.default,
            aten.tanh_backward.default,
            aten.silu.default,
            aten.silu_backward.default,
            aten.gelu.default,
            aten.gelu_backward.default,
            aten.relu.default,
            aten.threshold_backward.default,
            aten.where.self,
            aten.maximum.default,
            aten.minimum.default,
            aten.eq.Scalar,
            aten.ne.Scalar,
            aten.ge.Scalar,
            aten.gt.Scalar,
            aten.le.Scalar,
            aten.lt.Scalar,
            aten.eq.Tensor,
            aten.ne.Tensor,
            aten.logical_and.default,
            aten.logical_not.default,
            aten.masked_fill.Scalar,
        ),
    ),
    (
        elementwise.linear_in_first,
        (
            aten.neg.default,
            aten.mul.Scalar,
            aten.mul.Tensor,
            aten.div.Scalar,
            aten.div.Tensor,
            aten.clone.default,
        ),
    ),
    (elementwise.linear_jointly, (aten.add.Tensor, aten.sub.Tensor)),
    (elementwise.linear_power, (aten.pow.Tensor_Scalar,)),
    (elementwise.linear_cast, (aten._to_copy.default,)),
    (
        elementwise.creation,
        (
            aten.full.default,
            aten.zeros.default,
            aten.ones.default,
            aten.scalar_tensor.default,
            aten.full_like.default,
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.empty_like.default,
        ),
    ),
    (elementwise.sequence, (aten.arange.default, aten.arange.start, aten.arange.start_step)),
    (views.reshape, (aten.reshape.default,)),
    (views.transpose, (aten.t.default, aten.transpose.int)),
    (views.permute, (aten.permute.default,)),
    (views.unsqueeze, (aten.unsqueeze.default,)),
    (views.squeeze, (aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)),
    (views.expand, (aten.expand.default,)),
    (views.slice_dim, (aten.slice.Tensor, aten.slice_backward.default)),
    (views.select, (aten.select.int, aten.select_backward.default)),
    (views.cat, (aten.cat.default,)),
    (contractions.mm, (aten.mm.default,)),
    (contractions.bmm, (aten.bmm.default,)),
    (contractions.sum_dims, (aten.sum.dim_IntList, aten.sum.default)),
    (contractions.amax, (aten.amax.default,)),
    (contractions.log_softmax, (aten._log_softmax.default, aten._log_softmax_backward_data.default)),
    (contractions.embedding, (aten.embedding.default,)),
    (contractions.embedding_backward, (aten.embedding_dense_backward.default,)),
    (contractions.nll_loss, (aten.nll_loss_forward.default,)),
    (contractions.nll_loss_backward, (aten.nll_loss_backward.default,)),
    (contractions.layer_norm, (aten.native_layer_norm.default,)),
    (contractions.layer_norm_backward, (aten.native_layer_norm_backward.default,)),
    (attention.packed_attention, (torch.ops.hydraulis.packed_attention.default,)),
    (attention.packed_attention_backward, (torch.ops.hydraulis.packed_attention_backward.default,)),
]


def _collect() -> Mapping[Any, Rule]:
    rules: dict[Any, Rule] = {}
    for rule, operators in _TABLE:
        for operator in operators:
            assert operator not in rules, f"{operator} has two rules"
            rules[operator] = rule
    return MappingProxyType(rules)


RULES: Mapping[Any, Rule] = _collect()


def rule_of(node: fx.Node) -> list[OpSharding]:
    """Returns the alternatives of the rule of a node; `RuleError` names the operator, module and source line."""
    rule = RULES.get(node.target)
    if rule is None:
        raise RuleError(
            f"no sharding rule for {where(node)}. Express it by operators that have one (passes/rules/table.py lists "
            f"them), or add a rule there. Around it:\n{neighbourhood(node)}"
        )
    return rule(node)
