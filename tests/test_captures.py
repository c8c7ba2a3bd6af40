"""Which models share a capture in tests: only those that cannot be told apart by anything but values of parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.captures import signature
from tests.models import gpt, hugging_face_loss, language_loss, llama

SIZES = {"layers": 1, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 8, "vocab_size": 11}


def small() -> nn.Module:
    return llama(**SIZES)


def _buffer(model: nn.Module) -> None:
    next(module for module in model.modules() if module._buffers or isinstance(module, nn.Linear)).register_buffer(
        "extra", torch.ones(2)
    )


def _tie(model: nn.Module) -> None:
    first, second = (
        module for module in model.modules() if tuple(getattr(module, "weight", torch.ones(0)).shape) == (11, 8)
    )
    first.weight = second.weight


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "frozen": lambda model: next(model.parameters()).requires_grad_(False),
    "dtype": lambda model: model.float(),
    "device": lambda model: model.to("meta"),
    "evaluation": lambda model: model.eval(),
    "an attribute": lambda model: setattr(model, "scale", 2.0),
    "an attribute below": lambda model: [setattr(module, "eps", 0.5) for module in model.modules()],
    "a module more": lambda model: model.add_module("more", nn.Identity()),
    "a buffer": _buffer,
    "a tie": _tie,
}


def test_the_same_model_made_twice_with_other_weights_shares() -> None:
    assert signature(llama(0, **SIZES), language_loss) == signature(llama(1, **SIZES), language_loss) is not None
    assert signature(gpt(), language_loss) == signature(gpt(), language_loss) is not None


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_can_be_told_apart_does_not(change: str) -> None:
    model = small()
    CHANGES[change](model)
    assert signature(model, language_loss) not in (None, signature(small(), language_loss))


def test_values_of_buffers_count() -> None:
    models = [small(), small()]
    for value, model in enumerate(models):
        model.register_buffer("extra", torch.full((2,), float(value)))
    assert signature(models[0], language_loss) != signature(models[1], language_loss)


def test_another_loss_does_not_share() -> None:
    assert signature(small(), language_loss) != signature(small(), hugging_face_loss)


def test_what_cannot_be_told_is_not_shared() -> None:
    hooked, strange, numbers, count = small(), small(), small(), 2
    hooked.register_forward_hook(lambda *_: None)
    strange.helper = object()
    numbers.table = torch.ones(2)
    assert signature(hooked, language_loss) is None
    assert signature(strange, language_loss) is None
    assert signature(numbers, language_loss) is None
    assert signature(small(), lambda model, packed: language_loss(model, packed) * count) is None
