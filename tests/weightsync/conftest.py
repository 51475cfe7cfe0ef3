"""Shared fixtures: stores of both kinds, a small model and how an optimiser changes it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from astraflow.weightsync import DirectoryStore, MemoryStore, ObjectStore, Publisher, Puller, Store, TensorSink

Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[MemoryStore]:
    store = MemoryStore(request.node.name)
    yield store
    store.close()


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "directory":
        return DirectoryStore(tmp_path / "store")
    memory: MemoryStore = request.getfixturevalue("memory")
    return memory


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 server (moto's) on this machine."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A store in an empty bucket, found again by `open_store`: the environment says how to reach it."""
    settings = {
        "AWS_ENDPOINT": s3_server,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    urlopen(Request(f"{s3_server}/weights", method="PUT")).close()
    yield ObjectStore("s3://weights/policy")
    urlopen(Request(f"{s3_server}/moto-api/reset", method="POST")).close()


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> int:
    """Frames so small that a small tensor has several; a reader takes the size from the manifest."""
    monkeypatch.setattr("astraflow.weightsync.publisher.FRAME_BYTES", 4096)
    return 4096


@pytest.fixture
def model() -> Arrays:
    rng = np.random.default_rng(0)
    return {
        "embed": rng.normal(size=(100, 64)).astype(np.float32),
        "half": rng.normal(size=(4099,)).astype(np.float16),
        "bias": np.array(0.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "mask": rng.integers(0, 2, 333).astype(bool),
        "steps": rng.integers(0, 1 << 40, 50),
    }


@pytest.fixture
def change() -> Callable[[Arrays, int], None]:
    """Change about 2 % of the elements' bits, in place."""

    def apply(tensors: Arrays, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for tensor in tensors.values():
            if tensor.dtype != bool:
                flat = tensor.reshape(-1).view(f"u{tensor.itemsize}")
                flat[rng.random(flat.size) < 0.02] ^= 1

    return apply


@pytest.fixture
def copy() -> Callable[[Arrays], Arrays]:
    return lambda tensors: {name: tensor.copy() for name, tensor in tensors.items()}


@pytest.fixture
def zeros() -> Callable[[Arrays], Arrays]:
    """Arrays like those of a model, to be pulled into."""
    return lambda tensors: {name: np.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def pulled(zeros: Callable[[Arrays], Arrays]) -> Callable[[Store, Arrays], Awaitable[Arrays]]:
    """What one who begins with nothing gets from a store, for a model like the one given."""

    async def pull(store: Store, tensors: Arrays) -> Arrays:
        live = zeros(tensors)
        assert await Puller(store, TensorSink(live)).pull() is not None
        return live

    return pull


@pytest.fixture
def in_turn(
    change: Callable[[Arrays, int], None], same: Callable[[Arrays, Arrays], bool]
) -> Callable[[Publisher, Arrays, Puller, Arrays, int], Awaitable[list[str]]]:
    """Publish a model so many times, changed in between, and pull each version at once; the kinds of the pulls."""

    async def run(publisher: Publisher, model: Arrays, puller: Puller, live: Arrays, versions: int) -> list[str]:
        kinds: list[str] = []
        for version in range(versions):
            await publisher.publish(model, version)
            assert await puller.wait(20)
            pulled = await puller.pull()
            assert pulled is not None
            kinds.append(pulled.kind)
            assert same(live, model)
            change(model, version)
        return kinds

    return run


@pytest.fixture
def same() -> Callable[[Arrays, Arrays], bool]:
    """Bit for bit."""
    return lambda one, other: (
        one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)
    )
