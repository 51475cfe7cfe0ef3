"""TLS: which files a side needs, and the contexts made of them.

Invariant: TLS 1.3 or nothing, and a client always checks the server's certificate and name.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

PLAIN_PEER = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")

BROKEN_OFF = (
    "the peer broke off the TLS handshake: it may not accept our certificate, or its name, or want one that it knows; "
    "its own error or log says why"
)


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files of one side.

    A server needs `certificate` and `key`; with `ca` its clients must show a certificate of that CA (mutual TLS).
    A client trusts `ca` (None: the system's authorities) and shows `certificate` if it has one. `key` None: the key is
    in the certificate's file. Files are read when a server starts and whenever a client connects.
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


def client_context(tls: Tls) -> ssl.SSLContext:
    """As `server_context`, of the other side."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.ca is None:
        context.load_default_certs()
    return _load(context, tls)


def _load(context: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for path in (tls.ca, tls.certificate, tls.key):
        if path is not None:
            path.open("rb").close()  # its error names the file, OpenSSL's does not
    try:
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
        if tls.certificate is not None:
            # A password, even an empty one, keeps OpenSSL from asking the terminal for that of an encrypted key.
            context.load_cert_chain(tls.certificate, tls.key, password="")
    except ssl.SSLError as error:
        named = ", ".join(str(path) for path in (tls.ca, tls.certificate, tls.key) if path is not None)
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
