"""Sequences, packed rows, length policies, data sets and global batches; see `docs/data.md`."""

from hgraph.data.batches import BatchState, GlobalBatch, GlobalBatches, global_batches, make_batch
from hgraph.data.check_packed import check_packed
from hgraph.data.dataset import Dataset, MemmapDataset, PieceDataset, TokenDataset
from hgraph.data.losses import causal_lm_loss, token_loss
from hgraph.data.packed import (
    IGNORED_LABEL,
    Packed,
    cu_seqlens_from_segments,
    num_targets,
    pack,
    positions_from_segments,
    shifted_labels,
)
from hgraph.data.policy import LengthPolicy, Pieces, PolicyReport, apply_length_policy

__all__ = [
    "IGNORED_LABEL",
    "BatchState",
    "Dataset",
    "GlobalBatch",
    "GlobalBatches",
    "LengthPolicy",
    "MemmapDataset",
    "Packed",
    "PieceDataset",
    "Pieces",
    "PolicyReport",
    "TokenDataset",
    "apply_length_policy",
    "causal_lm_loss",
    "check_packed",
    "cu_seqlens_from_segments",
    "global_batches",
    "make_batch",
    "num_targets",
    "pack",
    "positions_from_segments",
    "shifted_labels",
    "token_loss",
]
