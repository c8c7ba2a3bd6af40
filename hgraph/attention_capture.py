"""Attention at capture time: a model's own causal attention becomes packed attention.

Two ways in, both without touching the user's model:

- a model that calls `torch.nn.functional.scaled_dot_product_attention` is served by a torch function mode that
  rewrites causal calls, whatever back end torch would choose; masks that mean something else are refused by name;
- a Hugging Face model is switched, while it is traced, to an attention function registered through
  `transformers.AttentionInterface`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hgraph.errors import CaptureError
from hgraph.packed_attention import packed_attention
from hgraph.user_code import user_frame

__all__ = ["attention_as_packed"]

_HUGGING_FACE_NAME = "hydraulis_packed"
_HARMLESS = (
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "layer_idx",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
)
"""Arguments that `transformers` hands on to attention and that do not change its result on a packed row."""

_cu_seqlens: ContextVar[Tensor] = ContextVar("cu_seqlens of the packed batch that is being traced")


@contextlib.contextmanager
def attention_as_packed(model: nn.Module, cu_seqlens: Tensor) -> Iterator[None]:
    """Within it, causal attention of `model` stays inside the documents that `cu_seqlens` bounds."""
    token = _cu_seqlens.set(cu_seqlens)
    try:
        with _hugging_face_attention(model), _RewriteAttention():
            yield
    finally:
        _cu_seqlens.reset(token)


class _RewriteAttention(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Packed attention for query [..., H, T, D], key [..., K, T, D], value [..., K, T, E] with leading dims of 1."""
    if attn_mask is not None:
        _refuse("an explicit attn_mask", "pass is_causal=True and no mask; documents are kept apart by cu_seqlens")
    if not is_causal:
        _refuse("attention that is not causal", "pass is_causal=True")
    if dropout_p:
        _refuse(f"dropout_p={dropout_p}", "set attention dropout to 0")
    if any(size != 1 for size in query.shape[:-3]):
        _refuse(f"a batch of {tuple(query.shape[:-3])} rows", "a packed batch is one row: use tokens[None]")
    if query.ndim < 3:
        _refuse(f"a query of {query.ndim} dims", "expected [..., heads, tokens, head size]")
    if query.shape[-3] % key.shape[-3] or (query.shape[-3] != key.shape[-3] and not enable_gqa):
        _refuse(f"{query.shape[-3]} query heads over {key.shape[-3]} key heads", "pass enable_gqa=True")
    lead = query.ndim - 3
    rows = [_drop_leading(tensor, lead).transpose(0, 1) for tensor in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attended = packed_attention(rows[0], rows[1], rows[2], _cu_seqlens.get(), float(scale)).transpose(0, 1)
    for _ in range(lead):
        attended = attended.unsqueeze(0)
    return attended


def _drop_leading(tensor: Tensor, count: int) -> Tensor:
    for _ in range(count):
        tensor = tensor.squeeze(0)
    return tensor


def _refuse(what: str, remedy: str) -> None:
    frame = user_frame()
    place = f"{frame.filename}:{frame.lineno}" if frame is not None else "an unknown place"
    raise CaptureError(f"scaled_dot_product_attention at {place}: {what} is not supported; {remedy}")


@contextlib.contextmanager
def _hugging_face_attention(model: nn.Module) -> Iterator[None]:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        yield
        return
    transformers.AttentionInterface.register(_HUGGING_FACE_NAME, _hugging_face_packed)
    configs = [module.config for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _HUGGING_FACE_NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def _place(module: nn.Module) -> str:
    """The module that attends, by its path and line, for messages."""
    stack = fx_traceback.current_meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()), ("", ""))[0] if stack else ""
    frame = user_frame()
    line = f", {frame.filename}:{frame.lineno}" if frame is not None else ""
    return f"module {path or '(root)'} ({type(module).__name__}){line}"


def _hugging_face_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`transformers` calls it with query [1, H, T, D], key and value [1, K, T, D]; returns [1, T, H, D]."""
    where = _place(module)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise CaptureError(f"{where}: attention that is not causal is not supported")
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise CaptureError(f"{where}: attention with {', '.join(unknown)} is not supported")
    if attention_mask is not None:
        raise CaptureError(f"{where}: an attention mask is not supported; documents are kept apart by cu_seqlens")
    if sliding_window is not None or softcap is not None:
        raise CaptureError(f"{where}: sliding_window={sliding_window}, softcap={softcap} are not supported")
    if dropout:
        raise CaptureError(f"{where}: attention dropout {dropout} is not supported; set attention_dropout to 0")
    if query.shape[0] != 1:
        raise CaptureError(f"{where}: a batch of {query.shape[0]} rows; a packed batch is one row: use tokens[None]")
    rows = [tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return packed_attention(rows[0], rows[1], rows[2], _cu_seqlens.get(), float(scale))[None], None
