"""Publish, store, pull and apply weight versions: full or as bit-exact deltas."""

from .interface import (
    CorruptVersion,
    PublishReport,
    PullReport,
    Sink,
    SinkState,
    StaleIncarnation,
    Store,
    Tensors,
    TensorSpec,
    TransferMode,
    WeightSyncError,
    WrongBase,
)

__all__ = [
    "CorruptVersion",
    "PublishReport",
    "PullReport",
    "Sink",
    "SinkState",
    "StaleIncarnation",
    "Store",
    "TensorSpec",
    "Tensors",
    "TransferMode",
    "WeightSyncError",
    "WrongBase",
]
