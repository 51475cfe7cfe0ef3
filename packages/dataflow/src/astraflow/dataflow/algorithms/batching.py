"""What a batch counts: single sequences, or whole groups.

Invariant: a unit is served whole or not at all; it is as old as its oldest sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from .entry import Entry

BatchBy = Literal["samples", "groups"]


def unit_key(entry: Entry, by: BatchBy) -> str:
    """What the sequences of one unit share."""
    return entry.sample.group_id if by == "groups" else entry.sample.sample_id


def count_units(entries: Iterable[Entry], by: BatchBy) -> int:
    if by == "samples":
        return sum(1 for _ in entries)
    return len({entry.sample.group_id for entry in entries})


def units(ordered: Iterable[Entry], by: BatchBy) -> list[list[Entry]]:
    """The entries by unit; units come in the order of their first entries."""
    made: dict[str, list[Entry]] = {}
    for entry in ordered:
        made.setdefault(unit_key(entry, by), []).append(entry)
    return list(made.values())


def first_units(ordered: Sequence[Entry], count: int, by: BatchBy) -> list[Entry]:
    """The entries of the first `count` units."""
    if by == "samples":
        return list(ordered[:count])
    return [entry for unit in units(ordered, by)[:count] for entry in unit]
