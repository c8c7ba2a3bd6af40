"""Sample calls of every operator of the rule table, for the ground-truth tests.

An `Input` stands for a tensor argument. Its shape, and size lists among the other arguments, may hold `TOKENS` and
`BOUNDARIES`. Dims that do not correspond have different sizes, so that equal sizes mean the same letter.
Values are multiples of 1/32: terms of partial sums add up exactly, also in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import hgraph.packed_attention  # noqa: F401  (defines the operators)
from hgraph.graph import BOUNDARIES, TOKENS, Shape, Size

__all__ = ["SAMPLES", "Input", "Sample", "inputs_of"]

aten = torch.ops.aten
hydraulis = torch.ops.hydraulis
Maker = Callable[[tuple[int, ...], torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor argument: its global shape, and how values are drawn."""

    shape: Shape
    make: Maker


@dataclass(frozen=True, slots=True)
class Sample:
    """One call. `values_are_defined` is False for operators whose values are not (empty_like).

    `tokens` are the values of `TOKENS` to run at.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    values_are_defined: bool = True
    label: str = ""
    tokens: tuple[int, ...] = (3, 9)

    @property
    def is_symbolic(self) -> bool:
        return any(not isinstance(size, int) for given in inputs_of(self) for size in given.shape)

    def __str__(self) -> str:
        shapes = "_".join("x".join(map(str, given.shape)) or "scalar" for given in inputs_of(self))
        return f"{self.target}-{shapes}{self.label and '-' + self.label}"


def inputs_of(sample: Sample) -> list[Input]:
    """Returns the tensor arguments, in order."""
    return list(_flat(sample.args))


def _flat(value: Any) -> Iterator[Input]:
    if isinstance(value, Input):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)


def _floats(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-64, 65, shape, generator=generator).double() / 32


def _positive(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(8, 129, shape, generator=generator).double() / 32


def X(*shape: Size) -> Input:
    return Input(shape, _floats)


def XP(*shape: Size) -> Input:
    """Positive values."""
    return Input(shape, _positive)


def XF(*shape: Size) -> Input:
    """In float32."""
    return Input(shape, lambda lengths, generator: _floats(lengths, generator).float())


def XB(*shape: Size) -> Input:
    """Booleans."""
    return Input(shape, lambda lengths, generator: torch.randint(0, 2, lengths, generator=generator).bool())


def XI(below: int, *shape: Size) -> Input:
    """Whole numbers from 0."""
    return Input(shape, lambda lengths, generator: torch.randint(0, below, lengths, generator=generator))


def _labels(below: int, ignored: int, *shape: Size) -> Input:
    def make(lengths: tuple[int, ...], generator: torch.Generator) -> Tensor:
        labels = torch.randint(0, below, lengths, generator=generator)
        return labels.masked_fill(torch.rand(lengths, generator=generator) < 0.3, ignored)

    return Input(shape, make)


def _bounds() -> Input:
    """Borders of documents; the last ends before the tokens do."""

    def make(lengths: tuple[int, ...], generator: torch.Generator) -> Tensor:
        (count,) = lengths
        return (torch.linspace(0, 8, count)).to(torch.int32)

    return Input((BOUNDARIES,), make)


def _fixed_bounds(*bounds: int) -> Input:
    return Input((len(bounds),), lambda lengths, generator: torch.tensor(bounds, dtype=torch.int32))


T = TOKENS


def _elementwise() -> list[Sample]:
    unary = [
        aten.cos.default,
        aten.sin.default,
        aten.exp.default,
        aten.abs.default,
        aten.sigmoid.default,
        aten.tanh.default,
        aten.silu.default,
        aten.gelu.default,
        aten.relu.default,
        aten.neg.default,
        aten.clone.default,
    ]
    positive = [aten.log.default, aten.rsqrt.default, aten.sqrt.default, aten.reciprocal.default]
    scalar = [
        aten.add.Scalar,
        aten.sub.Scalar,
        aten.rsub.Scalar,
        aten.mul.Scalar,
        aten.div.Scalar,
        aten.eq.Scalar,
        aten.ne.Scalar,
        aten.ge.Scalar,
        aten.gt.Scalar,
        aten.le.Scalar,
        aten.lt.Scalar,
        aten.pow.Tensor_Scalar,
    ]
    binary = [
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.maximum.default,
        aten.minimum.default,
        aten.eq.Tensor,
        aten.ne.Tensor,
        aten.sigmoid_backward.default,
        aten.tanh_backward.default,
        aten.silu_backward.default,
        aten.gelu_backward.default,
    ]
    return [
        *(Sample(op, (X(5, 6),)) for op in unary),
        *(Sample(op, (XP(5, 6),)) for op in positive),
        *(Sample(op, (X(5, 6), 2.0)) for op in scalar),
        *(Sample(op, (X(5, 6), X(5, 6))) for op in binary),
        Sample(aten.exp.default, (X(T, 6),)),
        Sample(aten.neg.default, (X(1, T, 6),)),
        Sample(aten.neg.default, (X(),)),
        Sample(aten.pow.Tensor_Scalar, (X(5, 6), 1)),
        Sample(aten.pow.Scalar, (2.0, X(5, 6))),
        Sample(aten.pow.Tensor_Tensor, (XP(5, 6), X(5, 6))),
        Sample(aten.mul.Tensor, (X(5, 6), 0.5)),
        Sample(aten.div.Tensor, (X(5, 6), 0.5)),
        Sample(aten.div.Tensor, (X(5, 6), XP(5, 6))),
        Sample(aten.div.Tensor, (X(5, 6), XP(5, 1))),
        Sample(aten.mul.Tensor, (X(T, 6), X(6))),
        Sample(aten.mul.Tensor, (X(1, T, 6), X(1, 1, 6))),
        Sample(aten.add.Tensor, (X(T, 6), X(6))),
        Sample(aten.add.Tensor, (X(T, 6), X(T, 6))),
        Sample(aten.add.Tensor, (X(5, 6), 0.5)),
        Sample(aten.add.Tensor, (X(5, 6), X(5, 6)), {"alpha": 2}),
        Sample(aten.sub.Tensor, (X(T, 6), X(T, 1))),
        Sample(aten.add.Tensor, (X(5, 6), X())),
        Sample(aten.threshold_backward.default, (X(5, 6), X(5, 6), 0)),
        Sample(aten.where.self, (XB(5, 6), X(5, 6), X(5, 6))),
        Sample(aten.where.self, (XB(T, 1), X(T, 6), X())),
        Sample(aten.logical_and.default, (XB(5, 6), XB(5, 6))),
        Sample(aten.logical_not.default, (XB(5, 6),)),
        Sample(aten.masked_fill.Scalar, (X(5, 6), XB(5, 6), 3.0)),
        Sample(aten.masked_fill.Scalar, (X(5, 6), XB(5, 1), 3.0)),
        Sample(aten._to_copy.default, (XF(5, 6),), {"dtype": torch.float64}, label="widening"),
        Sample(aten._to_copy.default, (X(5, 6),), {"dtype": torch.float32}, label="narrowing"),
        Sample(aten._to_copy.default, (XI(9, T),), {"dtype": torch.float64}, label="whole"),
    ]


def _creation() -> list[Sample]:
    return [
        Sample(aten.arange.default, (6,)),
        Sample(aten.arange.start, (2, 8)),
        Sample(aten.arange.start_step, (0, 12, 2)),
        Sample(aten.full.default, ([5, 6], 1.5), {"dtype": torch.float64}),
        Sample(aten.zeros.default, ([5, 6],), {"dtype": torch.float64}),
        Sample(aten.ones.default, ([5, 6],), {"dtype": torch.float64}),
        Sample(aten.scalar_tensor.default, (2.0,), {"dtype": torch.float64}),
        Sample(aten.full_like.default, (X(5, 6), 1.5)),
        Sample(aten.zeros_like.default, (X(5, 6),)),
        Sample(aten.ones_like.default, (X(T, 6),)),
        Sample(aten.empty_like.default, (X(5, 6),), values_are_defined=False),
    ]


def _views() -> list[Sample]:
    reshape = aten.reshape.default
    return [
        Sample(reshape, (X(5, 24), [5, 6, 4]), label="split"),
        Sample(reshape, (X(5, 6, 4), [5, 24]), label="join"),
        Sample(reshape, (X(T, 24), [1, T, 6, 4]), label="split"),
        Sample(reshape, (X(1, T, 6, 4), [T, 24]), label="join"),
        Sample(reshape, (X(4, 6), [8, 3]), label="regroup"),
        Sample(reshape, (X(4, 9), [6, 6]), label="apart"),
        Sample(reshape, (X(5, 4, 9), [5, 6, 6]), label="half_apart"),
        Sample(reshape, (X(6, 1, 4), [6, 4, 1]), label="ones"),
        Sample(reshape, (X(T, 4), [T * 4]), label="tokens_joined"),
        Sample(reshape, (X(1, 1), []), label="to_scalar"),
        Sample(reshape, (X(), [1]), label="of_scalar"),
        Sample(aten.t.default, (X(5, 6),)),
        Sample(aten.t.default, (X(5),)),
        Sample(aten.transpose.int, (X(4, 5, 6), 1, -1)),
        Sample(aten.transpose.int, (X(1, T, 6, 4), 1, 2)),
        Sample(aten.permute.default, (X(4, 5, 6), [2, 0, -2])),
        Sample(aten.unsqueeze.default, (X(5, 6), 1)),
        Sample(aten.unsqueeze.default, (X(T, 6), -1)),
        Sample(aten.squeeze.dim, (X(5, 1, 6), 1)),
        Sample(aten.squeeze.dim, (X(5, 6), 1), label="of_more_than_one"),
        Sample(aten.squeeze.dims, (X(1, 5, 1, 6), [0, -2])),
        Sample(aten.squeeze.default, (X(1, 5, 1, 6),)),
        Sample(aten.expand.default, (X(1, 6), [5, 6])),
        Sample(aten.expand.default, (X(6), [5, -1])),
        Sample(aten.expand.default, (X(T, 1, 4), [T, 6, 4])),
        Sample(aten.expand.default, (X(), [5, 6])),
        Sample(aten.slice.Tensor, (X(5, 6), 1, 1, 4)),
        Sample(aten.slice.Tensor, (X(T, 6), -1, 3, 9223372036854775807)),
        Sample(aten.slice_backward.default, (X(5, 3), [5, 6], 1, 1, 4, 1)),
        Sample(aten.slice_backward.default, (X(T, 3), [T, 6], 1, 3, 9223372036854775807, 1)),
        Sample(aten.select.int, (X(4, 5, 6), 1, 2)),
        Sample(aten.select.int, (X(4, 5, 6), -1, -1)),
        Sample(aten.select_backward.default, (X(4, 6), [4, 5, 6], 1, 2)),
        Sample(aten.cat.default, ([X(5, 6), X(5, 4)], 1)),
        Sample(aten.cat.default, ([X(T, 6), X(T, 6)], -1)),
        Sample(aten.cat.default, ([X(4, 6), X(5, 6), X(3, 6)],)),
    ]


def _contractions() -> list[Sample]:
    return [
        Sample(aten.mm.default, (X(5, 6), X(6, 8))),
        Sample(aten.mm.default, (X(T, 6), X(6, 8))),
        Sample(aten.mm.default, (X(6, T), X(T, 8))),
        Sample(aten.mm.default, (X(1, 6), X(6, 8))),
        Sample(aten.bmm.default, (X(3, 5, 6), X(3, 6, 4))),
        Sample(aten.sum.dim_IntList, (X(4, 5, 6), [1])),
        Sample(aten.sum.dim_IntList, (X(4, 5, 6), [-1, 0], True)),
        Sample(aten.sum.dim_IntList, (X(T, 6), [0], True)),
        Sample(aten.sum.dim_IntList, (X(1, T, 6), [0, 1])),
        Sample(aten.sum.default, (X(5, 6),)),
        Sample(aten.sum.default, (X(T),)),
        Sample(aten.amax.default, (X(5, 6), [-1], True)),
        Sample(aten.amax.default, (X(T, 6), [1])),
        Sample(aten._log_softmax.default, (X(5, 6), 1, False)),
        Sample(aten._log_softmax.default, (X(T, 6), -1, False)),
        Sample(aten._log_softmax_backward_data.default, (X(5, 6), X(5, 6), -1, torch.float64)),
        *_embeddings(),
        *_cross_entropy(),
        *_layer_norms(),
    ]


def _embeddings() -> list[Sample]:
    return [
        Sample(aten.embedding.default, (X(11, 6), XI(11, 5))),
        Sample(aten.embedding.default, (X(11, 6), XI(11, 1, T)), label="row"),
        Sample(aten.embedding.default, (X(11, 6), XI(11, 1, T), 3), label="padding"),
        Sample(aten.embedding_dense_backward.default, (X(5, 6), XI(11, 5), 11, -1, False)),
        Sample(aten.embedding_dense_backward.default, (X(1, T, 6), XI(11, 1, T), 11, -1, False), label="row"),
        Sample(aten.embedding_dense_backward.default, (X(40, 6), XI(11, 40), 11, 3, False), label="padding"),
    ]


def _cross_entropy() -> list[Sample]:
    forward, backward = aten.nll_loss_forward.default, aten.nll_loss_backward.default
    samples = []
    for ignored in (-100, 3):
        name = f"ignore_{ignored}"
        for rows in (5, T):
            inputs = (X(rows, 8), _labels(8, ignored, rows))
            samples += [
                Sample(forward, (*inputs, None, 2, ignored), label=f"sum-{name}"),
                Sample(forward, (*inputs, None, 0, ignored), label=f"none-{name}"),
                Sample(backward, (X(), *inputs, None, 2, ignored, X()), label=f"sum-{name}"),
                Sample(backward, (X(rows), *inputs, None, 0, ignored, X()), label=f"none-{name}"),
            ]
    return samples


def _layer_norms() -> list[Sample]:
    forward, backward = aten.native_layer_norm.default, aten.native_layer_norm_backward.default
    row = (X(5, 6), X(5, 6), [6], X(5, 1), XP(5, 1))
    return [
        Sample(forward, (X(5, 6), [6], X(6), X(6), 1e-5)),
        Sample(forward, (X(1, T, 6), [6], X(6), X(6), 1e-5)),
        Sample(forward, (X(1, T, 6), [6], X(6), None, 1e-5), label="no_bias"),
        Sample(forward, (X(5, 6, 4), [6, 4], None, None, 1e-5), label="plain"),
        Sample(backward, (*row, X(6), X(6), [True, True, True])),
        Sample(backward, (*row, X(6), None, [True, True, False]), label="no_bias"),
        Sample(backward, (*row, None, None, [True, False, False]), label="plain"),
    ]


def _attention() -> list[Sample]:
    """Heads: grouped, one key head for all, as many keys as queries; tokens symbolic and fixed."""
    samples = []
    bounds = _fixed_bounds(0, 3, 3, 7, 9)
    for queries, keys in ((6, 3), (4, 4), (4, 1), (12, 3)):
        for rows, borders in ((11, bounds), (T, _bounds())):
            if rows == T and (queries, keys) != (6, 3):
                continue
            inputs = (X(rows, queries, 8), X(rows, keys, 8), X(rows, keys, 8), borders)
            constants = (0.3, 0, 0, queries // keys)
            out, lse = X(rows, queries, 8), X(rows, queries)
            samples += [
                Sample(hydraulis.packed_attention.default, (*inputs, *constants), tokens=(9, 13)),
                Sample(
                    hydraulis.packed_attention_backward.default,
                    (out, *inputs[:3], out, lse, borders, *constants),
                    tokens=(9, 13),
                ),
            ]
    return samples


SAMPLES: Sequence[Sample] = (*_elementwise(), *_creation(), *_views(), *_contractions(), *_attention())
