"""Losses over packed rows: sums over labelled tokens, never means.

A step divides by the number of labelled tokens of the whole global batch, which is known before the step, so that
micro-batches of any size add up to the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from hgraph.data.packed import IGNORED_LABEL, Packed

__all__ = ["causal_lm_loss", "token_loss"]


def token_loss(logits: Tensor, packed: Packed) -> Tensor:
    """Returns the summed cross entropy (scalar, nats) of `logits` [T, V] against `packed.labels` [T]."""
    return functional.cross_entropy(logits, packed.labels, reduction="sum", ignore_index=IGNORED_LABEL)


def causal_lm_loss() -> Callable[[nn.Module, Packed], Tensor]:
    """Returns the loss function `loss(model, packed)` for a Hugging Face causal language model.

    The packed row is given as a batch of one, with positions that restart in each document and the document borders
    under the names that attention functions of `transformers` read (`cu_seq_lens_q`, `cu_seq_lens_k`).
    """

    def loss(model: nn.Module, packed: Packed) -> Tensor:
        output = model(
            input_ids=packed.tokens[None],
            position_ids=packed.positions[None],
            cu_seq_lens_q=packed.cu_seqlens,
            cu_seq_lens_k=packed.cu_seqlens,
            use_cache=False,
        )
        return token_loss(output.logits[0], packed)

    return loss
