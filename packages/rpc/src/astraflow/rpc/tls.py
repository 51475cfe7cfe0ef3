"""TLS: which files a side needs, and the contexts made of them.

Invariant: TLS 1.3 or nothing, and a client always checks the server's certificate and name.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import msgspec
import structlog

PLAIN_PEER = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")

BROKEN_OFF = (
    "the peer broke off the TLS handshake: it may not accept our certificate, or its name, or want one that it knows; "
    "its own error or log says why"
)


log = structlog.get_logger(__name__)


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files of one side.

    A server needs `certificate` and `key`; with `ca` its clients must show a certificate of that CA (mutual TLS).
    A client trusts `ca` (None: the system's authorities) and shows `certificate` if it has one. `key` None: the key is
    in the certificate's file. Files are read whenever a client connects, and by a server when they have changed.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def server_context(tls: Tls) -> ssl.SSLContext:
    """Blocks for milliseconds.

    Raises:
        ValueError: there is no certificate, or a file is not what it should be.
        OSError: a file cannot be read.
    """
    if tls.certificate is None:
        raise ValueError("a TLS server needs a certificate: Tls(certificate=PATH, key=PATH)")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    if tls.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return _load(context, tls)


class ServerCertificates:
    """The TLS context of a listener, made anew for the next connection when its files have changed.

    Files that do not fit together, as they may while they are being replaced, leave the context as it was.
    """

    def __init__(self, tls: Tls) -> None:
        """Raises what `server_context` does."""
        self._tls = tls
        self._read = self._state()
        self._context = server_context(tls)

    def context(self) -> ssl.SSLContext:
        """Blocks for microseconds, or milliseconds when files have changed."""
        state = self._state()
        if state != self._read:
            self._read = state
            try:
                self._context = server_context(self._tls)
            except (OSError, ValueError) as error:
                log.error("new certificates are not taken, the earlier ones stay in use", reason=str(error))
            else:
                log.info("new certificates are in use", certificate=str(self._tls.certificate))
        return self._context

    def _state(self) -> list[tuple[int, ...] | None]:
        return [_identity(path) for path in _files(self._tls)]


def _files(tls: Tls) -> list[Path]:
    return [path for path in (tls.ca, tls.certificate, tls.key) if path is not None]


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def client_context(tls: Tls) -> ssl.SSLContext:
    """As `server_context`, of the other side."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca is None:
        context.load_default_certs()
    return _load(context, tls)


def _load(context: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for path in _files(tls):
        path.open("rb").close()  # its error names the file, OpenSSL's does not
    try:
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
        if tls.certificate is not None:
            # A password, even an empty one, keeps OpenSSL from asking the terminal for that of an encrypted key.
            context.load_cert_chain(tls.certificate, tls.key, password="")
    except ssl.SSLError as error:
        named = ", ".join(map(str, _files(tls)))
        raise ValueError(f"{named}: not PEM certificates and the key that belongs to them: {error}") from error
    return context


def explain(error: Exception) -> str:
    """What a failed handshake or a TLS alert means, for people."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"the peer's certificate is not accepted: {error.verify_message}"
        case ssl.SSLError() if error.reason in PLAIN_PEER:
            return f"the peer does not speak TLS here ({error.reason})"
        case ssl.SSLError():
            return f"TLS failed: {error.reason or error}"
    if isinstance(error, ConnectionError) and not str(error):
        return BROKEN_OFF  # the event loops do not send the alert that would say why
    return str(error) or type(error).__name__


def is_certificate_problem(error: BaseException | None) -> bool:
    """Whether one side did not accept the other's certificate, which trying again does not mend."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    reason = str(getattr(error, "reason", "") or "") if isinstance(error, ssl.SSLError) else ""
    return "ALERT" in reason and ("CERT" in reason or "UNKNOWN_CA" in reason)
