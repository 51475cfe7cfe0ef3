"""Which versions stay and which blobs go: pure functions of what HEAD and a store list.

Invariants: every version that HEAD names can be reached from an anchor that HEAD names; what a reader has leased, and
what a later incarnation writes, is never removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from .interface import Retention
from .manifest import VersionRef

DEFAULT = Retention()
"""What a publisher keeps that is told nothing else."""

Named = tuple[int, int]
"""Incarnation and version."""


def retained(versions: Sequence[VersionRef], retention: Retention) -> tuple[VersionRef, ...]:
    """The newest of `versions` (newest first) that must stay so that each of the last `retention.versions` can be
    reached from an anchor, as far as their payloads together have at most `retention.bytes`; at least the newest and
    its way from an anchor.

    At most `retention.versions` + the distance between two anchors.
    """
    kept = size = 0
    for position, ref in enumerate(versions):
        size += ref.delta_bytes + ref.anchor_bytes
        if kept and retention.bytes is not None and size > retention.bytes:
            break
        if ref.anchor_bytes:
            kept = position + 1
            if kept >= retention.versions:
                break
    return tuple(versions[: kept or len(versions)])


def removable(keys: Iterable[str], named: Set[Named], leased: Set[Named], newest: Named) -> list[str]:
    """The keys of versions that are neither named nor leased; nothing after `newest`, which may just be written."""
    old = []
    for key in keys:
        owner, _, rest = key.partition("/v/")
        number = rest.partition("/")[0]
        if owner.isdecimal() and number.isdecimal():
            version = (int(owner), int(number))
            if version < newest and version not in named and version not in leased:
                old.append(key)
    return old
