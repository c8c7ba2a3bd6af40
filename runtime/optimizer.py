"""AdamW on shards: each rank updates the boxes of the optimizer layout that it owns (ZeRO-1, arXiv 1910.02054).

Master weights and both moments never move when the strategy changes, and the step count is a plain number beside them,
so a switch cannot lose it. The update is that of `torch.optim.AdamW`, with decoupled decay (arXiv 1711.05101).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from hgraph.errors import InvalidInput

__all__ = ["AdamW", "ShardedAdamW", "learning_rate"]

CLIP_EPSILON = 1e-6
"""Keeps the clipping factor finite, as in `torch.nn.utils.clip_grad_norm_`."""


@dataclass(frozen=True, slots=True)
class AdamW:
    """Settings of the optimizer.

    - `no_decay`: globs over parameter names that get no weight decay (`*.norm.weight`).
    - `max_grad_norm`: limit of the global gradient norm, None for none.
    - `warmup_steps`: the learning rate rises linearly to `lr` at this step; then, with `total_steps`, it falls along a
      cosine to `min_lr_ratio * lr` at that step and stays there; without, it stays `lr`.

    Invariants: `lr`, `weight_decay` and `warmup_steps` are not negative; betas lie in [0, 1); `eps` and
    `max_grad_norm` are positive; `min_lr_ratio` lies in [0, 1]; `total_steps` exceeds `warmup_steps`.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    warmup_steps: int = 0
    total_steps: int | None = None
    min_lr_ratio: float = 0.1
    no_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "no_decay", tuple(self.no_decay))
        _check(self.lr >= 0 and math.isfinite(self.lr), "lr", "0 or more", self.lr)
        _check(
            len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "betas", "two numbers in [0, 1)", self.betas
        )
        _check(self.eps > 0, "eps", "a positive number", self.eps)
        _check(self.weight_decay >= 0, "weight_decay", "0 or more", self.weight_decay)
        limit = self.max_grad_norm
        _check(limit is None or limit > 0, "max_grad_norm", "a positive number or None", limit)
        _check(self.warmup_steps >= 0, "warmup_steps", "0 or more", self.warmup_steps)
        total = self.total_steps
        _check(total is None or total > self.warmup_steps, "total_steps", f"more than {self.warmup_steps}", total)
        _check(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "a number in [0, 1]", self.min_lr_ratio)

    def decays(self, name: str) -> bool:
        """Returns whether the parameter `name` gets weight decay."""
        return not any(fnmatchcase(name, pattern) for pattern in self.no_decay)


def _check(holds: bool, setting: str, expected: str, got: object) -> None:
    if not holds:
        raise InvalidInput(f"AdamW: {setting}: expected {expected}, got {got!r}")


def learning_rate(config: AdamW, step: int) -> float:
    """Returns the learning rate of optimizer step `step`, counted from 1."""
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.total_steps is None:
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


class ShardedAdamW:
    """Master weights and moments of one rank.

    Attributes: `step_count`, the optimizer steps done; `master`, name -> this rank's box of the weights (a view of one
    flat buffer; shards of no element are kept too).
    """

    def __init__(self, config: AdamW, shards: Mapping[str, Tensor]) -> None:
        dtypes = {shard.dtype for shard in shards.values()}
        if not dtypes <= {torch.float32, torch.float64} or len(dtypes) > 1:
            raise InvalidInput(
                f"AdamW: expected master weights all float32 or all float64, got {sorted(map(str, dtypes))}"
            )
        self.config, self.step_count = config, 0
        # What decays comes first, so that decay is one operation on one slice.
        names = sorted(shards, key=lambda name: not config.decays(name))
        self._shapes = {name: tuple(shards[name].shape) for name in names}
        self._sizes = [shards[name].numel() for name in names]
        self._num_decayed = sum(shards[name].numel() for name in names if config.decays(name))
        self._master = _flat([shards[name] for name in names])
        self._exp_avg = torch.zeros_like(self._master)
        self._exp_avg_sq = torch.zeros_like(self._master)
        self.master = self._views(self._master)

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split(self._sizes) if self._sizes else ()
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    @torch.no_grad()
    def squared_norm(self, grads: Mapping[str, Tensor], owned: Collection[str] | None = None) -> Tensor:
        """Returns this rank's part of the squared global norm, float64, without dims.

        `owned` names the shards that count here, all by default: where a layout has copies, only one rank counts each.
        """
        self._check_names(grads, "gradients")
        total = torch.zeros((), dtype=torch.float64, device=self._master.device)
        for name, grad in grads.items():
            if owned is None or name in owned:
                values = grad.reshape(-1).double()
                total += torch.dot(values, values)
        return total

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], grad_norm: float) -> float:
        """Updates the master weights in place and returns the learning rate of the step.

        `grads` has the shards of all names; `grad_norm` is the global norm, the same on every rank. The caller skips
        the step where no token of the batch has a label.
        """
        self._check_names(grads, "gradients")
        config = self.config
        self.step_count += 1
        lr = learning_rate(config, self.step_count)
        grad = _flat([grads[name] for name in self._shapes], self._master.dtype)
        if config.max_grad_norm is not None:
            grad.mul_(min(1.0, config.max_grad_norm / (grad_norm + CLIP_EPSILON)))
        beta1, beta2 = config.betas
        self._master[: self._num_decayed].mul_(1.0 - lr * config.weight_decay)
        self._exp_avg.lerp_(grad, 1.0 - beta1)
        self._exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        correction1 = 1.0 - beta1**self.step_count
        correction2 = 1.0 - beta2**self.step_count
        # The gradient is not needed any more; its memory takes the denominator.
        denominator = torch.sqrt(self._exp_avg_sq, out=grad).div_(math.sqrt(correction2)).add_(config.eps)
        self._master.addcdiv_(self._exp_avg, denominator, value=-lr / correction1)
        return lr

    def state_dict(self) -> dict[str, Any]:
        """Returns the step count and, by name, views of the master weights and both moments."""
        return {
            "step": self.step_count,
            "master": dict(self.master),
            "exp_avg": self._views(self._exp_avg),
            "exp_avg_sq": self._views(self._exp_avg_sq),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copies the state in; raises `InvalidInput` where names or shapes differ, and then changes nothing."""
        buffers = {"master": self._master, "exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
        missing = [key for key in ("step", *buffers) if key not in state]
        if missing:
            raise InvalidInput(f"AdamW: state: expected step, {', '.join(buffers)}; got no {', '.join(missing)}")
        for key in buffers:
            self._check_names(state[key], f"state {key}")
        for key, buffer in buffers.items():
            for name, view in self._views(buffer).items():
                view.copy_(state[key][name])
        self.step_count = int(state["step"])

    def _check_names(self, tensors: Mapping[str, Tensor], what: str) -> None:
        absent = [name for name in self._shapes if name not in tensors]
        unknown = [name for name in tensors if name not in self._shapes]
        if absent or unknown:
            raise InvalidInput(
                f"AdamW: {what}: expected the shards of this rank; "
                f"missing {', '.join(absent) or 'none'}, unknown {', '.join(unknown) or 'none'}"
            )
        for name, shape in self._shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise InvalidInput(f"AdamW: {what} of {name}: expected {list(shape)}, got {list(tensors[name].shape)}")


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Returns a new flat tensor with the elements of all, in order."""
    if not tensors:
        return torch.empty(0, dtype=dtype)
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return flat if dtype is None else flat.to(dtype)
