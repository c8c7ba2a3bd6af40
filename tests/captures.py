"""Captures and compiled schemes that tests share: what was traced or compiled once in a process is not again.

Tests build the same few small models again and again, and tracing one takes seconds. What is returned is what
`capture` returned for a module that cannot be told from this one; passes copy a graph before they change it. Programs
of one process then share compiled schemes, as replicas of one program do.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import hgraph.capture
import runtime.cli.options
import runtime.program
from hgraph.capture import Captured, LossFunction, capture
from hgraph.strategy import Scheme
from passes.pipelines import CompiledScheme, Dump, compile_scheme, normalized
from runtime.cli.options import captured_model
from runtime.config import RunConfig

__all__ = ["share_captures", "shared_capture", "shared_compile_scheme", "shared_normalized", "signature"]

_captured: dict[Hashable, Captured] = {}
_normalized: dict[tuple[int, bool], tuple[Captured, Captured]] = {}
_compiled: dict[Hashable, tuple[Captured, CompiledScheme]] = {}


def share_captures() -> None:
    """Makes `hg.compile` take what this process has captured and compiled before."""
    runtime.program.capture = shared_capture
    runtime.program.normalized = shared_normalized
    runtime.program.compile_scheme = shared_compile_scheme
    runtime.cli.options.captured_model = shared_captured_model


@functools.wraps(capture)
def shared_capture(model: nn.Module, loss: LossFunction, *, fields: Mapping[str, Tensor] | None = None) -> Captured:
    key = None if fields else signature(model, loss)
    if key is None:
        return capture(model, loss, fields=fields)
    if key not in _captured:
        _captured[key] = capture(model, loss)
    return _captured[key]


@functools.wraps(captured_model)
def shared_captured_model(config: RunConfig) -> tuple[nn.Module, Captured]:
    with mock.patch.object(hgraph.capture, "capture", shared_capture):
        return captured_model(config)


@functools.wraps(normalized)
def shared_normalized(captured: Captured, *, exact: bool = False, dump: Dump | None = None) -> Captured:
    if dump is not None:
        return normalized(captured, exact=exact, dump=dump)
    key = (id(captured), exact)
    if key not in _normalized:
        _normalized[key] = captured, normalized(captured, exact=exact)  # the first keeps the id taken
    return _normalized[key][1]


@functools.wraps(compile_scheme)
def shared_compile_scheme(
    captured: Captured,
    scheme: Scheme,
    template: str | Sequence[tuple[str, str]] = "megatron",
    *,
    dump: Dump | None = None,
) -> CompiledScheme:
    if dump is not None:
        return compile_scheme(captured, scheme, template, dump=dump)
    key = (id(captured), scheme, template if isinstance(template, str) else tuple(template))
    if key not in _compiled:
        _compiled[key] = captured, compile_scheme(captured, scheme, template)
    return _compiled[key][1]


def signature(model: nn.Module, loss: Callable[..., Any]) -> Hashable | None:
    """Returns all that a capture can depend on, values of parameters left out; None where that cannot be told.

    That is so for a loss that is no plain function, for modules with hooks, and for attributes without a full text of
    their own (an object's has its address, a large tensor's is cut short).
    """
    if not isinstance(loss, types.FunctionType) or loss.__closure__ is not None:
        return None
    seen: dict[int, int] = {}
    parts: list[Hashable] = [loss]
    for path, module in model.named_modules(remove_duplicate=False):
        hooks = [value for name, value in vars(module).items() if name.endswith("_hooks") and value]
        texts = [f"{name}={value!r}" for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
        if hooks or any(" at 0x" in text or "tensor(" in text for text in texts):
            return None
        parts.append((path, type(module), tuple(texts)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                parts.append((name, seen.setdefault(id(tensor), len(seen)), *_facts(tensor)))
    return tuple(parts)


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}


def _facts(tensor: Tensor) -> tuple[Hashable, ...]:
    is_parameter = isinstance(tensor, nn.Parameter)
    values = None if is_parameter or tensor.device.type == "meta" else tensor.contiguous().view(torch.uint8).tolist()
    text = None if values is None else bytes(values)
    return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad, text
