"""The sizes of `Llama`, apart from it: a configuration is read without torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LlamaConfig"]


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a `Llama`."""

    vocab_size: int = 4096
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 688
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
