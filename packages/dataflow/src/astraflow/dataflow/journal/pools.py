"""Which consumed samples the replay pools still hold, by what the pools' states in the journal say."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

STAGE = "stage/"
REPLAY = "/replay"


class Named(msgspec.Struct):
    """Of a sample, its name alone: the rest is not decoded."""

    sample_id: str


class _Pool(msgspec.Struct):
    entries: list[Named]


def replayable_ids(state: Mapping[str, bytes]) -> dict[str, list[str]]:
    """Sample ids by policy."""
    return {
        key.removeprefix(STAGE).removesuffix(REPLAY): [
            entry.sample_id for entry in msgspec.msgpack.decode(value, type=_Pool).entries
        ]
        for key, value in state.items()
        if key.startswith(STAGE) and key.endswith(REPLAY)
    }
