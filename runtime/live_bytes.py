"""Counts the bytes of tensors that are alive, by watching what operators return.

A storage counts from the operator that makes it until nothing refers to it; storages that were there before do not
count, nor does what an operator needs inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.requests import RankGenerator

__all__ = ["LiveBytes", "watched"]


class LiveBytes(TorchDispatchMode):
    """While it is entered, notes new storages. Attributes: `live_bytes` now, `peak_bytes` so far."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = [leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in inputs}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage(), given)
        return result

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        if storage._cdata in given or storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.live_bytes -= size


def watched(generator: RankGenerator[Any], counter: LiveBytes) -> RankGenerator[Any]:
    """Runs a rank's generator with `counter` entered whenever the rank itself computes."""
    answer: Any = None
    while True:
        with counter:
            try:
                request = generator.send(answer)
            except StopIteration as stop:
                return stop.value
        answer = yield request
