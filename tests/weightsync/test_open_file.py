"""A safetensors directory on tmpfs, where files are mapped and the mappings are kept."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from astraflow.weightsync import MemoryStore, Publisher, Puller, SafetensorsSink, WrongBase
from astraflow.weightsync.open_file import OpenFile

Arrays = dict[str, NDArray[Any]]
Change = Callable[[Arrays, int], None]


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm is no tmpfs that can be written to")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def bytes_of(directory: Path, model: Arrays) -> bool:
    """Whether the served file ends in the model's bytes, widest elements first and then by name."""
    names = sorted(model, key=lambda name: (-model[name].itemsize, name))
    body = b"".join(model[name].tobytes() for name in names)
    return (directory / "current" / "model.safetensors").read_bytes().endswith(body)


async def test_mapped_files_take_turns(
    memory: MemoryStore, memory_directory: Path, model: Arrays, change: Change
) -> None:
    publisher = Publisher(memory, stream="s", incarnation=1)
    puller = Puller(memory, SafetensorsSink(memory_directory))
    inodes = []
    for version in range(6):
        change(model, version)
        await publisher.publish(model, version)
        assert await puller.pull() is not None
        assert bytes_of(memory_directory, model)
        inodes.append((memory_directory / "current" / "model.safetensors").stat().st_ino)
    assert len(set(inodes)) == 2
    assert inodes[:2] * 3 == inodes

    again = Puller(memory, SafetensorsSink(memory_directory))  # a restart
    for version in range(6, 9):
        change(model, version)
        await publisher.publish(model, version)
        assert await again.pull() is not None
        assert bytes_of(memory_directory, model)


async def test_who_has_the_file_keeps_reading_one_version(
    memory: MemoryStore, memory_directory: Path, model: Arrays, change: Change
) -> None:
    publisher = Publisher(memory, stream="s", incarnation=1)
    puller = Puller(memory, SafetensorsSink(memory_directory))
    held = []
    for version in range(5):
        change(model, version)
        await publisher.publish(model, version)
        await puller.pull()
        path = memory_directory / "current" / "model.safetensors"
        with path.open("rb") as file:
            held.append((mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), path.read_bytes()))
    for mapped, was in held:
        assert mapped[:] == was
        mapped.close()


async def test_a_wrong_base_in_a_mapping_serves_on(
    memory: MemoryStore, memory_directory: Path, model: Arrays, change: Change
) -> None:
    publisher = Publisher(memory, stream="s", incarnation=1)
    puller = Puller(memory, SafetensorsSink(memory_directory))
    for version in range(3):
        change(model, version)
        await publisher.publish(model, version)
        await puller.pull()
    path = memory_directory / "current" / "model.safetensors"
    served = bytearray(path.read_bytes())
    served[-1] ^= 1
    with path.open("r+b") as file:
        file.write(served)
    change(model, 3)
    await publisher.publish(model, 3)
    with pytest.raises(WrongBase):
        await puller.pull()
    assert path.read_bytes() == served
    report = await puller.pull()
    assert report is not None
    assert report.kind == "full"
    assert bytes_of(memory_directory, model)


def test_a_file_with_holes_is_not_mapped(memory_directory: Path) -> None:
    """To write to a page that a full file system cannot give is a SIGBUS."""
    new = OpenFile(memory_directory / "file", 1 << 20, new=True)
    new.map()
    assert new.room(0, 10) is None
    data = np.arange(1 << 20).astype(np.uint8)
    new.write(0, data)
    new.map()
    room = new.room(4096, 100)
    assert room is not None
    room[:] = 7
    new.write(4096, room)  # made where it is to be
    new.write(0, data[:10])
    into = np.zeros(200, np.uint8)
    assert new.read(4096, into)[:101].tolist() == [7] * 100 + [100]
    assert new.is_free(1 << 20)
    assert not new.is_free(1 << 19)
    with (memory_directory / "file").open("rb"):
        assert not new.is_free(1 << 20)
    new.close()
    assert room[0] == 7


def test_elsewhere_files_are_read_and_written(tmp_path: Path) -> None:
    file = OpenFile(tmp_path / "file", 1000, new=True)
    file.write(0, np.full(1000, 5, np.uint8))
    into = np.zeros(100, np.uint8)
    assert file.read(900, into).tolist() == [5] * 100
    with pytest.raises(EOFError, match="byte 1001"):
        file.read(901, into)
    file.close()
