from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import anyio
import anyio.from_thread
import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astraflow.weightsync import Entry, MemoryStore, Publisher, Puller, Retention, Store, TensorSink
from astraflow.weightsync.leases import LEASE_S, LEASES, Lease, lease, leased
from astraflow.weightsync.manifest import HEAD, Head, VersionRef, decode_head, encode_head
from astraflow.weightsync.retention import removable, retained

Arrays = dict[str, np.ndarray[Any, Any]]


def ref(version: int, *, delta: int = 10, anchor: int = 0, incarnation: int = 1) -> VersionRef:
    return VersionRef(incarnation, version, f"m{version}", f"r{version}", f"r{version - 1}", delta, anchor)


# Versions 8 … 12, anchors at 8 and 10.
LIST = (ref(12), ref(11), ref(10, anchor=1000), ref(9), ref(8, anchor=1000, delta=0))


@pytest.mark.parametrize(
    ("versions", "size", "oldest"),
    [
        (1, None, 10),
        (2, None, 10),
        (3, None, 10),
        (4, None, 8),
        (9, None, 8),
        (9, 2040, 8),
        (9, 2039, 10),
        (9, 1, 10),  # the newest stays, and what it needs
    ],
)
def test_each_kept_version_keeps_its_anchor_within_the_bounds(versions: int, size: int | None, oldest: int) -> None:
    assert retained(LIST, Retention(versions=versions, bytes=size))[-1].version == oldest


