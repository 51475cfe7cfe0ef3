"""How the change of a frame is written: which elements changed, and into what.

A codec is a number in the frame's record of the manifest, so others can be added beside these:

* `RAW`: the new dense bytes;
* `PLANES`: the new dense bytes, in byte planes through zstd;
* `GAP_XOR`: gaps between changed positions and old XOR new, in byte planes through zstd; any dtype;
* `L0`: gaps and steps in the order of the floats, through pcodec; about 10 bits a change at 1 % of bf16;
* `L2`: the same with positions coded given the old values; about 8 bits. A third to a half of `L0`'s speed.

Bits are compared and restored, never values: NaN payloads and the sign of zero survive.
"""

from .changes import Index, changed_elements, sparse_is_smaller
from .decode import Change, apply, decode, patch, write
from .encode import compare, encode
from .kinds import CODECS, GAP_XOR, L0, L2, NAMES, PLANES, RAW, UNCHANGED, Codec, Encoded, known

__all__ = [
    "CODECS",
    "GAP_XOR",
    "L0",
    "L2",
    "NAMES",
    "PLANES",
    "RAW",
    "UNCHANGED",
    "Change",
    "Codec",
    "Encoded",
    "Index",
    "apply",
    "changed_elements",
    "compare",
    "decode",
    "encode",
    "known",
    "patch",
    "sparse_is_smaller",
    "write",
]
