"""What a request to a served store asks for: which keys exist for the outside, byte ranges (RFC 9110, section 14)."""

from __future__ import annotations

import re
from typing import NamedTuple

from .leases import LEASES
from .manifest import HEAD

_BLOB = re.compile(r"[0-9]{1,20}/v/[0-9]{1,20}/[A-Za-z0-9][A-Za-z0-9._-]{0,120}")
_LEASE = re.compile(re.escape(LEASES) + r"[0-9a-f]{32}")
_RANGE = re.compile(r"bytes=(\d{0,20})-(\d{0,20})")


class Part(NamedTuple):
    """Bytes [start, stop) of a blob; `whole`: no range was asked for, or none that is understood."""

    start: int
    stop: int
    whole: bool


def readable(key: str) -> bool:
    """HEAD and what belongs to a version; no lease, no temporary file, no path that leads elsewhere."""
    return key == HEAD or _BLOB.fullmatch(key) is not None


def leasable(key: str) -> bool:
    return _LEASE.fullmatch(key) is not None


def part(header: str | None, size: int) -> Part | None:
    """The one range that a Range header asks for; None if it lies outside (416). Several ranges are not understood."""
    match = _RANGE.fullmatch(header.strip()) if header is not None else None
    if match is None or not any(match.groups()):
        return Part(0, size, True)
    first, last = match.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return Part(0, size, True)
    return Part(start, stop, False) if start < stop else None


def names(header: str | None, tag: str) -> bool:
    """Whether an If-None-Match header names this tag."""
    if header is None:
        return False
    tags = [item.strip().removeprefix("W/") for item in header.split(",")]
    return "*" in tags or tag in tags
