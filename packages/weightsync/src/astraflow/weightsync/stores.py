"""A store by its address, so that a source can be named in a message or a configuration."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from .directory_store import DirectoryStore
from .interface import Store
from .memory_store import MemoryStore
from .object_store import HttpStore, ObjectStore

BUCKETS = ("s3", "gs", "az")
TOKEN = "WEIGHTSYNC_TOKEN"
TOKEN_FILE = "WEIGHTSYNC_TOKEN_FILE"
CA_FILE = "WEIGHTSYNC_CA_FILE"


def open_store(url: str, **options: Any) -> Store:
    """The store at an address.

    * `mem:NAME`: of this process; LookupError if there is none.
    * `file:///dir`: a directory.
    * `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`: a bucket. `options` are obstore's;
      the rest, credentials too, comes from the environment (AWS_…, GOOGLE_…, AZURE_…).
    * `http://…`, `https://…`: a web server, read-only. `token` and `ca_file` (PEM), or the environment's
      WEIGHTSYNC_TOKEN or WEIGHTSYNC_TOKEN_FILE, and WEIGHTSYNC_CA_FILE. A token goes in clear to loopback only.

    Raises ValueError for another.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "mem" and rest:
        return MemoryStore.find(rest)
    parts = urlsplit(url)
    if scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return DirectoryStore(unquote(parts.path))
    if scheme in BUCKETS and parts.netloc:
        return ObjectStore(url, **options)
    if scheme in ("http", "https") and parts.netloc:
        return _open_http(url, parts, **options)
    raise ValueError(
        f"{url!r} is no address of a store; known are mem:NAME, file:///dir, s3://, gs://, az://, https://"
    )


def is_loopback(host: str) -> bool:
    """Whether a host is certainly this machine's loopback interface; a name is not, but for localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _open_http(url: str, parts: SplitResult, *, token: str | None = None, ca_file: str | None = None) -> HttpStore:
    token = token if token is not None else token_from_environment()
    if token is not None and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ValueError(f"{url} would send the token in clear: use https://")
    authority = ca_file or os.environ.get(CA_FILE)
    return HttpStore(url, token=token, authority=Path(authority).read_bytes() if authority else None)


def token_from_environment() -> str | None:
    """WEIGHTSYNC_TOKEN, or what the file WEIGHTSYNC_TOKEN_FILE names holds; None without either."""
    if path := os.environ.get(TOKEN_FILE):
        return Path(path).read_text().strip()
    return os.environ.get(TOKEN)