def test_bounds_that_keep_nothing_are_refused() -> None:
    for bounds in ({"versions": 0}, {"bytes": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            Retention(**bounds)


def test_what_is_neither_named_nor_leased_goes() -> None:
    keys = [
        "1/v/7/a",
        "1/v/8/a",
        "1/v/9/a",
        "2/v/3/.a.tmp",
        "2/v/4/a",
        "2/v/6/a",
        "3/v/1/a",
        "HEAD",
        "leases/x",
        "x/v/1/a",
    ]
    named, held = {(2, 4), (2, 5), (1, 9)}, {(1, 7)}
    assert removable(keys, named, held, (2, 5)) == ["1/v/8/a", "2/v/3/.a.tmp"]


def test_a_lease_ends_by_the_clock_of_the_store(store: Store) -> None:
    store.put(f"{LEASES}a", [msgspec.msgpack.encode(Lease(((1, 2), (1, 3)), 60.0))])
    store.put(f"{LEASES}b", [msgspec.msgpack.encode(Lease(((1, 7),), 1e9))])
    store.put(f"{LEASES}c", [b"no lease"])
    store.put(HEAD, [b""])
    entries = list(store.entries(""))
    head = next(entry for entry in entries if entry.key == HEAD)
    assert leased(store, entries) == {(1, 2), (1, 3), (1, 7)}

    def later(seconds: float) -> list[Entry]:
        return [entry._replace(modified=head.modified + seconds) if entry is head else entry for entry in entries]

    assert leased(store, later(61)) == {(1, 7)}
    assert store.list(LEASES) == [f"{LEASES}b"]
    assert leased(store, later(3700)) == set()
    assert store.list(LEASES) == []


async def test_a_lease_is_kept_up_and_given_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.weightsync.leases.LEASE_S", 0.06)
    with anyio.fail_after(20):
        async with lease(store, [ref(3), ref(4)]):
            (first,) = store.entries(LEASES)
            while store.entries(LEASES)[0].modified == first.modified:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            store.put(HEAD, [b""])
            assert leased(store, store.entries("")) == {(1, 3), (1, 4)}
    assert store.list(LEASES) == []
    with pytest.raises(KeyError, match="as it is"):
        async with lease(store, [ref(3)]):
            raise KeyError("as it is")
    assert store.list(LEASES) == []


class Reader:
    def __init__(self, versions: tuple[VersionRef, ...], at: float) -> None:
        self.versions = versions
        self.renewed = at


class Machine(RuleBasedStateMachine):
    """A publisher and readers over a store whose clock is turned by hand, against the rules themselves."""

    clock = count()

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(f"machine-{next(self.clock)}")
        self.now = 1000.0
        self.head: tuple[VersionRef, ...] = ()
        self.incarnation = 1
        self.version = 0
        self.readers: dict[str, Reader] = {}
        self.retention = Retention()

    def teardown(self) -> None:
        self.store.close()

    def put(self, key: str, data: bytes) -> None:
        self.store.put(key, [data])
        self.store._blobs[key] = self.store._blobs[key]._replace(modified=self.now)

    @initialize(versions=st.integers(1, 5), size=st.none() | st.integers(1, 4000))
    def bound(self, versions: int, size: int | None) -> None:
        self.retention = Retention(versions=versions, bytes=size)
        self.publish(anchor=True)

    @rule(anchor=st.booleans())
    def publish(self, anchor: bool) -> None:
        """What `Stream.move` and `Stream.remove_old` do."""
        self.version += 1
        new = ref(self.version, anchor=1000 if anchor or not self.head else 0, incarnation=self.incarnation)
        self.put(f"{self.incarnation}/v/{self.version}/blob", b"x")
        self.head = retained((new, *self.head), self.retention)
        self.put(HEAD, encode_head(Head(stream="s", versions=self.head)))
        entries = self.store.entries("")
        named = {(ref.incarnation, ref.version) for ref in self.head}
        newest = (new.incarnation, new.version)
        for key in removable([entry.key for entry in entries], named, leased(self.store, entries), newest):
            self.store.delete(key)

    @rule()
    def take_over(self) -> None:
        self.incarnation += 1
        self.version = max(0, self.version - 2)

    @precondition(lambda self: len(self.readers) < 4)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """A lease on a way from an anchor to the newest."""
        length = data.draw(st.integers(1, len(self.head)))
        key = f"{LEASES}{len(self.readers)}-{self.now}"
        self.readers[key] = Reader(self.head[:length], self.now)
        self.renew(key)

    @precondition(lambda self: bool(self.readers))
    @rule(data=st.data(), ends=st.booleans())
    def renew_or_end(self, data: st.DataObject, ends: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.readers)))
        if ends:
            self.store.delete(key)
            del self.readers[key]
        elif self.now - self.readers[key].renewed <= LEASE_S:  # a reader later than that found its versions gone
            self.renew(key)

    def renew(self, key: str) -> None:
        self.readers[key].renewed = self.now
        versions = tuple((ref.incarnation, ref.version) for ref in self.readers[key].versions)
        self.put(key, msgspec.msgpack.encode(Lease(versions, LEASE_S)))

    @rule(seconds=st.sampled_from([1.0, 25.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def there(self) -> set[tuple[int, int]]:
        return {(int(key.split("/")[0]), int(key.split("/")[2])) for key in self.store.list("") if "/v/" in key}

    @invariant()
    def leased_versions_can_be_read(self) -> None:
        for reader in self.readers.values():
            if self.now - reader.renewed <= LEASE_S:
                assert {(ref.incarnation, ref.version) for ref in reader.versions} <= self.there()

    @invariant()
    def named_versions_can_be_read_and_reach_an_anchor(self) -> None:
        assert {(ref.incarnation, ref.version) for ref in self.head} <= self.there()
        assert not self.head or self.head[-1].anchor_bytes

    @invariant()
    def the_bounds_hold(self) -> None:
        if not self.head:
            return
        anchors = [position for position, ref in enumerate(self.head) if ref.anchor_bytes]
        assert all(position + 1 < self.retention.versions for position in anchors[:-1])
        total = sum(ref.delta_bytes + ref.anchor_bytes for ref in self.head)
        assert self.retention.bytes is None or total <= self.retention.bytes or len(anchors) == 1


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRetention = Machine.TestCase


class Slow:
    """A store whose anchors take as long as the test lets them."""

    def __init__(self, store: Store, during: Callable[[], None]) -> None:
        self._store = store
        self._during: Callable[[], None] | None = during

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        if key.endswith(".safetensors") and self._during is not None:
            during, self._during = self._during, None
            during()
        return self._store.read(key, offset, length)


@pytest.fixture
def steps(model: Arrays, change: Callable[[Arrays, int], None]) -> Iterator[int]:
    def forever() -> Iterator[int]:
        for version in count():
            if version:
                change(model, version)
            yield version

    return forever()


async def test_a_version_that_is_read_is_not_removed(
    store: Store,
    small_frames: int,
    model: Arrays,
    steps: Iterator[int],
    copy: Callable[[Arrays], Arrays],
    same: Callable[[Arrays, Arrays], bool],
) -> None:
    publisher = Publisher(store, stream="s", incarnation=1, anchor_every=1, retention=Retention(versions=1))
    await publisher.publish(model, next(steps))
    first, live = copy(model), copy(model)

    def publish_many() -> None:
        for _ in range(5):
            anyio.from_thread.run(publisher.publish, model, next(steps))
        named = {ref.version for ref in decode_head(store.read(HEAD)).versions}
        assert named == {5}
        assert {key.split("/")[2] for key in store.list("1/v/")} == {"0", "5"}

    pulled = await Puller(Slow(store, publish_many), TensorSink(live)).pull()
    assert pulled is not None
    assert pulled.version == 0
    assert same(live, first)
    await publisher.publish(model, next(steps))
    assert {key.split("/")[2] for key in store.list("1/v/")} == {"6"}
