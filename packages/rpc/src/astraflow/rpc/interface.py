"""The nouns of the transport: an interface is a `typing.Protocol`, served at an address, with typed errors.

A method is `async def name(self, request: Struct, /) -> Struct` (or without argument); a server stream is
`def name(self, request: Struct, /) -> AsyncIterator[Struct]`. Code above this package holds an object of the Protocol
and never knows whether it is the implementation or a proxy. Deadlines are anyio's: whatever cancel scope surrounds
a call is carried to the server and enforced on both sides; cancelling the caller cancels the handler.

Invariants: nothing received is unpickled or evaluated and no type is chosen by the peer; no frame exceeds the limit;
a lost connection fails the calls in flight with `Unavailable`, and only idempotent methods are called again.
"""

from __future__ import annotations


class RpcError(Exception):
    """Base of the errors this package raises."""


class Unavailable(RpcError):
    """The peer cannot be reached, or the connection was lost while the call was in flight."""


class DeadlineExceeded(RpcError, TimeoutError):
    """The call did not end within its deadline."""


class InterfaceMismatch(RpcError):
    """The two sides serve different interfaces; the message names both fingerprints and what differs."""


class FrameTooLarge(RpcError):
    """A message exceeds the frame limit; it was not sent, or it was refused unread."""


class ProtocolError(RpcError):
    """The peer sent something that is not this protocol; the connection was closed."""


class Unauthorized(RpcError):
    """The peer refused the token, or one side did not accept the other's certificate."""


class RemoteError(RpcError):
    """The handler raised something that the interface does not declare.

    `kind` is the exception's class name, `summary` the last frames of the remote traceback.
    """

    def __init__(self, kind: str, message: str, summary: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.summary = summary
