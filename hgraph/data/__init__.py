"""Sequences, packed rows, length policies, data sets and global batches; see `docs/data.md`."""

from hgraph.lazy_front import lazy_front

_MODULE_OF = {
    "IGNORED_LABEL": "packed",
    "BatchState": "batches",
    "Dataset": "dataset",
    "GlobalBatch": "batches",
    "GlobalBatches": "batches",
    "LengthPolicy": "policy",
    "MemmapDataset": "dataset",
    "Packed": "packed",
    "PieceDataset": "dataset",
    "Pieces": "policy",
    "PolicyReport": "policy",
    "TokenDataset": "dataset",
    "apply_length_policy": "policy",
    "causal_lm_loss": "losses",
    "check_packed": "packed_checker",
    "cu_seqlens_from_segments": "packed",
    "global_batches": "batches",
    "make_batch": "batches",
    "num_targets": "packed",
    "pack": "packed",
    "positions_from_segments": "packed",
    "shifted_labels": "packed",
    "token_loss": "losses",
}

__all__ = [*_MODULE_OF]
__getattr__ = lazy_front(__name__, _MODULE_OF)
