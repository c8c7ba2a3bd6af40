"""Models by configuration: the Llama-style decoder that comes along, or what the user's own function makes."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hgraph.capture import LossFunction
from hgraph.data.losses import causal_lm_loss
from hgraph.data.packed import Packed
from hgraph.errors import InvalidInput
from runtime.config import ModelConfig
from runtime.models.llama import Llama

__all__ = ["build_model", "llama_loss", "loss_of"]


def build_model(config: ModelConfig) -> nn.Module:
    """Returns the model that `config` says; `factory` is looked up from the current folder, then where Python looks."""
    if config.factory is None:
        return Llama(config.llama())
    module_name, _, function = config.factory.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make: Any = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"model.factory: cannot find {config.factory}: {error}") from error
    model = make(**config.arguments)
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            f"model.factory: expected {config.factory} to return an nn.Module, got {type(model).__name__}"
        )
    return model


def llama_loss(model: nn.Module, packed: Packed) -> Tensor:
    """Returns the cross entropy of `Llama`, summed over labelled tokens."""
    logits_TV = model(packed.tokens[None], packed.positions[None])[0]
    return F.cross_entropy(logits_TV, packed.labels, reduction="sum")


def _own_loss(model: nn.Module, packed: Packed) -> Tensor:
    own: Any = model
    return own.packed_loss(packed)


def loss_of(model: nn.Module) -> LossFunction:
    """Returns the loss that suits a model: its own `packed_loss` method, Hugging Face's call, or `Llama`'s."""
    if callable(getattr(model, "packed_loss", None)):
        return _own_loss
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        return causal_lm_loss()
    return llama_loss
