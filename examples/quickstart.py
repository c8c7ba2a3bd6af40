"""Trains a small decoder on sequences of unequal length. Run by python, or by torchrun --nproc-per-node 4."""

import torch
from torch import nn

import hgraph as hg

POOL = """{version: 1, ranks: 4, strategies: [
  {name: long, replicas: [{tp: 2, pp: 2}]},
  {name: mixed, replicas: [{tp: 2}, {tp: 1, count: 2}]},
  {name: short, replicas: [{tp: 1, count: 4}]},
]}"""


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        parts = [f(self.norm(x)).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        x = x + self.out(nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 64), nn.Sequential(Layer(64), Layer(64)), nn.Linear(64, 256))
documents = hg.data.TokenDataset([torch.arange(n) * n % 256 for n in (1500, *[500] * 6, *[60] * 100)])
batches = hg.data.global_batches(documents, tokens_per_step=2000, max_steps=10)
loss = lambda model, packed: hg.data.token_loss(model(packed.tokens[None])[0], packed)  # noqa: E731

with hg.compile(model, loss, hg.parse_pool(POOL, "pool"), limits=hg.MemoryLimits(budget_mib=12)) as program:
    for batch in program.ahead(batches):
        out = program.step(batch)
        if program.is_main:
            print(
                f"step {out.step}: {out.strategy}, loss {out.loss:.3f}, {out.tokens} tokens in {out.measured_ms:.0f} ms"
            )
