"""A store over HTTP(S): ranges, conditional reads, leases. What leaves this machine is encrypted and asks for a token.

Granian answers: it sends files from Rust, so that serving leaves Python's lock alone. Only HEAD and the blobs of
versions can be read; nothing is listed; only leases can be written.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote

import anyio
import anyio.abc
import anyio.to_thread

from .interface import Located, RemoteStore
from .leases import LEASES, MAX_LEASE_BYTES, decode_lease
from .manifest import HEAD
from .requests import Part, leasable, names, part, readable
from .stores import is_loopback

if TYPE_CHECKING:
    from granian._granian import RSGIHTTPProtocol as HTTPProtocol
    from granian.rsgi import Scope

MAX_LEASES = 4096
_BACKLOG = 1024
GRACE_S = 10.0
"""Answers under way have so long to end when the server is stopped."""

_MAKE_TOKEN = "python -c 'import secrets; print(secrets.token_urlsafe())'"


class Served(Protocol):
    """What `serve` needs of a store. Where `locate` tells no file, the store is a RemoteStore too."""

    @property
    def url(self) -> str: ...

    def poll(self, key: str, seen: str = "") -> tuple[bytes, str] | None: ...

    def locate(self, key: str) -> Located:
        """Raises FileNotFoundError."""
        ...

    def list(self, prefix: str) -> list[str]: ...

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None: ...

    def delete(self, key: str) -> None: ...


class Tls(NamedTuple):
    """PEM files: the certificate with its chain, and its key (PKCS 8)."""

    certificate: Path
    key: Path


async def serve(
    store: Served,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    tls: Tls | None = None,
    task_status: anyio.abc.TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve `store` until cancelled; `await tasks.start(partial(serve, store))` returns the URL, with the port that
    port 0 became.

    Raises ValueError for a host beyond loopback without `tls` and `token`, OSError where host or port cannot be had.
    """
    _check(host, token, tls)
    listening = await anyio.to_thread.run_sync(_listen, host, port)
    url = f"{'https' if tls else 'http'}://{_quoted(host)}:{listening.getsockname()[1]}"
    server = _server(Handler(store, token), listening, tls)
    failures: list[Exception] = []
    running: list[anyio.CancelScope] = []
    ended = anyio.Event()

    async def run() -> None:
        with anyio.CancelScope(shield=True) as own:  # it ends by `stop`, or after its grace by force
            running.append(own)
            try:
                await server.serve()
            except Exception as failure:
                failures.append(failure)
        ended.set()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            try:
                task_status.started(url)
                await ended.wait()
            finally:
                server.stop()
                with anyio.CancelScope(shield=True), anyio.move_on_after(GRACE_S):
                    await ended.wait()
                for own in running:
                    own.cancel()
    finally:
        listening.close()
    if failures:
        raise OSError(f"{url} is no longer served: {failures[0]}") from failures[0]


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(error.errno, f"cannot serve on {host} port {port}: {error.strerror}") from error


def _server(handler: Handler, listening: socket.socket, tls: Tls | None) -> Any:
    from granian._granian import SocketHolder
    from granian.constants import Interfaces
    from granian.server.embed import Server

    class Bound(Server):
        """On a socket that is bound already; granian's own would share its port with any other process that asks."""

        def _init_shared_socket(self) -> None:
            self._shd = SocketHolder(os.dup(listening.fileno()), False, _BACKLOG)  # type: ignore[assignment, call-arg]

    return Bound(
        handler.answer,
        interface=Interfaces.RSGI,
        websockets=False,
        log_enabled=False,
        ssl_cert=tls.certificate if tls else None,
        ssl_key=tls.key if tls else None,
    )


def _check(host: str, token: str | None, tls: Tls | None) -> None:
    if token is not None and len(token) < 16:
        raise ValueError(f"a token has at least 16 characters: {_MAKE_TOKEN}")
    if not is_loopback(host) and (token is None or tls is None):
        raise ValueError(
            f"{host} is not a loopback address, so what is served leaves this machine: give a certificate and its key "
            "(openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj /CN=HOST "
            "-addext subjectAltName=DNS:HOST -addext basicConstraints=critical,CA:FALSE -keyout key.pem -out cert.pem) "
            f"and a token ({_MAKE_TOKEN})"
        )


