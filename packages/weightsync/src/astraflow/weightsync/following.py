"""What a mirror fetches first, and which versions its `HEAD` may name: pure functions of what the source's lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .contents import Blob
from .interface import WeightSyncError
from .manifest import Head, VersionRef


def complete_run(head: Head, complete: Callable[[VersionRef], bool]) -> Head | None:
    """The newest consecutive versions of `head` that are complete, down to the last one with an anchor; None if there
    are none."""
    run: list[VersionRef] = []
    for ref in head.versions:
        if complete(ref):
            run.append(ref)
        elif any(held.anchor_bytes for held in run):
            break
        else:
            run.clear()
    while run and not run[-1].anchor_bytes:
        run.pop()
    return Head(head.stream, tuple(run)) if run else None


def fetch_order(head: Head, held: Head | None, parts: Mapping[VersionRef, Sequence[Blob]]) -> list[Blob]:
    """The deltas that lead to the newest version, oldest first; then the newest anchor; then the rest, newest first.

    They lead from the newest version that is `held`, if it is listed, else from the newest anchor.
    """
    anchored = next(behind for behind, ref in enumerate(head.versions) if ref.anchor_bytes)
    known = held is not None and held.newest in head.versions
    start = head.versions.index(held.newest) if held is not None and known else anchored
    steps = [blob for ref in reversed(head.versions[:start]) for blob in parts[ref] if not blob.is_anchor]
    anchor = [blob for blob in parts[head.versions[anchored]] if blob.is_anchor]
    rest = [blob for ref in head.versions for blob in parts[ref]]
    return list({blob.key: blob for blob in (*steps, *anchor, *rest)}.values())


def succeeds(head: Head, held: Head) -> bool:
    """Whether `head` is newer than what a mirror `held` of the same stream; False for an earlier state of it, as a
    cache may give out. Raises WeightSyncError for another stream, or one that was started over."""
    if head.stream != held.stream:
        raise WeightSyncError(
            f"the source has the stream {head.stream!r}, this mirror {held.stream!r}; use another directory for it"
        )
    ours, theirs = held.newest, head.newest
    if theirs.incarnation < ours.incarnation:
        raise WeightSyncError(
            f"the source went back from incarnation {ours.incarnation} to {theirs.incarnation}; "
            "if it was started over, mirror it to an empty directory"
        )
    return head != held and (theirs.incarnation, theirs.version) >= (ours.incarnation, ours.version)
