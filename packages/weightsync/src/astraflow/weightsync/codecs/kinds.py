"""What a codec is called: by a number in the frame's record, by a name where one is asked for."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

RAW = 0
PLANES = 1
GAP_XOR = 2
L0 = 3
L2 = 4

Codec = Literal["auto", "raw", "planes", "xor", "l0", "l2"]
"""What a publisher may ask for; see `encode`."""

CODECS: tuple[str, ...] = get_args(Codec)


def known(codec: Codec) -> Codec:
    """`codec`. Raises ValueError for a name that is none."""
    if codec not in CODECS:
        raise ValueError(f"codec {codec!r} is unknown; there are {', '.join(CODECS)}")
    return codec


NAMES = {RAW: "raw", PLANES: "planes", GAP_XOR: "xor", L0: "l0", L2: "l2"}
"""The name of each number."""


class Encoded(NamedTuple):
    """`changed` elements of a frame as `payload` in `codec`; an unchanged frame has an empty payload."""

    codec: int
    changed: int
    payload: bytes | memoryview


UNCHANGED = Encoded(RAW, 0, b"")
"""What an unchanged frame is written as, and one that has no base."""
