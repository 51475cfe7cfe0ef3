"""Publish, store, pull and apply weight versions: full or as bit-exact deltas."""

from .directory_store import DirectoryStore
from .interface import (
    CorruptVersion,
    Entry,
    OffsetStore,
    PublishReport,
    PullReport,
    RemoteStore,
    Retention,
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
from .memory_store import MemoryStore
from .object_store import HttpStore, ObjectStore
from .publisher import Publisher
from .puller import Puller, Staged
from .safetensors_sink import SafetensorsSink
from .stores import open_store
from .tensor_sink import TensorSink

__all__ = [
    "CorruptVersion",
    "DirectoryStore",
    "Entry",
    "HttpStore",
    "MemoryStore",
    "ObjectStore",
    "OffsetStore",
    "PublishReport",
    "Publisher",
    "PullReport",
    "Puller",
    "RemoteStore",
    "Retention",
    "SafetensorsSink",
    "Sink",
    "SinkState",
    "Staged",
    "StaleIncarnation",
    "Store",
    "TensorSink",
    "TensorSpec",
    "Tensors",
    "TransferMode",
    "WeightSyncError",
    "WrongBase",
    "open_store",
]
