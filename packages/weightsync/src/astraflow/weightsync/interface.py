"""The nouns of weight transfer: stores keep immutable versions, a publisher writes them, a puller brings a sink to one.

Usable alone. The invariants, each with a test of its own:

* a version, once its `HEAD` moved, never changes; it lives under its incarnation (`<incarnation>/v/<n>`);
* a delta names its base by digest; a wrong base, a torn read or a corrupt byte is refused before anything is
  written, and the old weights keep serving;
* after `commit` the sink's bytes have the manifest's root digest, or nothing changed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Tensors = Mapping[str, Any]
"""name -> contiguous torch.Tensor (CPU or GPU) or numpy array; bf16 as torch.bfloat16 (numpy has none)."""

TransferMode = Literal["auto", "published"]
"""`published`: the published rule with its full-sync interval; `auto`: the cheapest verified path by bytes."""

PullKind = Literal["full", "delta", "chain"]


class WeightSyncError(Exception):
    """Base of the errors of this package."""


class CorruptVersion(WeightSyncError):
    """A payload or manifest does not have the digest it should: nothing was written."""


class WrongBase(WeightSyncError):
    """A delta was to be applied to other weights than its base: nothing was written."""


class VersionGone(WeightSyncError):
    """The version asked for is not in the store any more: nothing was written."""


class StaleIncarnation(WeightSyncError):
    """A publisher of an older incarnation tried to move HEAD: another has taken its place."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """dtype in safetensors' names (BF16, F32 …); shape; `nbytes` dense."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a publish did.

    `density` is the share of values that changed (1.0 without a delta), `codecs` how many changed frames are in which
    codec. `seconds` by the clock; `diff_s` (comparing) and `encode_s` are summed over threads, `write_s` is what the
    store took.
    """

    version: int
    digest: str
    anchor: bool
    dense_bytes: int
    delta_bytes: int
    anchor_bytes: int
    density: float
    codecs: dict[str, int]
    seconds: float
    diff_s: float
    encode_s: float
    write_s: float

    @property
    def ratio(self) -> float:
        """Dense bytes for each byte of the delta; of the anchor, where that is all there is."""
        return self.dense_bytes / max(1, self.delta_bytes or self.anchor_bytes)


class PullReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a pull did: bytes by `kind`; `stage_s` by the clock while the old weights served, `commit_s` the short end,
    for which serving pauses.

    `density` is the share of values that the deltas change (1.0 from an anchor), `codecs` how many changed frames were
    in which codec. Of `stage_s`, summed over threads: `transfer_s` (from the store), `verify_s`, `decode_s` and
    `apply_s` (reading the sink and handing it the changes).
    """

    version: int
    incarnation: int
    digest: str
    kind: PullKind
    dense_bytes: int
    full_bytes: int
    delta_bytes: int
    density: float
    codecs: dict[str, int]
    stage_s: float
    transfer_s: float
    verify_s: float
    decode_s: float
    apply_s: float
    commit_s: float

    @property
    def ratio(self) -> float:
        """Dense bytes for each byte that was read."""
        return self.dense_bytes / max(1, self.full_bytes + self.delta_bytes)


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Which versions a publisher keeps: each of the newest `versions` stays reachable from an anchor, as far as all of
    them together have at most `bytes` (None: no bound). The newest version and its way from an anchor always stay, and
    so does what a reader has leased. Raises ValueError for a bound below 1."""

    versions: int = 4
    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.versions < 1 or (self.bytes is not None and self.bytes < 1):
            raise ValueError("retention keeps at least 1 version and 1 byte")


class Entry(NamedTuple):
    """A blob of a store: `modified` is in seconds of the store's own clock; compare it with another entry's only."""

    key: str
    size: int
    modified: float


class Located(NamedTuple):
    """Where a blob is: its size, a tag of its state, and its file where it is one."""

    size: int
    tag: str
    path: Path | None


class Store(Protocol):
    """A keyed set of blobs. Blobs are immutable except `HEAD`, which moves by compare-and-set, and leases.

    Methods block: call them from a thread. Keys are relative POSIX paths without `..`. A store that cannot be reached
    raises OSError (ConnectionError, TimeoutError); one that is read-only raises PermissionError where it is written to.
    """

    @property
    def url(self) -> str:
        """The address under which `open_store` finds this store again (`mem:NAME`, `file:///dir`, `s3://…`)."""
        ...

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a blob atomically: a reader sees all of it or none. Chunks are taken one at a time and not kept, so
        that a generator's memory is bounded; what it raises goes through, and nothing is written."""
        ...

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        """Bytes [offset, offset + length), fewer where the blob ends. Raises FileNotFoundError if there is no such
        blob."""
        ...

    def poll(self, key: str, seen: str = "") -> tuple[bytes, str] | None:
        """A blob and a tag of this state of it; None, cheaply, while its tag is `seen`. Raises FileNotFoundError."""
        ...

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        """Set `key` to `new` if it holds `old` (None: does not exist); False if it holds something else."""
        ...

    def list(self, prefix: str) -> list[str]:
        """The keys that start with `prefix`, in order."""
        ...

    def entries(self, prefix: str) -> Sequence[Entry]:
        """What `list` lists, with sizes and times."""
        ...

    def delete(self, key: str) -> None:
        """Remove a blob; no error if there is none."""
        ...


