"""Boxes on disk: what each rank holds of a tensor, written and read through `torch.distributed.checkpoint`.

A checkpoint is a reshard to disk. Each rank writes the boxes it holds; whoever reads asks for the boxes it needs, and
gets each from whichever saved boxes meet it. One process may act for several ranks (simulated ranks), which is why the
planners take boxes, not distributed tensors.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from hgraph.errors import InvalidInput, RankFailed
from hgraph.shard_map import Box, box_numel, box_shape, intersect, relative

__all__ = ["HeldBox", "read_boxes", "write_boxes"]


@dataclass(frozen=True, slots=True)
class HeldBox:
    """The part of tensor `key` (global shape `shape`) that some rank of this process holds, and its values.

    Invariants: `values` has the shape of `box`, which lies inside `shape`. Boxes without elements are left out.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        assert tuple(self.values.shape) == box_shape(self.box), f"{self.key}: {self.values.shape} is not {self.box}"

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, _offsets(self.box))


def write_boxes(folder: Path, boxes: Iterable[HeldBox], *, alone: bool, group: ProcessGroup | None = None) -> None:
    """Writes the boxes of this process into `folder`, synced to the disk. Collective over `group` unless `alone`.

    May run in a thread if nothing else uses `group` meanwhile. Raises `RankFailed` on all ranks where one of them
    cannot write.
    """
    planner, writer = _BoxSavePlanner(boxes), filesystem.FileSystemWriter(folder)
    with _one_message(f"save to {folder}"):
        _without_warning()
        state_dict_saver.save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)


def read_boxes(folder: Path, boxes: Iterable[HeldBox], *, alone: bool) -> None:
    """Fills the boxes of this process from `folder`, saved in whatever boxes. Collective unless `alone`.

    Raises `InvalidInput` for a tensor that is missing, has another shape or is not whole, `RankFailed` where a rank
    cannot read.
    """
    planner = _BoxLoadPlanner(boxes)
    with _one_message(f"load from {folder}"):
        _without_warning()
        state_dict_loader.load({}, storage_reader=filesystem.FileSystemReader(folder), planner=planner, no_dist=alone)


class _BoxSavePlanner(SavePlanner):
    """Writes boxes; the state dict that `dcp.save` asks for stays empty."""

    def __init__(self, boxes: Iterable[HeldBox]) -> None:
        self._boxes = {held.index: held for held in boxes if box_numel(held.box)}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        del state_dict, storage_meta, is_coordinator

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(held) for held in self._boxes.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data = item.tensor_data
            assert data is not None
            tensor = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            tensor.chunks.append(data.chunk)
        return all_plans, Metadata(tensors)  # type: ignore[arg-type]

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._boxes[write_item.index].values.detach()


class _BoxLoadPlanner(LoadPlanner):
    """Reads, for each box, the parts of saved boxes that meet it."""

    def __init__(self, boxes: Iterable[HeldBox]) -> None:
        self._boxes = {held.index: held for held in boxes if box_numel(held.box)}
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        del state_dict, is_coordinator
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None, "set_up_planner comes first"
        saved = self._metadata.state_dict_metadata
        return LoadPlan([item for held in self._boxes.values() for item in _read_items(held, saved.get(held.key))])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.storage_index}: only tensors are asked for")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._boxes[read_item.dest_index].values
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        del read_item, tensor  # read in place


def _write_item(held: HeldBox) -> WriteItem:
    chunk = ChunkStorageMetadata(_offsets(held.box), torch.Size(box_shape(held.box)))
    data = TensorWriteData(chunk, TensorProperties(dtype=held.values.dtype), torch.Size(held.shape))
    return WriteItem(held.index, WriteItemType.SHARD, tensor_data=data)


def _read_items(held: HeldBox, saved: Any) -> Iterator[ReadItem]:
    if not isinstance(saved, TensorStorageMetadata):
        raise InvalidInput(f"checkpoint: expected a tensor {held.key}, there is none")
    if tuple(saved.size) != held.shape:
        raise InvalidInput(f"checkpoint: {held.key}: expected shape {list(held.shape)}, got {list(saved.size)}")
    count = 0
    for chunk in saved.chunks:
        source = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        common = intersect(held.box, source)
        if common is None:
            continue
        count += box_numel(common)
        yield ReadItem(
            LoadItemType.TENSOR,
            held.index,
            _starts(common, held.box),
            MetadataIndex(held.key, chunk.offsets),
            _starts(common, source),
            torch.Size(box_shape(common)),
        )
    if count != box_numel(held.box):
        raise InvalidInput(f"checkpoint: {held.key}: {box_numel(held.box) - count} elements of {held.box} are missing")


def _offsets(box: Box) -> torch.Size:
    return torch.Size([start for start, _ in box])


def _starts(box: Box, origin: Box) -> torch.Size:
    """Where `box` begins in a tensor that holds `origin`."""
    return torch.Size([part.start for part in relative(box, origin)])


@contextmanager
def _one_message(what: str) -> Iterator[None]:
    """Turns what `torch.distributed.checkpoint` collected from all ranks into the first failure, with its rank."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, InvalidInput):
            raise cause from None
        raise RankFailed(f"{what}: rank {rank}: {type(cause).__name__}: {cause}") from cause
    except RuntimeError as error:
        raise RankFailed(f"{what}: {str(error).splitlines()[0]}") from error


def _without_warning() -> None:
    """One process that acts for all ranks is meant; torch would warn of it.

    The filter stays: one that is taken back changes those of other threads.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
