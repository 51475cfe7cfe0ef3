"""What a mirror decides, by itself: which versions its HEAD may name, what it fetches first, how blobs are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.weightsync import WeightSyncError
from astraflow.weightsync.contents import Blob, Extent
from astraflow.weightsync.following import complete_run, fetch_order, succeeds
from astraflow.weightsync.incoming import blocks_of, pieces_of
from astraflow.weightsync.manifest import Head, VersionRef


def head(*versions: tuple[int, bool], incarnation: int = 1, stream: str = "s") -> Head:
    """Newest first: (version, whether it has an anchor)."""
    return Head(stream, tuple(VersionRef(incarnation, n, "", "", "", 1, int(anchor)) for n, anchor in versions))


@pytest.mark.parametrize(
    ("complete", "named"),
    [
        ({5, 4, 3, 2, 1}, [5, 4, 3, 2, 1]),
        ({4, 3, 2, 1}, [4, 3, 2, 1]),
        ({5, 4, 3}, [5, 4, 3]),
        ({5, 4, 2, 1}, [2, 1]),
        ({5, 4}, []),
        ({3, 1}, [3]),
        (set(), []),
    ],
)
def test_head_names_the_newest_run_down_to_an_anchor(complete: set[int], named: list[int]) -> None:
    found = complete_run(
        head((5, False), (4, False), (3, True), (2, False), (1, True)), lambda ref: ref.version in complete
    )
    assert ([ref.version for ref in found.versions] if found else []) == named


def test_the_way_to_the_newest_version_comes_first() -> None:
    source = head((4, False), (3, True), (2, False), (1, True))
    parts = {
        ref: [Blob(f"{ref.version}d", 1, (), False)] + [Blob(f"{ref.version}a", 1, (), True)] * bool(ref.anchor_bytes)
        for ref in source.versions
    }
    assert [blob.key for blob in fetch_order(source, None, parts)] == ["4d", "3a", "3d", "2d", "1d", "1a"]
    held = head((2, False), (1, True))
    assert [blob.key for blob in fetch_order(source, held, parts)] == ["3d", "4d", "3a", "2d", "1d", "1a"]


def test_what_succeeds_what() -> None:
    held = head((5, True))
    assert succeeds(head((6, True)), held)
    assert succeeds(head((2, True), incarnation=2), held)
    assert not succeeds(held, held)
    assert not succeeds(head((4, True)), held), "a cache may give out an older state"
    for other in (head((9, True), incarnation=0), head((6, True), stream="t")):
        with pytest.raises(WeightSyncError, match=r"went back|stream"):
            succeeds(other, held)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 60))
def test_blocks_are_whole_extents_and_pieces_cover_them(sizes: list[int], size: int) -> None:
    extents, start = [], 0
    for length in sizes:
        extents.append(Extent(start, start + length, b"", ""))
        start += length
    blocks = blocks_of(Blob("k", start, tuple(extents), False), size)
    assert [extent for block in blocks for extent in block.extents] == extents
    assert all(len(block.extents) == 1 or block.stop - block.start <= size for block in blocks)
    pieces = pieces_of(blocks, size)
    assert all(0 < piece.stop - piece.start <= size for piece in pieces)
    assert [byte for piece in pieces for byte in range(piece.start, piece.stop)] == list(range(start))
    assert all(blocks[p.block].start <= p.start < p.stop <= blocks[p.block].stop for p in pieces)
