"""Behind a web server that knows nothing of this package: files by ranges, no leases, no listing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from werkzeug.serving import make_server
from werkzeug.utils import send_from_directory
from werkzeug.wrappers import Request, Response

from astraflow.weightsync import DirectoryStore, Publisher, Puller, TensorSink, open_store

Arrays = dict[str, np.ndarray[Any, Any]]
InTurn = Callable[[Publisher, Arrays, Puller, Arrays, int], Awaitable[list[str]]]


@pytest.fixture
def static(tmp_path: Path) -> Iterator[str]:
    """The URL of `tmp_path`/store as werkzeug serves files."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    @Request.application
    def application(request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return Response("read-only", 405)
        return send_from_directory(str(tmp_path / "store"), request.path.lstrip("/"), request.environ)

    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_publish_and_pull(
    tmp_path: Path, static: str, small_frames: int, model: Arrays, copy: Callable[[Arrays], Arrays], in_turn: InTurn
) -> None:
    store = DirectoryStore(tmp_path / "store")
    publisher = Publisher(store, stream="s", incarnation=1)
    live = copy(model)
    puller = Puller(open_store(static), TensorSink(live))
    assert not await puller.wait(0.05)
    assert await in_turn(publisher, model, puller, live, 3) == ["full", "delta", "delta"]
    assert store.list("leases/") == []


def test_it_is_read_only(tmp_path: Path, static: str) -> None:
    DirectoryStore(tmp_path / "store").put("HEAD", [b"head"])
    store = open_store(static)
    first = store.poll("HEAD")
    assert first is not None
    assert store.poll("HEAD", first[1]) is None
    assert bytes(store.read("HEAD", 1, 2)) == b"ea"
    assert bytes(store.read("HEAD", 9, 2)) == b""
    writes: Iterable[Callable[[], object]] = (
        lambda: store.put("1/v/1/delta.ws", [b""]),
        lambda: store.swap("HEAD", b"head", b"other"),
        lambda: store.delete("HEAD"),
        lambda: store.list(""),
    )
    for write in writes:
        with pytest.raises(PermissionError, match="web server"):
            write()
    with pytest.raises(OSError, match="405"):
        store.put("leases/" + "0" * 32, [b"x"])
