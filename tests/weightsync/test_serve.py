"""A directory served over HTTP and HTTPS, by real sockets."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import numpy as np
import pytest
import trustme

from astraflow.weightsync import (
    DirectoryStore,
    HttpStore,
    Publisher,
    Puller,
    Retention,
    TensorSink,
    Tls,
    open_store,
    serve,
)
from astraflow.weightsync.requests import Part, leasable, names, part, readable

Arrays = dict[str, np.ndarray[Any, Any]]
TOKEN = "a token that is long enough"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, Part(0, 10, True)),
        ("bytes=0-3", Part(0, 4, False)),
        ("bytes=4-", Part(4, 10, False)),
        ("bytes=-3", Part(7, 10, False)),
        ("bytes=-30", Part(0, 10, False)),
        ("bytes=8-100", Part(8, 10, False)),
        ("bytes=10-", None),
        ("bytes=-0", None),
        ("bytes=5-4", Part(0, 10, True)),
        ("bytes=-", Part(0, 10, True)),
        ("bytes=0-1,4-5", Part(0, 10, True)),
        ("items=0-1", Part(0, 10, True)),
    ],
)
def test_ranges(header: str | None, expected: Part | None) -> None:
    assert part(header, 10) == expected


def test_only_keys_of_versions_exist() -> None:
    assert all(map(readable, ["HEAD", "1/v/2/model.safetensors", "1/v/2/delta-00001-of-00002.ws"]))
    hidden = ["", "1", "1/v/2", "1/v/2/", "1/v/2/../../x", "1/v/2/.x.tmp", "/HEAD", "leases/" + "a" * 32, ".HEAD.lock"]
    assert not any(map(readable, [*hidden, "1/v/2/a/b", "x/v/2/a", "HEAD\n", "1/v/2/a%2f"]))
    assert leasable("leases/" + "0" * 32)
    assert not any(map(leasable, ["leases/x", "leases/../HEAD", "leases/" + "0" * 33, "HEAD"]))


def test_tags() -> None:
    assert names('"a"', '"a"')
    assert names('W/"b", "a"', '"a"')
    assert names("*", '"a"')
    assert not names('"b"', '"a"')
    assert not names(None, '"a"')


@asynccontextmanager
async def served(store: DirectoryStore, **options: Any) -> AsyncIterator[str]:
    async with anyio.create_task_group() as tasks:
        yield await tasks.start(partial(serve, store, **options))
        tasks.cancel_scope.cancel()


def request(url: str, method: str, path: str, **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


async def ask(url: str, method: str, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    response, body = await anyio.to_thread.run_sync(partial(request, url, method, path, **headers))
    return response.status, body, {name.lower(): value for name, value in response.getheaders()}


async def test_ranges_and_conditions_are_answered(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    data = os.urandom(100_000)
    store.put("1/v/2/model.safetensors", [data])
    store.put("1/v/2/delta.ws", [])
    store.swap("HEAD", None, b"first")
    async with served(store) as url:
        blob = "/1/v/2/model.safetensors"
        status, body, headers = await ask(url, "GET", blob, range="bytes=10-19")
        assert (status, body, headers["content-range"]) == (206, data[10:20], "bytes 10-19/100000")
        assert (await ask(url, "GET", blob))[:2] == (200, data)
        assert (await ask(url, "GET", blob, range="bytes=99990-"))[:2] == (206, data[-10:])
        status, body, outside = await ask(url, "GET", blob, range="bytes=100000-")
        assert (status, body, outside["content-range"]) == (416, b"", "bytes */100000")
        assert (await ask(url, "GET", blob, if_none_match=headers["etag"]))[0] == 304
        assert (await ask(url, "GET", blob, range="bytes=0-0", if_range='"other"'))[:2] == (200, data)
        assert (await ask(url, "GET", "/1/v/2/delta.ws"))[:2] == (200, b"")
        status, body, headers = await ask(url, "HEAD", blob)
        assert (status, body, headers["content-length"]) == (200, b"", "100000")

        status, body, headers = await ask(url, "GET", "/HEAD")
        assert (status, body, headers["cache-control"]) == (200, b"first", "no-cache")
        assert (await ask(url, "GET", "/HEAD", if_none_match=headers["etag"]))[:2] == (304, b"")
        store.swap("HEAD", b"first", b"second")
        assert (await ask(url, "GET", "/HEAD", if_none_match=headers["etag"]))[:2] == (200, b"second")


async def test_nothing_else_can_be_had(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.put("1/v/2/delta.ws", [b"x"])
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "store/1/v/2/link.ws").symlink_to(tmp_path / "secret")
    (tmp_path / "store/1/v/2/directory.ws").mkdir()
    async with served(store) as url:
        paths = ["/", "/1", "/1/v/2", "/../secret", "/1/v/2/../../../../secret", "/1/v/2/..%2f..%2f..%2f..%2fsecret"]
        paths += ["/%2e%2e/secret", "//secret", "/1/v/2/link.ws", "/1/v/2/directory.ws", "/1/v/9/delta.ws", "/HEAD"]
        paths += [f"/{key}" for key in (".HEAD.lock", "leases/" + "a" * 32)]
        for path in paths:
            status, body, _ = await ask(url, "GET", path)
            assert (path, status) == (path, 404)
            assert b"secret" not in body
        for method, path in (("PUT", "/1/v/2/delta.ws"), ("DELETE", "/1/v/2/delta.ws"), ("POST", "/HEAD")):
            assert (await ask(url, method, path))[0] == 405
        assert (await ask(url, "PUT", "/leases/" + "a" * 32))[0] == 400  # no lease
        assert (await ask(url, "PUT", "/leases/../HEAD"))[0] == 405
    assert store.list("") == ["1/v/2/delta.ws", "1/v/2/link.ws"]


async def test_a_token_is_asked_for_everywhere(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.swap("HEAD", None, b"head")
    async with served(store, token=TOKEN) as url:
        for header in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"):
            status, _, headers = await ask(url, "GET", "/HEAD", authorization=header)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert (await ask(url, "PUT", "/leases/" + "a" * 32, authorization=header))[0] == 401
        assert (await ask(url, "GET", "/HEAD", authorization=f"bearer {TOKEN}"))[:2] == (200, b"head")
        assert bytes(await anyio.to_thread.run_sync(HttpStore(url, token=TOKEN).read, "HEAD")) == b"head"
        with pytest.raises(PermissionError, match="HEAD"):
            await anyio.to_thread.run_sync(HttpStore(url, token="another token, wrong").read, "HEAD")


async def test_beyond_loopback_tls_and_a_token_are_required(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    tls = Tls(tmp_path / "cert.pem", tmp_path / "key.pem")
    for options in ({}, {"token": TOKEN}, {"tls": tls}):
        with pytest.raises(ValueError, match=r"openssl req .* secrets; print"):
            await serve(store, host="0.0.0.0", **options)
    with pytest.raises(ValueError, match="16 characters"):
        await serve(store, token="short")


async def test_a_port_in_use_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with anyio.fail_after(20), pytest.raises(OSError, match="cannot serve"):
            await serve(DirectoryStore(tmp_path), port=taken.getsockname()[1])


@pytest.fixture
def tls(tmp_path: Path) -> tuple[Tls, Path]:
    """A server's certificate and the authority that signed it."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    paths = Tls(tmp_path / "cert.pem", tmp_path / "key.pem")
    paths.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key = subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-nocrypt"],
        input=issued.private_key_pem.bytes(),
        capture_output=True,
        check=True,
    )
    paths.key.write_bytes(key.stdout)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return paths, tmp_path / "ca.pem"


