"""Operators as a rank runs them that holds a part of the classes, of the vocabulary or of what is compared."""

from __future__ import annotations

import torch

__all__ = ["IGNORED", "local_amax", "local_embedding", "local_embedding_backward", "local_labels"]

aten = torch.ops.aten

IGNORED = -100
"""Label of what a rank ignores. Not the user's own, which may be a class once labels are counted from elsewhere."""


def local_amax(x: torch.Tensor, dims: list[int], keepdim: bool = False) -> torch.Tensor:
    """Returns the maxima of x over `dims`; minus infinity, which no other rank's maximum is below, where x is empty."""
    if all(x.shape[dim] for dim in dims):
        return aten.amax(x, dims, keepdim)
    assert x.dtype.is_floating_point, "expected floating point"
    return aten.sum(x, dims, keepdim).fill_(-torch.inf)


def local_embedding(weight: torch.Tensor, ids: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    """Returns rows of a weight that holds ids `start` to `start + rows`; zero for others."""
    outside = (ids < start) | (ids >= start + rows)
    if rows == 0:
        return weight.new_zeros(*ids.shape, weight.shape[1])
    return aten.embedding(weight, (ids - start).masked_fill(outside, 0)).masked_fill_(outside[..., None], 0)


def local_embedding_backward(
    grad: torch.Tensor, ids: torch.Tensor, start: int, rows: int, padding: int
) -> torch.Tensor:
    """Returns the gradient of the rows `start` to `start + rows` of an embedding."""
    outside = (ids < start) | (ids >= start + rows) | (ids == padding)
    return aten.embedding_dense_backward(grad, (ids - start).masked_fill(outside, -1), rows, -1, False)


def local_labels(labels: torch.Tensor, start: int, classes: int, ignored: int) -> torch.Tensor:
    """Returns labels counted from `start`; `ignored` ones and those outside the rank's classes become `IGNORED`."""
    outside = (labels < start) | (labels >= start + classes) | (labels == ignored)
    return (labels - start).masked_fill(outside, IGNORED)
