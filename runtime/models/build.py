"""Models by configuration: the Llama-style decoder that comes along, or what the user's own function makes."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from hgraph.capture import LossFunction
from hgraph.data.losses import causal_lm_loss, token_loss
from hgraph.data.packed import Packed
from hgraph.errors import InvalidInput
from hgraph.installation import PACKAGES
from runtime.config import ModelConfig
from runtime.models.llama import Llama

__all__ = ["build_model", "llama_loss", "loss_of"]


def build_model(config: ModelConfig, *, on_meta: bool = False) -> nn.Module:
    """Returns the model that `config` says; `factory` is looked up where Python looks, and in the current folder.

    With `on_meta` the Llama that comes along has shapes and no weights; a factory decides for itself. Raises
    `InvalidInput` where there is no such function, where it fails, or where it returns something else than a module.
    """
    if config.factory is not None:
        return _from_factory(config.factory, config.arguments)
    with torch.device("meta" if on_meta else "cpu"):
        return Llama(config.llama())


def llama_loss(model: nn.Module, packed: Packed) -> Tensor:
    """Returns the cross entropy of `Llama`, summed over labelled tokens."""
    return token_loss(model(packed.tokens[None], packed.positions[None])[0], packed)


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


def _from_factory(factory: str, arguments: dict[str, object]) -> nn.Module:
    module_name, _, function_name = factory.partition(":")
    _allow_current_folder()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InvalidInput(f"model.factory {factory}: {_import_fault(module_name, error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise InvalidInput(
            f"model.factory {factory}: {module_name} ({module.__file__}) has no function {function_name!r}; "
            f"it has {', '.join(known) or 'none'}"
        )
    try:
        model = function(**arguments)
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise InvalidInput(
            f"model.factory {factory}: {function_name}({given}) failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model.factory {factory}: expected an nn.Module, got {type(model).__name__}")
    return model


def _import_fault(module_name: str, error: Exception) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_name}.".startswith(f"{missing}."):
        return (
            f"there is no module {missing!r} in {os.getcwd()} or among the installed packages; "
            "start from the folder that it lies in, or install it"
        )
    return f"importing {module_name} failed: {type(error).__name__}: {error}"


def _allow_current_folder() -> None:
    """Makes modules of the current folder importable, as `python script.py` does and console scripts do not.

    At the end of the search path, and for good: ours cannot be hidden by a file there, and functions of the module may
    import more from its folder when they run.
    """
    for package in PACKAGES:
        importlib.import_module(package)
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
