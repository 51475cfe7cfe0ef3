"""Publish, store, pull and apply weight versions: full or as bit-exact deltas."""

from .channel import Channel, LocalChannel, RankLost, TorchChannel, broadcast, gather
from .codecs import Codec
from .directory_store import DirectoryStore
from .inspection import Inspection, VersionInfo, inspect
from .interface import (
    CorruptVersion,
    Entry,
    Located,
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
    VersionGone,
    WeightSyncError,
    WrongBase,
)
from .memory_store import MemoryStore
from .mirror import Mirror, MirrorStatus
from .object_store import HttpStore, ObjectStore
from .publisher import Publisher
from .puller import Puller, Staged
from .safetensors_sink import SafetensorsSink
from .server import Served, Tls, serve
from .sharded import ShardedPublisher
from .shards import Piece
from .stores import open_store
from .tensor_sink import TensorSink
from .torch_shards import shards_of
from .verification import Damage, Verification, verify

__all__ = [
    "Channel",
    "Codec",
    "CorruptVersion",
    "Damage",
    "DirectoryStore",
    "Entry",
    "HttpStore",
    "Inspection",
    "LocalChannel",
    "Located",
    "MemoryStore",
    "Mirror",
    "MirrorStatus",
    "ObjectStore",
    "OffsetStore",
    "Piece",
    "PublishReport",
    "Publisher",
    "PullReport",
    "Puller",
    "RankLost",
    "RemoteStore",
    "Retention",
    "SafetensorsSink",
    "Served",
    "ShardedPublisher",
    "Sink",
    "SinkState",
    "Staged",
    "StaleIncarnation",
    "Store",
    "TensorSink",
    "TensorSpec",
    "Tensors",
    "Tls",
    "TorchChannel",
    "TransferMode",
    "Verification",
    "VersionGone",
    "VersionInfo",
    "WeightSyncError",
    "WrongBase",
    "broadcast",
    "gather",
    "inspect",
    "open_store",
    "serve",
    "shards_of",
    "verify",
]
