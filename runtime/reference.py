"""The reference: the user's untouched module, run eagerly on one device, sequence by sequence, in float64.

It shares nothing with capture. Models that cast to float32 inside are kept in float64 by a dispatch mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hgraph.data.packed import Packed

__all__ = ["KeepFloat64", "reference_step"]

LossFunction = Callable[[nn.Module, Packed], Tensor]


class KeepFloat64(TorchDispatchMode):
    """Turns every float32 that an operator asks for into float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _raised(value) for name, value in (kwargs or {}).items()}
        return func(*(_raised(argument) for argument in args), **kwargs)


def _raised(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def _in_float64(model: nn.Module) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with KeepFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


def reference_step(
    model: nn.Module, loss: LossFunction, sequences: Sequence[Packed], denominator: float
) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss sum over `denominator`, and the gradients of the parameters that get one, by first name.

    A parameter that is not trained, or that the loss does not depend on, has none (autograd leaves `.grad` None).
    `model` is in float64. Each of `sequences` holds one sequence. With a denominator of 0 both are zero.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients: dict[str, Tensor] = {}
    total = 0.0
    for packed in sequences:
        with _in_float64(model):
            value = loss(model, packed)
            scaled = value / denominator if denominator else value * 0.0
            found = torch.autograd.grad(scaled, list(trained.values()), allow_unused=True)
        total += scaled.item()
        for name, gradient in zip(trained, found, strict=True):
            if gradient is not None:
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return total, gradients
