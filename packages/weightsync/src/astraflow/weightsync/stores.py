"""A store by its address, so that a source can be named in a message or a configuration."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from .directory_store import DirectoryStore
from .interface import Store
from .memory_store import MemoryStore


def open_store(url: str) -> Store:
    """`mem:NAME` (this process; LookupError if there is none) or `file:///dir`. Raises ValueError for another."""
    scheme, _, rest = url.partition(":")
    if scheme == "mem" and rest:
        return MemoryStore.find(rest)
    parts = urlsplit(url)
    if scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return DirectoryStore(unquote(parts.path))
    raise ValueError(f"{url!r} is no address of a store; known are mem:NAME and file:///dir")
