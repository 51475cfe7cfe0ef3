"""Addresses: `inproc:NAME`, `unix:PATH`, `tcp://host:port` and `tls://host:port`, bound before they are announced.

Invariant: what leaves this machine is encrypted. `tcp://` is of the loopback interface only, on either side.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

BACKLOG = 512
HOW_TO_MAKE = (
    "`recipes certificates DIR --host NAME` writes a private CA, certificates and a token: serve with "
    "tls=Tls(ca=DIR/ca.pem, certificate=DIR/server.pem, key=DIR/server-key.pem), token=TokenFile(DIR/token), connect "
    "with client.pem and client-key.pem in their place"
)


@dataclass(frozen=True, slots=True)
class InprocAddress:
    name: str

    def __str__(self) -> str:
        return f"inproc:{self.name}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """`host` is an IP address of the loopback interface."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class TlsAddress:
    """`host` is an IP address or a name; a client checks that the server's certificate is for it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tls://[{self.host}]:{self.port}" if ":" in self.host else f"tls://{self.host}:{self.port}"


SocketAddress = UnixAddress | TcpAddress | TlsAddress
Address = InprocAddress | SocketAddress


def parse(text: str) -> Address:
    """Read an address.

    Raises:
        ValueError: it is malformed, or plain TCP off this machine.
    """
    if text.startswith("inproc:"):
        name = text.removeprefix("inproc:")
        if not name:
            raise ValueError("inproc: wants a name, as in inproc:dataflow")
        return InprocAddress(name)
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path:
            raise ValueError("unix: wants a path, as in unix:/run/user/1000/service.sock")
        return UnixAddress(path)
    url = urlsplit(text)
    try:
        port = url.port
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error
    if url.scheme not in ("tcp", "tls") or not url.hostname or port is None or url.path:
        raise ValueError(
            f"{text!r} is not an address: use unix:PATH or tcp://host:port, tls://host:port or inproc:NAME"
        )
    if url.scheme == "tls":
        return TlsAddress(url.hostname, port)
    if not is_loopback(url.hostname):
        raise ValueError(
            f"{text}: {url.hostname} is not a loopback address, and tcp:// is not encrypted: use "
            f"tls://{url.hostname}:{port} with TLS certificates and a token. {HOW_TO_MAKE}"
        )
    return TcpAddress("127.0.0.1" if url.hostname == "localhost" else url.hostname, port)


def is_loopback(host: str) -> bool:
    """Whether a host is certainly this machine's loopback interface; a name is not, but for localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(address: SocketAddress) -> tuple[socket.socket, SocketAddress]:
    """A listening socket, and the address it is bound to (port 0 resolved). Blocks for milliseconds.

    Raises:
        OSError: the address is in use, or cannot be bound.
    """
    if isinstance(address, UnixAddress):
        return _bind_unix(address.path), address
    try:
        family, _, _, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
    return listener, replace(address, port=listener.getsockname()[1])


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # Locking the directory keeps two starting servers from taking each other's fresh socket for a stale one.
    directory = -1
    try:
        directory = os.open(Path(path).absolute().parent, os.O_RDONLY)
        fcntl.flock(directory, fcntl.LOCK_EX)
        _remove_stale(path)
        listener.bind(path)
        os.chmod(path, 0o600)  # nobody connects before listen()
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on unix:{path}: {error.strerror or error}") from error
    finally:
        if directory >= 0:
            os.close(directory)
    return listener


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise OSError(errno.EADDRINUSE, "another server is listening there")


class UnixPath:
    """The file of a bound Unix socket; `remove()` takes it away unless another server's has replaced it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._identity = self._stat()

    def _stat(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def remove(self) -> None:
        identity, self._identity = self._identity, None  # once: the next server's file may get the same inode
        if identity is not None and self._stat() == identity:
            os.unlink(self._path)