async def test_publish_and_pull_over_https(
    tmp_path: Path,
    tls: tuple[Tls, Path],
    small_frames: int,
    model: Arrays,
    change: Callable[[Arrays, int], None],
    copy: Callable[[Arrays], Arrays],
    same: Callable[[Arrays, Arrays], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = DirectoryStore(tmp_path / "store")
    publisher = Publisher(store, stream="s", incarnation=1, retention=Retention(versions=1), anchor_every=1)
    live = copy(model)
    certificates, authority = tls
    async with served(store, host="127.0.0.1", token=TOKEN, tls=certificates) as url:
        assert url.startswith("https://")
        monkeypatch.setenv("WEIGHTSYNC_TOKEN", TOKEN)
        with pytest.raises(ConnectionError):  # who signed it?
            await anyio.to_thread.run_sync(open_store(url).read, "HEAD")
        monkeypatch.setenv("WEIGHTSYNC_CA_FILE", str(authority))
        remote = open_store(url)
        puller = Puller(remote, TensorSink(live))
        assert await puller.pull() is None
        for version in range(3):
            await publisher.publish(model, version)
            pulled = await puller.pull()
            assert pulled is not None
            assert same(live, model)
            change(model, version)
        assert store.list("leases/") == []
        with pytest.raises(PermissionError):
            await anyio.to_thread.run_sync(remote.swap, "HEAD", None, b"x")
        context = ssl.create_default_context(cafile=str(authority))
        connection = HTTPSConnection(urlsplit(url).netloc, context=context, timeout=20)

        await anyio.to_thread.run_sync(connection.connect)
        assert connection.sock.version() == "TLSv1.3"
        connection.close()


def test_a_token_is_not_sent_in_clear() -> None:
    with pytest.raises(ValueError, match="https"):
        open_store("http://example.org/weights", token=TOKEN)


STOPPED = """
import signal, sys
from functools import partial
import anyio
from astraflow.weightsync import DirectoryStore, serve
async def main():
    async with anyio.create_task_group() as tasks:
        print(await tasks.start(partial(serve, DirectoryStore(sys.argv[1]))), flush=True)
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                break
        tasks.cancel_scope.cancel()
anyio.run(main)
"""


def test_an_answer_under_way_ends_before_the_server_does(tmp_path: Path) -> None:
    data = os.urandom(30 << 20)
    DirectoryStore(tmp_path).put("1/v/2/delta.ws", [data])
    server = subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        connection = HTTPConnection(urlsplit(url).netloc, timeout=30)
        connection.request("GET", "/1/v/2/delta.ws")
        response = connection.getresponse()
        body = response.read(1 << 20)
        server.terminate()
        assert body + response.read() == data
        connection.close()
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()  # type: ignore[union-attr]
