from __future__ import annotations

import pytest

from astraflow.weightsync import CorruptVersion, SinkState, TransferMode, VersionGone
from astraflow.weightsync.manifest import Head, VersionRef
from astraflow.weightsync.plan import at, choose


def ref(version: int, *, delta: int = 10, anchor: int = 0, root: str = "", base: str | None = None) -> VersionRef:
    base_root = f"r{version - 1}" if base is None else base
    return VersionRef(1, version, f"m{version}", root or f"r{version}", base_root, delta if base_root else 0, anchor)


def head(*versions: VersionRef) -> Head:
    return Head(stream="s", versions=versions)


def holds(version: int, root: str | None = None, incarnation: int = 1) -> SinkState:
    return SinkState(digest=f"r{version}" if root is None else root, version=version, incarnation=incarnation)


# Versions 8 … 12, anchors at 8 and 10.
LIST = (ref(12), ref(11), ref(10, anchor=1000), ref(9), ref(8, anchor=1000, base=""))
NOTHING = SinkState()


@pytest.mark.parametrize(
    ("state", "interval", "kind", "anchor", "deltas"),
    [
        (NOTHING, 10, "full", 10, [11, 12]),  # holds no verified version
        (holds(11), 10, "delta", None, [12]),  # the newest delta starts here
        (holds(11), 0, "delta", None, [12]),
        (holds(11), 12, "full", 10, [11, 12]),  # (l + 1) mod interval = 0
        (holds(11), 4, "full", 10, [11, 12]),
        (holds(11), 5, "delta", None, [12]),
        (holds(10), 0, "full", 10, [11, 12]),  # another base: no chain in this rule
        (holds(11, "elsewhere"), 0, "full", 10, [11, 12]),  # the number matches, the digest does not
        (holds(3, "r11"), 0, "delta", None, [12]),  # the digest matches, whatever the number
        (holds(0, "r11"), 10, "delta", None, [12]),  # version 0, but verified
    ],
)
def test_published_rule(state: SinkState, interval: int, kind: str, anchor: int | None, deltas: list[int]) -> None:
    path = choose(head(*LIST), state, "published", interval)
    assert path is not None
    assert path.kind == kind
    assert (path.anchor.version if path.anchor else None) == anchor
    assert [step.version for step in path.deltas] == deltas


def test_published_is_full_where_no_delta_is_offered() -> None:
    path = choose(head(ref(5, anchor=1000, base="")), holds(4), "published", 0)
    assert path is not None
    assert (path.kind, path.full_bytes, path.deltas) == ("full", 1000, ())


@pytest.mark.parametrize(
    ("state", "kind", "anchor", "deltas"),
    [
        (NOTHING, "full", 10, [11, 12]),
        (holds(11), "delta", None, [12]),
        (holds(9), "chain", None, [10, 11, 12]),
        (holds(7), "full", 10, [11, 12]),  # older than what is kept
        (holds(12, incarnation=0), "delta", None, []),  # the same bytes under another number: nothing to move
        (holds(20, "r10", 0), "chain", None, [11, 12]),  # rolled back, but the bytes are known
    ],
)
def test_auto_takes_the_fewest_bytes(state: SinkState, kind: str, anchor: int | None, deltas: list[int]) -> None:
    path = choose(head(*LIST), state, "auto", 10)
    assert path is not None
    assert path.kind == kind
    assert (path.anchor.version if path.anchor else None) == anchor
    assert [step.version for step in path.deltas] == deltas


def test_auto_prefers_an_anchor_to_a_longer_way() -> None:
    dear = (ref(3, delta=50, anchor=100), ref(2, delta=90), ref(1, anchor=100, base=""))
    path = choose(head(*dear), holds(1), "auto", 10)
    assert path is not None
    assert (path.kind, path.full_bytes, path.delta_bytes) == ("full", 100, 0)


def test_auto_goes_round_a_version_without_a_delta() -> None:
    versions = (ref(3), ref(2, anchor=1000, base=""), ref(1, anchor=10, base=""))
    path = choose(head(*versions), holds(1), "auto", 10)
    assert path is not None
    assert path.anchor == versions[1]
    assert path.deltas == versions[:1]


@pytest.mark.parametrize("mode", ["auto", "published"])
def test_nothing_to_do_and_nothing_to_trust(mode: TransferMode) -> None:
    assert choose(head(*LIST), holds(12), mode, 10) is None
    path = choose(head(*LIST), holds(12), mode, 10, full=True)
    assert path is not None
    assert path.kind == "full"
    with pytest.raises(CorruptVersion):
        choose(head(ref(3), ref(1, anchor=10, base="")), NOTHING, mode, 10)


@pytest.mark.parametrize("held", [(1, 9), (2, 0)])
def test_a_head_older_than_what_the_sink_holds_is_refused(held: tuple[int, int]) -> None:
    """A stale copy of it, or an earlier incarnation's: the order of versions is kept."""
    ref = VersionRef(1, 5, "m", "root", "", 0, 10)
    head = Head(stream="s", versions=(ref,))
    incarnation, version = held
    with pytest.raises(CorruptVersion, match="stale copy"):
        choose(head, SinkState(digest="other", incarnation=incarnation, version=version), "auto", 10)
    assert choose(head, SinkState(digest="other", incarnation=0, version=99), "auto", 10) is not None


def test_an_older_version_can_be_asked_for_by_name() -> None:
    """HEAD as it was then; what is not there yet is waited for, what is gone is an error."""
    then = at(head(*LIST), (1, 11))
    assert then is not None
    assert then.versions == LIST[1:]
    back = choose(then, holds(12), "auto", 0, back=True)
    assert back is not None
    assert (back.kind, back.target.version) == ("full", 11)
    with pytest.raises(CorruptVersion, match="stale copy"):
        choose(then, holds(12), "auto", 0)
    assert at(head(*LIST), (1, 13)) is None
    assert at(head(*LIST), (2, 1)) is None
    with pytest.raises(VersionGone, match="version 7 of incarnation 1 is not named by HEAD any more"):
        at(head(*LIST), (1, 7))
