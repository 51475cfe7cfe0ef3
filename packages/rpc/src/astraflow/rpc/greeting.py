"""Who is let in: what a listener must have before strangers may reach it, and what speaks against a client's Hello."""

from __future__ import annotations

import anyio.to_thread
import msgspec

from . import frames
from .address import HOW_TO_MAKE, Address, TlsAddress, is_loopback
from .describe import Description
from .frames import DECODE_ERRORS, Payload
from .schema import Table, differences
from .sparing import SparingLog
from .tls import ServerCertificates, Tls
from .token import Token, is_one_of, read_tokens

MAX_DIFFERENCES = 20
MAX_LINE = 160

Objection = tuple[frames.RefusalKind, str]


async def credentials_objection(hello: frames.Hello, token: Token | None, log: SparingLog) -> Objection | None:
    if token is None:
        return None
    try:
        tokens = await anyio.to_thread.run_sync(read_tokens, token)
    except (OSError, ValueError) as error:
        log.warning("nobody can be let in: the token cannot be read", reason=str(error))
        return "Unauthorized", "the server cannot read its token"
    if not is_one_of(hello.token, tokens):
        return "Unauthorized", "the token is wrong" if hello.token else "a token is required"
    return None


def language_objection(hello: frames.Hello, payload: Payload, ours: Description) -> Objection | None:
    if hello.version != frames.VERSION:
        return "InterfaceMismatch", f"protocol version {hello.version}, this server speaks {frames.VERSION}"
    if hello.fingerprint == ours.fingerprint:
        return None
    try:
        theirs = msgspec.msgpack.decode(payload, type=Table)
        found = differences(theirs, ours.table)
    except (*DECODE_ERRORS, IndexError) as error:
        return "ProtocolError", f"unreadable method table: {error}"
    if not found:
        return None
    shown = "".join(f"\n  {line[:MAX_LINE]}" for line in found[:MAX_DIFFERENCES])
    more = f"\n  and {len(found) - MAX_DIFFERENCES} more" if len(found) > MAX_DIFFERENCES else ""
    sides = f"the client's {theirs.interface[:MAX_LINE]} ({hello.fingerprint[:16]})"
    return "InterfaceMismatch", f"{sides} is not the server's {ours.name} ({ours.fingerprint}):{shown}{more}"


def protection(address: Address, tls: Tls | None, token: Token | None) -> ServerCertificates | None:
    """What a listener shows, at a tls:// address. Raises ValueError if it would not be safe there."""
    if token is not None:
        read_tokens(token)
    if not isinstance(address, TlsAddress):
        if tls is not None:
            raise ValueError(f"{address} is not encrypted, tls= is for a tls:// address")
        return None
    missing = [name for name, value in (("TLS certificates", tls), ("a token", token)) if value is None]
    if tls is None or (token is None and not is_loopback(address.host)):
        raise ValueError(f"{address}: refusing to listen there without {' and '.join(missing)}. {HOW_TO_MAKE}")
    return ServerCertificates(tls)
