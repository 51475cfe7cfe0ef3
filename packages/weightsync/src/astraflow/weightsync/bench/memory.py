"""How much memory an encoding, a publisher or a sink takes, each in a process of its own.

    python -m astraflow.weightsync.bench.memory PAIR.npz NAME

prints by how many bytes the process's anonymous memory rose at most, read every few milliseconds. `NAME` is an
encoding's (one frame packed and unpacked after the other), `publisher` (a first version and a delta), `file` (both
pulled into a safetensors directory) or `live` (the delta pulled into tensors).
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import numpy as np
from numpy.typing import NDArray

from .. import DirectoryStore, Publisher, Puller, SafetensorsSink, TensorSink
from ..interface import Sink, Tensors
from .encodings import encodings

COPIES = 6
"""The tensors are published this often, so that a copy of the model is more than a few frames."""
_INTERVAL_S = 0.002


def in_child(pair: Path, name: str) -> int:
    """Raises CalledProcessError if the child fails."""
    command = [sys.executable, "-m", __name__, str(pair), name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


class Peak:
    """By how much anonymous memory rose at most, in bytes, since the start of any one `watched` stretch."""

    def __init__(self) -> None:
        self.rise = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        _give_back()
        before, done = _anonymous(), threading.Event()

        def watch() -> None:
            while not done.wait(_INTERVAL_S):
                self.rise = max(self.rise, _anonymous() - before)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield
        finally:
            done.set()
            watching.join()


def _give_back() -> None:
    """What was freed before would otherwise be used again, unseen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status does not tell the anonymous memory")


class _Versions:
    """Two versions of the tensors, by name, as bf16 bits."""

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as stored:
            self.old = _side(dict(stored), "old.")
            self.new = _side(dict(stored), "new.")


def _side(stored: dict[str, NDArray[np.uint16]], prefix: str) -> dict[str, NDArray[np.uint16]]:
    return {name.removeprefix(prefix): bits for name, bits in stored.items() if name.startswith(prefix)}


def save(path: Path, old: dict[str, NDArray[np.uint16]], new: dict[str, NDArray[np.uint16]]) -> None:
    """For `in_child`."""
    arrays = {f"old.{name}": bits for name, bits in old.items()} | {f"new.{name}": bits for name, bits in new.items()}
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _encoding(name: str, versions: _Versions, peak: Peak) -> None:
    [encoding] = [one for one in encodings() if one.name == name]
    with peak.watched():
        for key, bits in versions.old.items():
            old, new = (side.reshape(-1).view(np.uint8) for side in (bits, versions.new[key]))
            encoding.unpack(encoding.pack(old, new), old)


async def _publisher(old: Tensors, new: Tensors, directory: Path, peak: Peak) -> None:
    with peak.watched():
        publisher = Publisher(DirectoryStore(directory), stream="bench", incarnation=1)
        await publisher.publish(old, 0)
        await publisher.publish(new, 1)


async def _sink(sink: Sink, old: Tensors, new: Tensors, directory: Path, peak: Peak) -> None:
    store = DirectoryStore(directory / "store")
    publisher = Publisher(store, stream="bench", incarnation=1)
    puller = Puller(store, sink)
    for version, tensors in enumerate((old, new)):
        await publisher.publish(tensors, version)
        with peak.watched():
            report = await puller.pull()
            assert report is not None


def _tensors(bits: dict[str, NDArray[np.uint16]]) -> Tensors:
    import torch

    return {
        f"{copy}.{name}": torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        for copy in range(COPIES)
        for name, array in bits.items()
    }


def _main(path: str, name: str) -> int:
    peak, versions = Peak(), _Versions(Path(path))
    if name not in ("publisher", "file", "live"):
        _encoding(name, versions, peak)
        return peak.rise
    old, new = _tensors(versions.old), _tensors(versions.new)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        runs: dict[str, Callable[[], Awaitable[None]]] = {
            "publisher": lambda: _publisher(old, new, directory, peak),
            "file": lambda: _sink(SafetensorsSink(directory / "sink"), old, new, directory, peak),
            "live": lambda: _sink(TensorSink(_tensors(versions.old)), old, new, directory, peak),
        }
        anyio.run(runs[name])
    return peak.rise


if __name__ == "__main__":
    print(_main(*sys.argv[1:]))
