"""A store behind a link: a bucket (S3, GCS, Azure), or a directory that a web server gives out by ranges.

Both through obstore, so connections are kept and used again, and credentials come from where each cloud's tools look.
A bucket's HEAD moves by conditional PUT (If-Match, If-None-Match), so it needs no lock; a web server is read-only, but
for leases where it takes them (`weightsync serve` does).
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast

import anyio
import obstore
from obstore import exceptions
from obstore.store import HTTPStore, from_url

from .interface import Entry
from .leases import LEASES

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

STALL_S = 20.0
"""A range of which nothing arrives for so long is given up, to be asked for again."""

_PART = 16 << 20
"""Bytes of a part of an upload; S3 takes at most 10,000 of them."""

_UPLOADS = 8
"""Parts on their way at once."""

_CLIENT: ClientConfig = {
    "connect_timeout": timedelta(seconds=10),
    "timeout": timedelta(hours=1),
    "read_timeout": timedelta(seconds=60),
    "pool_idle_timeout": timedelta(minutes=5),
}
_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
"""What obstore reads from the environment itself, but for a client that is given options of its own."""

_RETRY: RetryConfig = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2},
}
_NO_RETRY: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}


class ObjectStore:
    """A bucket, or a prefix in one: `s3://bucket/prefix`, `gs://…`, `az://container/prefix`.

    `options` are obstore's for that kind (`region`, `endpoint`, `access_key_id`, `client_options` …); what is not given
    comes from the environment. Needs a service that honours conditional PUTs and lists what was just written; S3, GCS
    and Azure do. An upload that is killed leaves parts behind where nobody lists them: have the bucket remove
    incomplete uploads after a day.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url.rstrip("/")
        cleartext = os.environ.get(_ALLOW_HTTP.get(url.partition(":")[0], ""), "").lower() in ("1", "true")
        client: ClientConfig = {**_CLIENT, "allow_http": cleartext, **options.pop("client_options", {})}
        self._calls = from_url(self._url, client_options=client, retry_config=_RETRY, **options)
        self._streams = from_url(self._url, client_options=_impatient(client), retry_config=_NO_RETRY, **options)

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        pieces = _pieces(chunks, _PART)
        first = list(islice(pieces, 2))
        with self._told(key):
            if len(first) < 2:
                obstore.put(self._calls, key, b"".join(first), use_multipart=False)
            else:
                rest = chain(first, pieces)
                obstore.put(self._calls, key, rest, use_multipart=True, chunk_size=_PART, max_concurrency=_UPLOADS)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> memoryview:
        if length == 0:
            return memoryview(b"")
        with self._told(key):
            try:
                asked = cast("obstore.GetOptions", {"range": _range(offset, length)})
                return memoryview(obstore.get(self._calls, key, options=asked).bytes())
            except exceptions.GenericError:  # so a range is refused that starts where the blob ends
                if obstore.head(self._calls, key)["size"] <= offset:
                    return memoryview(b"")
                raise

    def poll(self, key: str, seen: str = "") -> tuple[bytes, str] | None:
        """Tries once: who looks for news looks again."""
        with self._told(key):
            try:
                got = obstore.get(self._streams, key, options={"if_none_match": seen} if seen else None)
            except exceptions.NotModifiedError:
                return None
            return bytes(got.bytes()), got.meta["e_tag"] or ""

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        """Where the answer to a PUT was lost, what is there tells whether it was ours."""
        with self._told(key):
            try:
                if old is None:
                    obstore.put(self._calls, key, new, mode="create", use_multipart=False)
                    return True
                held = obstore.get(self._calls, key)
                if bytes(held.bytes()) != old:
                    return False
                marks = {name: held.meta.get(name) for name in ("e_tag", "version")}
                state = cast("obstore.UpdateVersion", {name: mark for name, mark in marks.items() if mark})
                obstore.put(self._calls, key, new, mode=state, use_multipart=False)
                return True
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                return bytes(self.read(key)) == new
            except FileNotFoundError:
                return False

    def list(self, prefix: str) -> list[str]:
        return [entry.key for entry in self.entries(prefix)]

    def entries(self, prefix: str) -> Sequence[Entry]:
        directory = prefix.rpartition("/")[0] or None
        with self._told(prefix):
            found = [
                Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for page in obstore.list(self._calls, directory)
                for meta in page
            ]
        return sorted(entry for entry in found if entry.key.startswith(prefix))

    def delete(self, key: str) -> None:
        with self._told(key), suppress(FileNotFoundError):
            obstore.delete(self._calls, key)

    async def stream(self, key: str, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Pieces as the connection delivers them, so that a cut loses none. Raises TimeoutError after STALL_S of
        silence."""
        with self._told(key):
            try:
                with anyio.fail_after(STALL_S):
                    asked = cast("obstore.GetOptions", {"range": (start, stop)})
                    got = await obstore.get_async(self._streams, key, options=asked)
            except exceptions.GenericError:
                if (await obstore.head_async(self._streams, key))["size"] <= start:
                    return
                raise
            pieces = aiter(got.stream(min_chunk_size=1))
            while True:
                with anyio.fail_after(STALL_S):
                    piece = await anext(pieces, b"")
                if not piece:
                    return
                yield piece

    @contextmanager
    def _told(self, key: str) -> Iterator[None]:
        """Failures as the OSErrors that `Store` names."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self._url} has no {key}") from error
        except TimeoutError as error:
            raise TimeoutError(f"{self._url}/{key}: nothing came for {STALL_S:.0f} s") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise PermissionError(f"{self._url}/{key}: {_first_line(error)}") from error
        except exceptions.BaseError as error:
            raise ConnectionError(f"{self._url}/{key}: {_first_line(error)}") from error


class HttpStore(ObjectStore):
    """What a web server gives out under a URL: `weightsync serve`, nginx, a CDN; it must answer ranges and ETags.

    `token` goes with every request as `Authorization: Bearer`; `authority` is the PEM of a private certificate
    authority. Only leases can be written, and nothing can be listed.
    """

    def __init__(self, url: str, *, token: str | None = None, authority: bytes | None = None) -> None:
        client: dict[str, Any] = {"allow_http": url.startswith("http:")}
        if token is not None:
            client["default_headers"] = {"authorization": f"Bearer {token}"}
        if authority is not None:
            client["root_certificate"] = authority
        self._url = url.rstrip("/")
        options = cast("ClientConfig", {**_CLIENT, **client})
        self._calls = HTTPStore(self._url, client_options=options, retry_config=_RETRY)
        self._streams = HTTPStore(self._url, client_options=_impatient(options), retry_config=_NO_RETRY)

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._writable(key)
        super().put(key, chunks)

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        raise PermissionError(f"{self._url} is read through a web server: publish to the directory or bucket itself")

    def entries(self, prefix: str) -> Sequence[Entry]:
        raise PermissionError(f"{self._url} is read through a web server, which lists nothing")

    def delete(self, key: str) -> None:
        self._writable(key)
        super().delete(key)

    def _writable(self, key: str) -> None:
        if not key.startswith(LEASES):
            raise PermissionError(f"{self._url} is read through a web server: {key} cannot be written there")


def _impatient(client: ClientConfig) -> ClientConfig:
    return {**client, "read_timeout": timedelta(seconds=STALL_S)}


def _range(offset: int, length: int | None) -> object:
    return {"offset": offset} if length is None else (offset, offset + length)


def _pieces(chunks: Iterable[bytes | memoryview], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of `size`, the last one shorter."""
    held = bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(view):
            taken = min(len(view), size - len(held))
            held += view[:taken]
            view = view[taken:]
            if len(held) == size:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
