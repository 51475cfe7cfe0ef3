"""Pulling over links that are cut, slow or gone: bytes come once, whatever happens to the connections or the puller."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np
import pytest

from astraflow.weightsync import (
    CorruptVersion,
    DirectoryStore,
    HttpStore,
    Publisher,
    Puller,
    TensorSink,
    WeightSyncError,
    serve,
)
from astraflow.weightsync.fetch import fetching
from astraflow.weightsync.spool import FileSpool, MemorySpool, Spool, Stretch, cut_parts

Arrays = dict[str, np.ndarray[Any, Any]]
Same = Callable[[Arrays, Arrays], bool]
Zeros = Callable[[Arrays], Arrays]


class Proxy:
    """Passes TCP on, cuts every connection after `cut` bytes from the server, and counts those bytes.

    Once `limit` bytes have passed, connections that carry payloads bring nothing more.
    """

    def __init__(self, cut: int | None, limit: int | None = None) -> None:
        self.cut = cut
        self.limit = limit
        self.passed = 0
        self.connections = 0
        self.full = anyio.Event()

    async def handle(self, port: int, client: anyio.abc.SocketStream) -> None:
        self.connections += 1
        async with client, await anyio.connect_tcp("127.0.0.1", port) as server, anyio.create_task_group() as tasks:
            tasks.start_soon(self._up, client, server)
            await self._down(server, client)
            tasks.cancel_scope.cancel()

    async def _up(self, client: anyio.abc.SocketStream, server: anyio.abc.SocketStream) -> None:
        try:
            async for data in client:
                await server.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return

    async def _down(self, server: anyio.abc.SocketStream, client: anyio.abc.SocketStream) -> None:
        left = self.cut
        carried = 0
        try:
            async for data in server:
                carried += len(data)
                if self.limit is not None and self.passed >= self.limit and carried > 50_000:
                    self.full.set()
                    await anyio.sleep_forever()
                part = data if left is None else data[:left]
                await client.send(part)
                self.passed += len(part)
                if left is not None:
                    left -= len(part)
                    if not left:
                        return
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return


@asynccontextmanager
async def through(proxy: Proxy, store: DirectoryStore) -> AsyncIterator[str]:
    """The URL of `store`, served behind `proxy`."""
    async with anyio.create_task_group() as tasks:
        url = await tasks.start(partial(serve, store))
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        tasks.start_soon(listener.serve, partial(proxy.handle, urlsplit(url).port))
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not wait for connections that a test has left stuck."""
    monkeypatch.setattr("astraflow.weightsync.server.GRACE_S", 0.2)


@pytest.fixture
def large() -> Arrays:
    rng = np.random.default_rng(3)
    return {name: rng.integers(0, 1 << 32, (1 << 20) + 5, np.uint32) for name in ("one", "two")}


def bytes_of(model: Arrays) -> int:
    return sum(tensor.nbytes for tensor in model.values())


def test_parts_cover_a_blob_and_depend_on_it_alone() -> None:
    for size in (1, 256 << 10, (256 << 10) + 1, 20 << 20, 3 << 30):
        parts = cut_parts(Stretch("k", 7, 7 + size))
        assert parts[0].start == 7
        assert parts[-1].stop == 7 + size
        assert all(one.stop == after.start for one, after in pairwise(parts))
        assert max(part.stop - part.start for part in parts) <= 8 << 20
    assert len(cut_parts(Stretch("k", 0, 64 << 20))) == 32


@pytest.fixture(params=["memory", "files"])
def spool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Spool]:
    if request.param == "memory":
        yield MemorySpool()
        return
    files = FileSpool(tmp_path / "spool")
    yield files
    files.close()


def test_a_spool_keeps_what_arrived(spool: Spool) -> None:
    part = Stretch("1/v/2/delta.ws", 100, 110)
    assert spool.have(part) == 0
    spool.append(part, b"0123")
    spool.append(part, b"456789")
    assert spool.have(part) == 10
    read = spool.read(part, 102, 105)
    assert bytes(read) == b"234"
    spool.drop(part)
    assert bytes(read) == b"234"


def test_a_spool_is_one_pullers(tmp_path: Path) -> None:
    first = FileSpool(tmp_path)
    with pytest.raises(WeightSyncError, match="spool"):
        FileSpool(tmp_path)
    first.close()
    FileSpool(tmp_path).close()