class Payloads(Protocol):
    """Where payloads are read: a store, or what arrives from it."""

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes | memoryview: ...


@runtime_checkable
class OffsetStore(Protocol):
    """A store where several writers can fill one blob: shared files."""

    def put_at(self, key: str, size: int, pieces: Iterable[tuple[int, bytes | memoryview]]) -> None:
        """Write (offset, bytes) `pieces` of a blob of `size` bytes that nothing names yet; durable on return."""
        ...


@runtime_checkable
class RemoteStore(Store, Protocol):
    """A store behind a link: payloads come in pieces, many ranges at once, and a cut is taken up where it was."""

    def stream(self, key: str, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Bytes [start, stop) of a blob as they arrive, over one of the store's kept connections; fewer where the blob
        ends. Does not try again. Raises FileNotFoundError; OSError where the link is cut or silent."""
        ...


class SinkState(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink holds: root digest of its bytes ("" = no verified version), and which version that was."""

    digest: str = ""
    version: int = -1
    incarnation: int = 0


class Sink(Protocol):
    """Where pulled weights go. Methods block: call them from a thread. Calls never overlap, but for `read` and
    `stage_*` of different frames.

    `stage_*` prepare changes while the old weights serve; `commit` makes them current all at once and is short; if it
    raises, the old weights are in place. `abort` forgets what was staged, if anything.
    """

    whole_frames: bool
    """True: every frame is staged whole, changed or not, in an array that is the sink's only until `stage_dense`
    returns. False: only the elements that change, where that is less; the arrays stay as they are, so the sink may keep
    them."""

    def state(self) -> SinkState: ...

    def read(self, name: str, offset: int, into: Bytes) -> Bytes:
        """Bytes [offset, offset + len(into)) of a tensor, as they are before what is staged: `into`, filled, or a view
        of the sink's own memory, which nobody writes to."""
        ...

    def begin(self, layout: Sequence[TensorSpec]) -> None:
        """Raises CorruptVersion if the layout is not what this sink can hold."""
        ...

    def room(self, name: str, offset: int, length: int) -> Bytes | None:
        """Where to make that frame, which then is staged from there: memory that becomes current at `commit`. None:
        anywhere."""
        ...

    def stage_dense(self, name: str, offset: int, data: Bytes) -> None:
        """Bytes [offset, offset + len) of a tensor become `data`."""
        ...

    def stage_sparse(self, name: str, offset: int, itemsize: int, index: NDArray[np.int64], data: Bytes) -> None:
        """Elements `offset // itemsize + index` [K], in no order, of a tensor become `data` [K * itemsize]."""
        ...

    def seal(self) -> None:
        """All is staged: what can be done before `commit`, so that it is short. The last part of a stage."""
        ...

    def commit(self, state: SinkState) -> None: ...

    def abort(self) -> None: ...
