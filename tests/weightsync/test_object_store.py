"""A bucket behind a real S3 server (moto's), reached as any other would be."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from astraflow.weightsync import ObjectStore, Publisher, Puller, Retention, StaleIncarnation, TensorSink, open_store

Arrays = dict[str, np.ndarray[Any, Any]]
InTurn = Callable[[Publisher, Arrays, Puller, Arrays, int], Awaitable[list[str]]]


def test_put_read_list_delete(bucket: ObjectStore) -> None:
    bucket.put("1/v/2/blob", [b"ab", np.arange(10, dtype=np.uint8).data, b""])
    bucket.put("1/v/21/blob", [b"x"])
    bucket.put("none", [])
    assert bytes(bucket.read("1/v/2/blob")) == b"ab" + bytes(range(10))
    assert bytes(bucket.read("1/v/2/blob", 1, 3)) == b"b\x00\x01"
    assert bytes(bucket.read("1/v/2/blob", 10, 100)) == b"\x08\x09"
    assert bytes(bucket.read("1/v/2/blob", 12, 1)) == bytes(bucket.read("1/v/2/blob", 100)) == b""
    assert bytes(bucket.read("none")) == bytes(bucket.read("none", 0, 0)) == b""
    assert bucket.list("1/v/2") == ["1/v/2/blob", "1/v/21/blob"]
    assert bucket.list("") == ["1/v/2/blob", "1/v/21/blob", "none"]
    assert [entry.size for entry in bucket.entries("1/v/2/")] == [12]
    bucket.delete("1/v/2/blob")
    bucket.delete("1/v/2/blob")
    with pytest.raises(FileNotFoundError, match="1/v/2/blob"):
        bucket.read("1/v/2/blob")


def test_a_large_blob_goes_up_in_parts_and_not_at_all_where_its_source_fails(bucket: ObjectStore) -> None:
    pieces = [os.urandom(9 << 20), os.urandom(20 << 20), b"end"]
    bucket.put("large", iter(pieces))
    assert bytes(bucket.read("large")) == b"".join(pieces)

    def fails() -> Iterator[bytes]:
        yield from pieces
        raise RuntimeError("the encoder failed")

    with pytest.raises(RuntimeError, match="encoder"):
        bucket.put("broken", fails())
    assert bucket.list("") == ["large"]


def test_head_moves_by_conditional_put(bucket: ObjectStore) -> None:
    other = open_store(bucket.url)
    assert not bucket.swap("HEAD", b"x", b"a")
    assert bucket.swap("HEAD", None, b"a")
    assert not other.swap("HEAD", None, b"b")
    assert not other.swap("HEAD", b"b", b"c")
    polled = other.poll("HEAD")
    assert polled is not None
    assert polled[0] == b"a"
    assert other.poll("HEAD", polled[1]) is None
    assert bucket.swap("HEAD", b"a", b"b")
    assert bytes(other.read("HEAD")) == b"b"
    assert other.poll("HEAD", polled[1]) is not None


async def test_a_stream_is_a_range(bucket: ObjectStore) -> None:
    data = os.urandom(3 << 20)
    bucket.put("blob", [data])
    assert b"".join([piece async for piece in bucket.stream("blob", 1000, 2 << 20)]) == data[1000 : 2 << 20]
    assert b"".join([piece async for piece in bucket.stream("blob", 1000, 9 << 20)]) == data[1000:]
    assert [piece async for piece in bucket.stream("blob", 3 << 20, 9 << 20)] == []
    with pytest.raises(FileNotFoundError):
        await anext(aiter(bucket.stream("nothing", 0, 1)))


async def test_publish_and_pull(
    bucket: ObjectStore,
    small_frames: int,
    model: Arrays,
    copy: Callable[[Arrays], Arrays],
    same: Callable[[Arrays, Arrays], bool],
    in_turn: InTurn,
) -> None:
    live = copy(model)
    first = Publisher(bucket, stream="s", incarnation=1)
    puller = Puller(open_store(bucket.url), TensorSink(live))
    assert await in_turn(first, model, puller, live, 3) == ["full", "delta", "delta"]
    await Publisher(open_store(bucket.url), stream="s", incarnation=2, retention=Retention(versions=1)).publish(
        model, 1
    )
    with pytest.raises(StaleIncarnation):
        await first.publish(model, 3)
    assert not [key for key in bucket.list("") if key.startswith("1/")]
    assert await puller.pull() is not None
    assert same(live, model)


def test_an_unreachable_bucket_is_a_connection_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(
        "s3://nowhere",
        endpoint="http://127.0.0.1:1",
        access_key_id="a",
        secret_access_key="b",
        client_options={"allow_http": True},
    )
    store._calls = store._streams  # which does not try again
    with pytest.raises(ConnectionError, match="s3://nowhere/HEAD"):
        store.read("HEAD")
