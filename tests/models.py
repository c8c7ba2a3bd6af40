"""Small models and losses for tests, each written as a stranger would: nothing in them knows this project.

Shapes: B batch, T tokens, D hidden, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgraph.data.packed import Packed, pack
from runtime.models.llama import Llama, LlamaConfig

__all__ = [
    "Gpt",
    "Tiny",
    "Word",
    "gpt",
    "hugging_face_gpt2",
    "hugging_face_llama",
    "hugging_face_loss",
    "language_loss",
    "llama",
    "random_batches",
]


def language_loss(model: nn.Module, packed: Packed) -> Tensor:
    """The sum over labelled tokens, for models called with tokens and positions."""
    logits = model(packed.tokens[None], packed.positions[None])[0]
    return F.cross_entropy(logits, packed.labels, reduction="sum")


def hugging_face_loss(model: nn.Module, packed: Packed) -> Tensor:
    """The same for causal language models of `transformers`."""
    output = model(input_ids=packed.tokens[None], position_ids=packed.positions[None], use_cache=False)
    return F.cross_entropy(output.logits[0], packed.labels, reduction="sum")


def llama(seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: object) -> Llama:
    """A small Llama; `sizes` override those of the configuration."""
    torch.manual_seed(seed)
    small: dict[str, object] = {"layers": 2, "hidden": 48, "heads": 6, "kv_heads": 3, "ffn": 50, "vocab_size": 257}
    return Llama(LlamaConfig(**(small | sizes))).to(dtype)  # type: ignore[arg-type]


def gpt(seed: int = 0, dtype: torch.dtype = torch.float64, **sizes: int) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(**sizes).to(dtype)


class Gpt(nn.Module):
    """GPT-2 in plain torch: learned positions, LayerNorm, biases, gelu, fused qkv, tied head."""

    def __init__(
        self, vocab_size: int = 61, hidden: int = 24, layers: int = 2, heads: int = 4, max_positions: int = 128
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden)
        self.positions = nn.Embedding(max_positions, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.project = nn.Linear(hidden, hidden)
        self.norm_2 = nn.LayerNorm(hidden)
        self.widen = nn.Linear(hidden, 4 * hidden)
        self.narrow = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self.attend(self.norm_1(x)))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).contiguous().view(batch, length, hidden)


class Tiny(nn.Module):
    """Norm, attention and a linear layer on a residual stream, and nothing else: graphs that fit on a page."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(TinyLayer() for _ in range(layers))
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, bias=False)
        self.query, self.key, self.value, self.project = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (f(y).unflatten(-1, (4, 2)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.project(attended.transpose(1, 2).flatten(2))


class Word(nn.Module):
    """Embedding, something between, head."""

    def __init__(self, between: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(61, 24)
        self.between = Between(between)
        self.head = nn.Linear(24, 61)
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.between(self.embed(tokens), tokens, positions))


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.function(x, tokens, positions)


def hugging_face_llama(seed: int = 0, **sizes: object) -> nn.Module:
    """A small Llama of `transformers`, from configuration alone."""
    from transformers import LlamaConfig as Config
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    small: dict[str, object] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return LlamaForCausalLM(Config(**(small | sizes))).double()


def hugging_face_gpt2(seed: int = 0, **sizes: object) -> nn.Module:
    """A small GPT-2 of `transformers`, from configuration alone, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    small: dict[str, object] = {
        "vocab_size": 50,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return GPT2LMHeadModel(GPT2Config(**(small | sizes))).double()


def random_batches(
    lengths: Sequence[Sequence[int]], vocab_size: int, seed: int = 0, multiple: int = 1
) -> tuple[list[Packed], list[Packed]]:
    """Returns the packed micro-batches of sequences of these lengths, and each sequence packed alone."""
    generator = torch.Generator().manual_seed(seed)
    rows = [[torch.randint(0, vocab_size, (length,), generator=generator) for length in batch] for batch in lengths]
    return [pack(batch, multiple=multiple) for batch in rows], [pack([row]) for batch in rows for row in batch]
