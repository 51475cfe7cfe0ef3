from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from astraflow.weightsync import DirectoryStore, MemoryStore, Store, open_store


def test_put_read_list_delete(store: Store) -> None:
    view = np.arange(10, dtype=np.uint8).data
    store.put("1/v/2/blob", [b"ab", view, b""])
    store.put("other", [b"x"])
    store.put("none", [])
    assert bytes(store.read("1/v/2/blob")) == b"ab" + bytes(range(10))
    assert bytes(store.read("1/v/2/blob", 1, 3)) == b"b\x00\x01"
    assert bytes(store.read("1/v/2/blob", 10, 100)) == b"\x08\x09"
    assert bytes(store.read("1/v/2/blob", 100)) == b""
    assert bytes(store.read("none")) == b""
    assert store.list("1/") == ["1/v/2/blob"]
    assert store.list("") == ["1/v/2/blob", "none", "other"]
    held = store.read("1/v/2/blob")
    store.delete("1/v/2/blob")
    store.delete("1/v/2/blob")
    assert store.list("1/") == []
    assert len(held) == 12
    with pytest.raises(FileNotFoundError):
        store.read("1/v/2/blob")


def test_poll_is_silent_until_something_changes(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.poll("HEAD")
    store.swap("HEAD", None, b"a")
    polled = store.poll("HEAD")
    assert polled is not None
    data, tag = polled
    assert data == b"a"
    assert store.poll("HEAD", tag) is None
    store.swap("HEAD", b"a", b"b")
    polled = store.poll("HEAD", tag)
    assert polled is not None
    assert polled[0] == b"b"
    assert polled[1] != tag


def test_entries_have_sizes_and_times_of_one_clock(store: Store) -> None:
    store.put("a/1", [b"123"])
    store.put("a/2", [])
    store.put("b", [b"x"])
    first, second = store.entries("a/")
    assert (first.key, first.size, second.key, second.size) == ("a/1", 3, "a/2", 0)
    assert first.modified <= second.modified <= store.entries("b")[0].modified < first.modified + 60


def test_swap_compares(store: Store) -> None:
    assert not store.swap("HEAD", b"x", b"a")
    assert store.swap("HEAD", None, b"a")
    assert not store.swap("HEAD", None, b"b")
    assert not store.swap("HEAD", b"b", b"c")
    assert store.swap("HEAD", b"a", b"b")
    assert bytes(store.read("HEAD")) == b"b"


def test_of_many_swaps_from_one_value_one_wins(store: Store) -> None:
    store.swap("HEAD", None, b"start")
    other = open_store(store.url)
    won: list[int] = []
    start = threading.Barrier(8)

    def race(number: int) -> None:
        start.wait()
        if (store if number % 2 else other).swap("HEAD", b"start", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert bytes(store.read("HEAD")) == str(won[0]).encode()


def test_open_store_finds_the_same_blobs(store: Store) -> None:
    store.put("a/b", [b"1"])
    assert bytes(open_store(store.url).read("a/b")) == b"1"


def test_addresses_that_name_no_store(tmp_path: Path) -> None:
    for url in ("mem:", "ftp://host/x", "/plain/path", "file://host/dir", "file:relative", "s3:", "https:///x"):
        with pytest.raises(ValueError, match="mem:NAME"):
            open_store(url)
    with pytest.raises(LookupError, match="nobody"):
        open_store("mem:nobody")
    spaced = DirectoryStore(tmp_path / "a b")
    spaced.put("x", [b"1"])
    assert bytes(open_store(spaced.url).read("x")) == b"1"


def test_a_memory_store_leaves_the_registry() -> None:
    store = MemoryStore("once")
    with pytest.raises(ValueError, match="once"):
        MemoryStore("once")
    store.close()
    store.close()
    with pytest.raises(LookupError):
        open_store("mem:once")
    MemoryStore("once").close()


@pytest.mark.parametrize("key", ["../x", "/etc/x", "a/../../x", ""])
def test_a_key_cannot_leave_the_directory(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="relative key"):
        DirectoryStore(tmp_path / "s").put(key, [b"x"])


def test_memory_is_not_copied_on_read() -> None:
    store = MemoryStore("views")
    store.put("a", [bytes(1000)])
    one, two = (np.frombuffer(store.read("a", 10), np.uint8) for _ in range(2))
    assert np.shares_memory(one, two)
    assert not one.flags.writeable
    store.close()


KILLED = """
import os, signal, sys
from astraflow.weightsync import DirectoryStore
class Chunks(list):
    def __iter__(self):
        yield b"new" * 1000
        os.kill(os.getpid(), signal.SIGKILL)
DirectoryStore(sys.argv[1]).put("v/blob", Chunks([b""]))
"""


def test_a_put_that_is_killed_leaves_the_old_blob(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("v/blob", [b"old"])
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert store.read("v/blob") == b"old"
    leftover = [key for key in store.list("v/") if key != "v/blob"]
    assert len(leftover) == 1
    store.delete(leftover[0])
    store.delete("v/blob")
    assert not (tmp_path / "v").exists()


def test_chunks_are_taken_one_at_a_time_and_a_failing_one_leaves_nothing(store: Store) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"a" * 100
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        store.put("v/blob", chunks())
    assert store.list("v/") == []
    store.put("v/blob", (bytes([byte]) for byte in range(3)))
    assert bytes(store.read("v/blob")) == b"\0\1\2"


def test_two_writers_fill_one_blob(tmp_path: Path) -> None:
    first, second = DirectoryStore(tmp_path), DirectoryStore(tmp_path)
    first.put_at("v/blob", 10, [(8, b"89"), (0, b"0123")])
    second.put_at("v/blob", 10, [(4, memoryview(b"4567"))])
    assert first.read("v/blob") == b"0123456789"
    first.put_at("v/blob", 3, [(0, b"abc")])
    assert first.read("v/blob") == b"abc"