@pytest.mark.parametrize("spooled", [False, True])
async def test_a_cut_connection_resumes_at_the_byte(
    tmp_path: Path, small_frames: int, large: Arrays, same: Same, spooled: bool, zeros: Zeros
) -> None:
    store = DirectoryStore(tmp_path / "store")
    await Publisher(store, stream="s", incarnation=1).publish(large, 0)
    proxy = Proxy(cut=100_000)
    live = zeros(large)
    with anyio.fail_after(100):
        async with through(proxy, store) as url:
            puller = Puller(HttpStore(url), TensorSink(live), spool=tmp_path / "spool" if spooled else None)
            assert await puller.pull() is not None
    assert same(live, large)
    assert proxy.connections > bytes_of(large) / 100_000
    # Each byte once, besides headers, HEAD, and the manifest, which is read whole, again where its connection was cut.
    assert proxy.passed < bytes_of(large) + proxy.connections * 1000 + 2_000_000
    if spooled:
        assert [path.name for path in (tmp_path / "spool").iterdir()] == [".lock"]


PULLER = """
import sys
import anyio
import numpy as np
from astraflow.weightsync import HttpStore, Puller, TensorSink
live = {name: np.zeros((1 << 20) + 5, np.uint32) for name in ("one", "two")}
report = anyio.run(Puller(HttpStore(sys.argv[1]), TensorSink(live), spool=sys.argv[2]).pull)
np.savez(sys.argv[3], **live)
"""


async def test_a_killed_puller_goes_on_at_the_byte(tmp_path: Path, large: Arrays, same: Same) -> None:
    store = DirectoryStore(tmp_path / "store")
    await Publisher(store, stream="s", incarnation=1).publish(large, 0)
    command = [sys.executable, "-c", PULLER]
    proxy = Proxy(cut=None)
    with anyio.fail_after(100):
        async with through(proxy, store) as url:
            arguments = [url, str(tmp_path / "spool"), str(tmp_path / "live.npz")]
            for limit in (2 << 20, 4 << 20, 6 << 20):
                proxy.limit, proxy.full = limit, anyio.Event()
                async with await anyio.open_process([*command, *arguments], stdout=None, stderr=None) as process:
                    await proxy.full.wait()
                    process.send_signal(signal.SIGKILL)
                    assert await process.wait() == -signal.SIGKILL
            proxy.limit = None
            await anyio.run_process([*command, *arguments])
    with np.load(tmp_path / "live.npz") as loaded:
        assert same(dict(loaded), large)
    # What was between the sockets and the files when it was killed: one piece a connection, each time.
    assert proxy.passed < bytes_of(large) + 3 * (2 << 20)


async def test_a_spool_that_was_damaged_costs_one_pull(
    tmp_path: Path, small_frames: int, large: Arrays, same: Same, zeros: Zeros
) -> None:
    store = DirectoryStore(tmp_path / "store")
    await Publisher(store, stream="s", incarnation=1).publish(large, 0)
    proxy, live = Proxy(cut=None, limit=5 << 20), zeros(large)
    with anyio.fail_after(60):
        async with through(proxy, store) as url:
            puller = Puller(HttpStore(url), TensorSink(live), spool=tmp_path / "spool")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(puller.pull)
                await proxy.full.wait()
                tasks.cancel_scope.cancel()
            proxy.limit = None
            kept = max((tmp_path / "spool").glob("1~v~0*"), key=lambda path: path.stat().st_size)
            kept.write_bytes(os.urandom(kept.stat().st_size))
            with pytest.raises(CorruptVersion):
                await puller.pull()
            assert same(live, zeros(large))
            assert await puller.pull() is not None
    assert same(live, large)


