"""Packed causal attention: one operator pair over documents laid end to end, with grouped query heads.

Shapes: T tokens, H query heads, K key/value heads, D head size, E value head size, S documents.
Tokens at or after `cu_seqlens[-1]` (padding) belong to no document: their output and gradients are zero.
Documents of zero length are skipped (the CPU flash kernel cannot take them).

The pair is registered with fakes and autograd, so that it traces with symbolic T; inside it autograd does not run.
`query_head_start`, `key_head_start` and `heads_per_key` say which key/value head a query head reads where a rank holds
only some of the heads: local query head i reads local key head
(query_head_start + i) // heads_per_key - key_head_start.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

__all__ = ["packed_attention"]


def packed_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Returns causal attention inside each document, [T, H, E].

    `query` [T, H, D], `key` [T, K, D], `value` [T, K, E] with H a multiple of K; `cu_seqlens` [S + 1] int32.
    """
    heads_per_key = query.shape[1] // key.shape[1]
    return _forward(query, key, value, cu_seqlens, scale, 0, 0, heads_per_key)[0]


@torch.library.custom_op("hydraulis::packed_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    query_head_start: int,
    key_head_start: int,
    heads_per_key: int,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = query.shape
    output = query.new_zeros(num_tokens, num_heads, value.shape[-1])
    log_sum_exp = query.new_zeros(num_tokens, num_heads, dtype=_wide(query))
    heads = _key_heads(query, key, query_head_start, key_head_start, heads_per_key)
    for start, stop in _documents(cu_seqlens):
        parts = (_document(query, start, stop), *_expand(key, value, heads, start, stop))
        out_HTE, lse_HT = _attend(*parts, scale)
        output[start:stop] = out_HTE[0].transpose(0, 1)
        log_sum_exp[start:stop] = lse_HT[0].transpose(0, 1)
    return output, log_sum_exp


@_forward.register_fake
def _forward_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    query_head_start: int,
    key_head_start: int,
    heads_per_key: int,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = query.shape
    log_sum_exp = query.new_empty(num_tokens, num_heads, dtype=_wide(query))
    return query.new_empty(num_tokens, num_heads, value.shape[-1]), log_sum_exp


@torch.library.custom_op("hydraulis::packed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    query_head_start: int,
    key_head_start: int,
    heads_per_key: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    heads = _key_heads(query, key, query_head_start, key_head_start, heads_per_key)
    for start, stop in _documents(cu_seqlens):
        parts = (_document(query, start, stop), *_expand(key, value, heads, start, stop))
        saved = (_document(output, start, stop), log_sum_exp[start:stop].transpose(0, 1)[None])
        grad_q, grad_k, grad_v = _attend_backward(_document(grad, start, stop), *parts, *saved, scale)
        grad_query[start:stop] = grad_q[0].transpose(0, 1)
        grad_key[start:stop].index_add_(1, heads, grad_k[0].transpose(0, 1))
        grad_value[start:stop].index_add_(1, heads, grad_v[0].transpose(0, 1))
    return grad_query, grad_key, grad_value


@_backward.register_fake
def _backward_fake(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    query_head_start: int,
    key_head_start: int,
    heads_per_key: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, cu_seqlens, *ctx.constants = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens)


def _autograd(ctx, grad: Tensor, grad_log_sum_exp: Tensor):  # type: ignore[no-untyped-def]
    return *_backward(grad, *ctx.saved_tensors, *ctx.constants), None, None, None, None, None


torch.library.register_autograd("hydraulis::packed_attention", _autograd, setup_context=_setup_context)


def _documents(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    bounds = cu_seqlens.tolist()
    return [(start, stop) for start, stop in itertools.pairwise(bounds) if stop > start]


def _key_heads(query: Tensor, key: Tensor, query_start: int, key_start: int, heads_per_key: int) -> Tensor:
    heads = torch.arange(query_start, query_start + query.shape[1], device=query.device) // heads_per_key - key_start
    assert not query.shape[1] or (0 <= int(heads[0]) and int(heads[-1]) < key.shape[1]), "key/value heads not local"
    return heads


def _document(x_THD: Tensor, start: int, stop: int) -> Tensor:
    """Returns [1, H, L, D] of one document."""
    return x_THD[start:stop].transpose(0, 1)[None]


def _expand(key: Tensor, value: Tensor, heads: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    return tuple(_document(x[start:stop].index_select(1, heads), 0, stop - start) for x in (key, value))  # type: ignore[return-value]


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the output [1, H, L, E] and the log-sum-exp [1, H, L] of one document."""
    if query.shape[1] == 0:
        nothing = query.new_zeros(query.shape[:3], dtype=_wide(query))
        return query.new_zeros(*query.shape[:3], value.shape[-1]), nothing
    if _has_flash_kernel(query, value):
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend(query, key, value, 0.0, True, scale=scale)
    scores = _causal_scores(query, key, scale)
    log_sum_exp = scores.logsumexp(-1)
    output = (scores - log_sum_exp[..., None]).exp() @ value.to(scores.dtype)
    return output.to(query.dtype), log_sum_exp


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum_exp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if query.shape[1] == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    if _has_flash_kernel(query, value):
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, query, key, value, output, log_sum_exp, 0.0, True, scale=scale)
    weights = (_causal_scores(query, key, scale) - log_sum_exp[..., None]).exp()
    narrow = query.dtype
    grad, query, key, value, output = (x.to(weights.dtype) for x in (grad, query, key, value, output))
    grad_weights = grad @ value.transpose(-1, -2)
    grad_scores = weights * (grad_weights - (grad * output).sum(-1, keepdim=True)) * scale
    grads = grad_scores @ key, grad_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad
    return tuple(x.to(narrow) for x in grads)  # type: ignore[return-value]


def _wide(tensor: Tensor) -> torch.dtype:
    """Returns the dtype of log-sum-exp and of sums: float32, or float64 where `tensor` is."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _has_flash_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether the CPU flash kernel serves these; formulas serve other devices and values of another head size."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _causal_scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    wide = _wide(query)
    scores = (query.to(wide) @ key.to(wide).transpose(-1, -2)) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, float("-inf"))
