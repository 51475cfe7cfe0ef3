"""Bearer tokens: where they come from, and comparing them. They are read anew for every connection, so that they can be
rotated under a running server: add the new one, change the clients, take the old one out.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec


class TokenFile(msgspec.Struct, frozen=True):
    """A file with one token a line; empty lines and those that begin with # do not count.

    A server takes any of them, a client presents the first.
    """

    path: Path


class TokenVariable(msgspec.Struct, frozen=True):
    """An environment variable with one token, or several separated by blanks."""

    name: str = "ASTRAFLOW_TOKEN"


Token = str | TokenFile | TokenVariable


def read_tokens(token: Token) -> Sequence[str]:
    """At least one token, none of them empty. Blocks on the file.

    Raises:
        ValueError: there is none.
        OSError: the file cannot be read.
    """
    match token:
        case TokenFile(path):
            lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
            found, where = [line for line in lines if line and not line.startswith("#")], str(path)
        case TokenVariable(name):
            found, where = os.environ.get(name, "").split(), f"the environment variable {name}"
        case _:
            found, where = [token] if token.strip() else [], "the value given"
    if not found:
        raise ValueError(f"no token in {where}")
    return found


def is_one_of(presented: str, tokens: Sequence[str]) -> bool:
    """Compare in a time that says neither where a token differs nor which one matched."""
    ours = presented.encode()
    matches = [hmac.compare_digest(ours, token.encode()) for token in tokens]
    return any(matches)
