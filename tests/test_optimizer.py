"""AdamW on shards: equal to PyTorch's own, whatever the split; the schedule; the state; the messages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hgraph.errors import InvalidInput
from runtime.optimizer import AdamW, ShardedAdamW, learning_rate

SHAPES = {"embedding.weight": (7, 3), "norm.weight": (3,), "up.weight": (5, 3), "up.bias": (5,), "scale": ()}
NO_DECAY = ("norm.*", "*.bias")


def random_tensors(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def reference(config: AdamW, start: dict[str, Tensor], num_steps: int) -> dict[str, Tensor]:
    """Returns the weights after `torch.optim.AdamW` with `torch.nn.utils.clip_grad_norm_`."""
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    groups = [
        {"params": [p for name, p in parameters.items() if config.decays(name)], "weight_decay": config.weight_decay},
        {"params": [p for name, p in parameters.items() if not config.decays(name)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    for step in range(1, num_steps + 1):
        for name, grad in random_tensors(step).items():
            parameters[name].grad = grad
        if config.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def split(tensors: dict[str, Tensor], rank: int, num_ranks: int) -> dict[str, Tensor]:
    """Returns the pieces of one rank along dim 0; a tensor without dims is on rank 0, as one row."""
    rows = {name: tensor.reshape(-1) if tensor.dim() == 0 else tensor for name, tensor in tensors.items()}
    return {name: tensor.tensor_split(num_ranks)[rank] for name, tensor in rows.items()}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 100.0])
def test_equal_to_torch_on_any_number_of_ranks(num_ranks: int, max_grad_norm: float | None) -> None:
    config = AdamW(1e-2, max_grad_norm=max_grad_norm, no_decay=NO_DECAY, warmup_steps=3, total_steps=8)
    start = random_tensors(0)
    optimizers = [ShardedAdamW(config, split(start, rank, num_ranks)) for rank in range(num_ranks)]
    for step in range(1, 11):
        grads = [split(random_tensors(step), rank, num_ranks) for rank in range(num_ranks)]
        norm = math.sqrt(sum(o.squared_norm(g).item() for o, g in zip(optimizers, grads, strict=True)))
        for optimizer, grad in zip(optimizers, grads, strict=True):
            assert optimizer.step(grad, norm) == learning_rate(config, step)
    for name, expected in reference(config, start, 10).items():
        got = torch.cat([optimizer.master[name] for optimizer in optimizers]).reshape(expected.shape)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_gradients_are_left_alone_and_master_is_a_copy() -> None:
    start = random_tensors(0)
    optimizer = ShardedAdamW(AdamW(1e-2, max_grad_norm=0.1), start)
    grads = random_tensors(1)
    optimizer.step(grads, 10.0)
    assert all(torch.equal(grads[name], grad) for name, grad in random_tensors(1).items())
    assert all(torch.equal(start[name], tensor) for name, tensor in random_tensors(0).items())
    assert not torch.equal(optimizer.master["up.weight"], start["up.weight"])


@pytest.mark.case(108)
def test_the_norm_counts_distinct_elements() -> None:
    """A replicated and a sharded parameter on two ranks, gradients all ones: the root of 4 + 6."""
    shards = [{"replicated": torch.ones(4), "sharded": torch.ones(rows, 2)} for rows in (2, 1)]
    owned = [{"replicated", "sharded"}, {"sharded"}]
    optimizers = [ShardedAdamW(AdamW(1e-3), shard) for shard in shards]
    total = sum(
        optimizer.squared_norm(shard, names).item()
        for optimizer, shard, names in zip(optimizers, shards, owned, strict=True)
    )
    assert total == 10.0


def test_the_squared_norm_is_float64() -> None:
    optimizer = ShardedAdamW(AdamW(1e-3), {"w": torch.zeros(2)})
    norm = optimizer.squared_norm({"w": torch.tensor([1.0, 1e30])})
    assert norm.dtype == torch.float64
    assert math.isfinite(norm.item())


def test_learning_rate() -> None:
    config = AdamW(1.0, warmup_steps=4, total_steps=12, min_lr_ratio=0.2)
    assert [learning_rate(config, step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(config, 8) == pytest.approx(0.6)
    assert [learning_rate(config, step) for step in (12, 13, 1000)] == [0.2, 0.2, 0.2]
    constant = AdamW(1.0, warmup_steps=2)
    assert [learning_rate(constant, step) for step in (1, 2, 3, 1000)] == [0.5, 1.0, 1.0, 1.0]
    assert learning_rate(AdamW(1.0, total_steps=10), 1) == pytest.approx(
        0.1 + 0.9 * 0.5 * (1 + math.cos(0.1 * math.pi))
    )


@pytest.mark.case(114)
def test_state_continues_with_its_step_count() -> None:
    config = AdamW(1e-2, warmup_steps=2, total_steps=6, no_decay=NO_DECAY)
    unbroken = ShardedAdamW(config, random_tensors(0))
    for step in range(1, 4):
        unbroken.step(random_tensors(step), 1.0)
    resumed = ShardedAdamW(config, random_tensors(99))
    resumed.load_state_dict(unbroken.state_dict())
    assert resumed.step_count == 3
    for step in range(4, 7):
        unbroken.step(random_tensors(step), 1.0)
        resumed.step(random_tensors(step), 1.0)
    for key in ("master", "exp_avg", "exp_avg_sq"):
        for name in SHAPES:
            assert torch.equal(unbroken.state_dict()[key][name], resumed.state_dict()[key][name])


def test_a_rank_without_shards() -> None:
    optimizer = ShardedAdamW(AdamW(1e-2), {})
    optimizer.step({}, 0.0)
    assert optimizer.squared_norm({}).item() == 0.0
    assert optimizer.state_dict() == {"step": 1, "master": {}, "exp_avg": {}, "exp_avg_sq": {}}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -1.0}, "AdamW: lr: expected 0 or more, got -1.0"),
        ({"lr": math.nan}, "AdamW: lr: expected 0 or more, got nan"),
        ({"betas": (0.9, 1.0)}, r"AdamW: betas: expected two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": 0.0}, "AdamW: eps: expected a positive number, got 0.0"),
        ({"weight_decay": -0.1}, "AdamW: weight_decay: expected 0 or more, got -0.1"),
        ({"max_grad_norm": 0.0}, "AdamW: max_grad_norm: expected a positive number or None, got 0.0"),
        ({"warmup_steps": -1}, "AdamW: warmup_steps: expected 0 or more, got -1"),
        ({"warmup_steps": 5, "total_steps": 5}, "AdamW: total_steps: expected more than 5, got 5"),
        ({"min_lr_ratio": 1.5}, r"AdamW: min_lr_ratio: expected a number in \[0, 1\], got 1.5"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        AdamW(**settings)


def test_tensors_that_are_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"expected master weights all float32 or all float64, got \['torch.bfloat16'\]"
    ):
        ShardedAdamW(AdamW(1e-3), {"w": torch.ones(2, dtype=torch.bfloat16)})
    optimizer = ShardedAdamW(AdamW(1e-3), {"w": torch.ones(2), "v": torch.ones(1)})
    with pytest.raises(InvalidInput, match="gradients: expected the shards of this rank; missing v, unknown x"):
        optimizer.step({"w": torch.ones(2), "x": torch.ones(1)}, 1.0)
    with pytest.raises(InvalidInput, match=r"AdamW: gradients of w: expected \[2\], got \[3\]"):
        optimizer.squared_norm({"w": torch.ones(3), "v": torch.ones(1)})
    with pytest.raises(
        InvalidInput, match="AdamW: state: expected step, master, exp_avg, exp_avg_sq; got no exp_avg, exp"
    ):
        optimizer.load_state_dict({"step": 3, "master": {}})
    assert optimizer.step_count == 0