def _quoted(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Handler:
    """Answers one request after the other; keeps nothing between them."""

    def __init__(self, store: Served, token: str | None) -> None:
        self._store = store
        self._token = _digest(token) if token is not None else None

    async def answer(self, scope: Scope, protocol: HTTPProtocol) -> None:
        if not self._admits(scope.headers.get("authorization")):
            protocol.response_str(401, [("www-authenticate", "Bearer")], "a token is needed: Authorization: Bearer …\n")
            return
        key = unquote(scope.path).removeprefix("/")
        if leasable(key) and scope.method in ("PUT", "DELETE"):
            await self._lease(scope, protocol, key)
        elif scope.method not in ("GET", "HEAD"):
            protocol.response_str(405, [("allow", "GET, HEAD")], "only leases can be written\n")
        elif not readable(key):
            protocol.response_str(404, [], "no such key\n")
        else:
            try:
                await (self._head(scope, protocol) if key == HEAD else self._blob(scope, protocol, key))
            except FileNotFoundError:
                protocol.response_str(404, [], "no such key\n")

    def _admits(self, header: str | None) -> bool:
        if self._token is None:
            return True
        kind, _, token = (header or "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(_digest(token.strip()), self._token)

    async def _head(self, scope: Scope, protocol: HTTPProtocol) -> None:
        """Read at once with its tag: it may move between a look and a read."""
        polled = await anyio.to_thread.run_sync(self._store.poll, HEAD)
        assert polled is not None
        data, tag = polled
        headers = [("etag", f'"{tag}"'), ("cache-control", "no-cache"), ("content-type", "application/octet-stream")]
        if names(scope.headers.get("if-none-match"), f'"{tag}"'):
            protocol.response_empty(304, headers)
            return
        asked = part(scope.headers.get("range"), len(data))
        if asked is None:
            protocol.response_empty(416, [("content-range", f"bytes */{len(data)}")])
            return
        status, extra = _status(asked, len(data))
        if scope.method == "HEAD":
            protocol.response_empty(200, [*headers, ("content-length", str(len(data)))])
        else:
            protocol.response_bytes(status, headers + extra, data[asked.start : asked.stop])

    async def _blob(self, scope: Scope, protocol: HTTPProtocol, key: str) -> None:
        blob = await anyio.to_thread.run_sync(self._store.locate, key)
        headers = [
            ("etag", f'"{blob.tag}"'),
            ("accept-ranges", "bytes"),
            ("cache-control", "public, max-age=31536000, immutable"),
            ("content-type", "application/octet-stream"),
        ]
        if names(scope.headers.get("if-none-match"), f'"{blob.tag}"'):
            protocol.response_empty(304, headers)
            return
        current = scope.headers.get("if-range", f'"{blob.tag}"') == f'"{blob.tag}"'
        asked = part(scope.headers.get("range") if current else None, blob.size)
        if asked is None:
            protocol.response_empty(416, [("content-range", f"bytes */{blob.size}")])
            return
        if scope.method == "HEAD":
            protocol.response_empty(200, [*headers, ("content-length", str(blob.size))])
            return
        status, extra = _status(asked, blob.size)
        headers += [*extra, ("content-length", str(asked.stop - asked.start))]
        if asked.start == asked.stop:
            protocol.response_empty(status, headers)
        elif blob.path is not None:
            protocol.response_file_range(status, headers, str(blob.path), asked.start, asked.stop)
        else:
            assert isinstance(self._store, RemoteStore)
            transport = protocol.response_stream(status, headers)
            async for piece in self._store.stream(key, asked.start, asked.stop):
                await transport.send_bytes(piece)

    async def _lease(self, scope: Scope, protocol: HTTPProtocol, key: str) -> None:
        if scope.method == "DELETE":
            await anyio.to_thread.run_sync(self._store.delete, key)
            protocol.response_empty(204, [])
            return
        data = bytearray()
        async for piece in protocol:
            data += piece
            if len(data) > MAX_LEASE_BYTES:
                break
        if len(data) > MAX_LEASE_BYTES or decode_lease(bytes(data)) is None:
            protocol.response_str(400, [], "not a lease\n")
        elif len(await anyio.to_thread.run_sync(self._store.list, LEASES)) >= MAX_LEASES:
            protocol.response_str(503, [("retry-after", "60")], f"{MAX_LEASES} leases are held\n")
        else:
            await anyio.to_thread.run_sync(self._store.put, key, [bytes(data)])
            protocol.response_empty(201, [("etag", f'"{hashlib.blake2b(data, digest_size=8).hexdigest()}"')])


def _status(asked: Part, size: int) -> tuple[int, list[tuple[str, str]]]:
    if asked.whole:
        return 200, []
    return 206, [("content-range", f"bytes {asked.start}-{asked.stop - 1}/{size}")]


def _digest(token: str) -> bytes:
    """Of one length, whatever the token's."""
    return hashlib.sha256(token.encode()).digest()
