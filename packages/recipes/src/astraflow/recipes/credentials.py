"""What a service shows and asks for at a tls:// address: the files of a directory that `recipes certificates` wrote."""

from __future__ import annotations

from pathlib import Path

import msgspec

from astraflow.rpc import Tls, Token, TokenFile


class Credentials(msgspec.Struct, frozen=True):
    """None of either is for addresses of this machine."""

    tls: Tls | None = None
    token: Token | None = None


def credentials_of(role: str, directory: Path | None, token_file: Path | None) -> Credentials:
    """Those of a `role`, server or client. Without `token_file` the directory's own `token` counts if it is there."""
    if directory is not None and token_file is None and (directory / "token").exists():
        token_file = directory / "token"
    return Credentials(
        tls=None
        if directory is None
        else Tls(
            ca=directory / "ca.pem",
            certificate=directory / f"{role}.pem",
            key=directory / f"{role}-key.pem",
        ),
        token=None if token_file is None else TokenFile(token_file),
    )