class Failing(HttpStore):
    """A link that does what the test says."""

    def __init__(self, url: str, answer: Callable[[str, int, int], AsyncGenerator[bytes, None]]) -> None:
        super().__init__(url)
        self.answer = answer

    async def stream(self, key: str, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        async for piece in self.answer(key, start, stop):
            yield piece


async def test_a_link_that_brings_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.weightsync.fetch.PATIENCE_S", 0.3)
    calls = 0

    async def cut(key: str, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        nonlocal calls
        calls += 1
        for piece in list[bytes]():
            yield piece
        raise ConnectionError("cut")

    with anyio.fail_after(30), pytest.raises(ConnectionError, match="cut"):
        async with fetching(Failing("http://127.0.0.1:1", cut), [Stretch("k", 0, 1 << 20)], 4, None) as link:
            await anyio.to_thread.run_sync(link.read, "k", 0, 10)
    assert calls > 4


async def test_a_blob_that_ends_early_is_damaged() -> None:
    async def short(key: str, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        if start < 100:
            yield bytes(100 - start)

    with anyio.fail_after(30), pytest.raises(CorruptVersion, match="ends at byte 100"):
        async with fetching(Failing("http://127.0.0.1:1", short), [Stretch("k", 0, 1000)], 4, None) as link:
            await anyio.to_thread.run_sync(link.read, "k", 0, 10)


async def test_memory_is_bounded_and_out_of_order_reads_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("astraflow.weightsync.fetch.MEMORY", 1 << 20)
    asked: list[int] = []
    data = os.urandom(4 << 20)

    async def answer(key: str, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        asked.append(start)
        for at in range(start, stop, 1000):
            yield data[at : min(at + 1000, stop)]

    with anyio.fail_after(60):
        async with fetching(Failing("http://127.0.0.1:1", answer), [Stretch("k", 0, 4 << 20)], 8, None) as link:
            await anyio.wait_all_tasks_blocked()
            assert len(asked) == 4  # of 256 KiB each
            last = await anyio.to_thread.run_sync(link.read, "k", (4 << 20) - 1000, 1000)
            assert bytes(last) == data[-1000:]
            assert len(asked) == 5
            step = 100_000
            read = [await anyio.to_thread.run_sync(link.read, "k", at, step) for at in range(0, 4 << 20, step)]
            assert b"".join(read) == data
            again = await anyio.to_thread.run_sync(link.read, "k", 0, 10)
            assert bytes(again) == data[:10]  # read before, and dropped


async def test_a_cancelled_pull_ends_at_once(tmp_path: Path, large: Arrays, zeros: Zeros) -> None:
    store = DirectoryStore(tmp_path / "store")
    await Publisher(store, stream="s", incarnation=1).publish(large, 0)
    proxy, live = Proxy(cut=None, limit=3 << 20), zeros(large)
    with anyio.fail_after(60):
        async with through(proxy, store) as url:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(Puller(HttpStore(url), TensorSink(live)).pull)
                await proxy.full.wait()
                tasks.cancel_scope.cancel()
            assert await anyio.to_thread.run_sync(store.list, "leases/") == []
    assert not any(tensor.any() for tensor in live.values())


async def test_a_slow_pull_delays_neither_the_publisher_nor_another_pull(
    tmp_path: Path, large: Arrays, same: Same, zeros: Zeros
) -> None:
    store = DirectoryStore(tmp_path / "store")
    publisher = Publisher(store, stream="s", incarnation=1, anchor_every=1)
    await publisher.publish(large, 0)
    first = {name: tensor.copy() for name, tensor in large.items()}
    stuck, quick, slow = Proxy(cut=None, limit=3 << 20), zeros(large), zeros(large)
    with anyio.fail_after(100):
        async with through(stuck, store) as url, anyio.create_task_group() as tasks:
            tasks.start_soon(Puller(HttpStore(url), TensorSink(slow)).pull)
            await stuck.full.wait()
            for version in range(1, 12):
                large["one"][version] ^= 1
                await publisher.publish(large, version)
            assert await Puller(store, TensorSink(quick)).pull() is not None
            assert same(quick, large)
            tasks.cancel_scope.cancel()
        assert (tmp_path / "store/1/v/0/model.safetensors").exists()  # it was leased
        stuck.limit = None
    assert not same(first, large)


async def test_news_are_waited_for(tmp_path: Path, small_frames: int, model: Arrays, zeros: Zeros) -> None:
    store = DirectoryStore(tmp_path / "store")
    publisher = Publisher(store, stream="s", incarnation=1)
    with anyio.fail_after(60):
        async with through(Proxy(cut=None), store) as url:
            for source in (store, HttpStore(url)):
                puller = Puller(source, TensorSink(zeros(model)))
                version = len(store.list("")) and 1
                assert await puller.wait(0.05) is bool(version)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(publisher.publish, model, version)
                    assert await puller.wait(30)
                await puller.pull()
                assert not await puller.wait(0.05)
        unreachable = Puller(HttpStore(url), TensorSink(zeros(model)))
        with pytest.raises(OSError, match="HEAD"):
            await unreachable.wait(0.1)


def test_a_puller_needs_a_connection(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="connections"):
        Puller(DirectoryStore(tmp_path), TensorSink({}), connections=0)
