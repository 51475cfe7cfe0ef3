"""Which way to the newest version: a pure function of what `HEAD` lists."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import msgspec

from .interface import CorruptVersion, PullKind, SinkState, TransferMode, VersionGone
from .manifest import Head, VersionRef


class Path(NamedTuple):
    """From the sink's bytes, or from `anchor` where there is one, through `deltas` (oldest first) to `target`.

    Neither: the sink already has the target's bytes, as another version.
    """

    anchor: VersionRef | None
    deltas: tuple[VersionRef, ...]
    target: VersionRef

    @property
    def versions(self) -> frozenset[VersionRef]:
        """All that is read on the way."""
        return frozenset(ref for ref in (self.anchor, *self.deltas, self.target) if ref is not None)

    @property
    def kind(self) -> PullKind:
        if self.anchor is not None:
            return "full"
        return "chain" if len(self.deltas) > 1 else "delta"

    @property
    def full_bytes(self) -> int:
        return self.anchor.anchor_bytes if self.anchor is not None else 0

    @property
    def delta_bytes(self) -> int:
        return sum(ref.delta_bytes for ref in self.deltas)


def at(head: Head, named: tuple[int, int]) -> Head | None:
    """HEAD as it was when `named` (incarnation, version) was the newest version; None while it is yet to come.

    Raises:
        VersionGone: HEAD does not name it any more.
    """
    newest = (head.newest.incarnation, head.newest.version)
    for behind, ref in enumerate(head.versions):
        if (ref.incarnation, ref.version) == named:
            return msgspec.structs.replace(head, versions=head.versions[behind:])
    if named > newest:
        return None
    raise VersionGone(
        f"version {named[1]} of incarnation {named[0]} is not named by HEAD any more, which goes from version "
        f"{head.versions[-1].version} to {newest[1]} of incarnation {newest[0]}"
    )


def choose(
    head: Head, state: SinkState, mode: TransferMode, interval: int, *, full: bool = False, back: bool = False
) -> Path | None:
    """The path from what the sink holds to the newest version; None if it holds that.

    `auto`: the fewest bytes among the chain of deltas and anchor + chain. `published` (worker's version l): full if
    there is no delta, if the sink holds no verified version, if `interval` > 0 and (l + 1) mod `interval` = 0, or if
    the newest delta's base is not what the sink holds; else that delta. Bases match by digest. `full` forces anchor +
    chain, for a sink whose bytes are not what it says. Raises CorruptVersion if `head` has no such path, or, unless it
    is to go `back`, is older than what the sink holds, as a stale copy of it would be.
    """
    newest = head.newest
    if not back and state.digest and (newest.incarnation, newest.version) < (state.incarnation, state.version):
        raise CorruptVersion(
            f"HEAD ends with version {newest.version} of incarnation {newest.incarnation}, but version {state.version} "
            f"of incarnation {state.incarnation} is here: it is a stale copy, or of another stream"
        )
    if state == SinkState(digest=newest.root, version=newest.version, incarnation=newest.incarnation) and not full:
        return None
    from_sink = None
    if state.digest and not full:
        from_sink = _chain(head, state.digest) if mode == "auto" else _published(newest, state, interval)
    if from_sink is not None and mode == "published":
        return from_sink
    paths = [path for path in (from_sink, *_full(head)) if path is not None]
    if not paths:
        raise CorruptVersion(f"HEAD names no way to version {newest.version} from an anchor")
    return min(paths, key=lambda path: path.full_bytes + path.delta_bytes)


def _published(newest: VersionRef, state: SinkState, interval: int) -> Path | None:
    if interval > 0 and (state.version + 1) % interval == 0:
        return None
    return Path(None, (newest,), newest) if newest.base_root == state.digest else None


def _chain(head: Head, digest: str) -> Path | None:
    """The fewest deltas from the bytes called `digest`."""
    if head.newest.root == digest:
        return Path(None, (), head.newest)
    for behind in range(1, len(head.versions) + 1):
        deltas = _deltas(head, behind)
        if deltas and deltas[0].base_root == digest:
            return Path(None, deltas, head.newest)
    return None


def _full(head: Head) -> list[Path]:
    """Every anchor with the deltas from it."""
    paths = []
    for behind, anchor in enumerate(head.versions):
        deltas = _deltas(head, behind)
        if anchor.anchor_bytes and deltas is not None and (not deltas or deltas[0].base_root == anchor.root):
            paths.append(Path(anchor, deltas, head.newest))
    return paths


def _deltas(head: Head, behind: int) -> tuple[VersionRef, ...] | None:
    """The `behind` newest versions, oldest first; None if one does not start where the one before it ends (a version
    may have no delta, as where the tensors' layout changed)."""
    deltas = tuple(reversed(head.versions[:behind]))
    linked = all(after.base_root == before.root for before, after in pairwise(deltas))
    return deltas if linked else None
