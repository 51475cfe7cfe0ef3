from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from astraflow.weightsync import CorruptVersion
from astraflow.weightsync.codecs import GAP_XOR, L0, RAW, apply, encode
from astraflow.weightsync.layout import ITEMSIZE

Bytes = NDArray[np.uint8]

# +0, -0, smallest subnormal, +inf, -inf, quiet and signalling NaN with payloads, largest finite
SPECIAL = np.array([0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0xFF81, 0x7F7F], np.uint16)


def dense(rng: np.random.Generator, elements: int, itemsize: int) -> Bytes:
    return rng.integers(0, 256, elements * itemsize, dtype=np.uint8)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(sorted(ITEMSIZE)),
    elements=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_round_trip_is_bit_exact(dtype: str, elements: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    itemsize = ITEMSIZE[dtype]
    old = dense(rng, elements, itemsize)
    new = old.copy()
    hit = rng.random(elements) < share
    new.reshape(elements, itemsize)[hit] = dense(rng, int(hit.sum()), itemsize).reshape(-1, itemsize)
    if itemsize == 2:
        specials = rng.random(elements) < share / 2
        new.view(np.uint16)[specials] = rng.choice(SPECIAL, int(specials.sum()))

    made = encode(old, new, dtype)
    differs = (old.reshape(elements, -1) != new.reshape(elements, -1)).any(axis=1)
    assert made.changed == differs.sum()
    assert len(made.payload) <= len(new)
    if made.changed:
        at = apply(made.codec, made.changed, made.payload, old, dtype).at
        assert at is None or np.array_equal(np.sort(at), np.flatnonzero(differs))
    assert old.tobytes() == new.tobytes()


def test_every_bf16_value_can_become_every_special_one() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    for special in SPECIAL:
        old = np.concatenate([every, np.zeros(1 << 20, np.uint16)])
        new = old.copy()
        new[: 1 << 16] = special
        made = encode(old.view(np.uint8), new.view(np.uint8), "BF16")
        assert made.codec == L0
        apply(made.codec, made.changed, made.payload, old.view(np.uint8), "BF16")
        assert np.array_equal(old, new)


def test_one_percent_of_single_ulp_steps_takes_under_ten_bits_a_change() -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(scale=0.02, size=1 << 20).astype(np.float32).view(np.uint32) >> 16
    old = old.astype(np.uint16)
    new = old.copy()
    hit = rng.random(old.size) < 0.011
    new[hit] += rng.choice(np.array([1, 0xFFFF], np.uint16), int(hit.sum()))
    made = encode(old.view(np.uint8), new.view(np.uint8), "BF16")
    assert made.codec == L0
    assert len(made.payload) * 8 / made.changed < 10


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_a_damaged_payload_never_writes_outside_or_crashes(dtype: str) -> None:
    """The digest stops damage before the decoder; the decoder holds by itself all the same."""
    rng = np.random.default_rng(1)
    old = dense(rng, 5000, ITEMSIZE[dtype])
    new = old.copy()
    new.reshape(5000, -1)[rng.random(5000) < 0.05, 0] ^= 1
    made = encode(old, new, dtype)
    outcomes = set()
    for _ in range(1500):
        payload = bytearray(made.payload)
        for _ in range(rng.integers(1, 4)):
            payload[rng.integers(0, len(payload))] ^= 1 << int(rng.integers(0, 8))
        if rng.random() < 0.2:
            payload = payload[: rng.integers(0, len(payload))]
        frame = old.copy()
        try:
            apply(made.codec, made.changed, bytes(payload), frame, dtype)
            outcomes.add("applied")
        except CorruptVersion:
            outcomes.add("refused")
    assert "refused" in outcomes


def lie(codec: int, changed: int, payload: bytes, dtype: str = "BF16", length: int = 2000) -> None:
    apply(codec, changed, payload, np.zeros(length, np.uint8), dtype)


def test_what_does_not_add_up_is_refused() -> None:
    rng = np.random.default_rng(2)
    old = np.zeros(200_000, np.uint8)
    new = old.copy()
    new[rng.integers(0, 100_000, 500) * 2] ^= 1
    for dtype in ("BF16", "F16"):
        made = encode(old, new, dtype)
        assert made.codec in (L0, GAP_XOR)
        payload = bytes(made.payload)
        for changed in (-1, 0, made.changed - 1, made.changed + 1, 1 << 40):
            with pytest.raises(CorruptVersion):
                lie(made.codec, changed, payload, dtype, 200_000)
        with pytest.raises(CorruptVersion, match="element"):  # positions beyond a shorter frame
            lie(made.codec, made.changed, payload, dtype, 2000)
        with pytest.raises(CorruptVersion):
            lie(made.codec, made.changed, payload[:-1], dtype, 200_000)
    with pytest.raises(CorruptVersion):
        lie(RAW, 1, b"too short")
    with pytest.raises(CorruptVersion, match="unknown"):
        lie(99, 1, b"")
    with pytest.raises(CorruptVersion, match="unknown"):
        lie(L0, 1, b"", "I32")


def test_a_zstd_bomb_is_refused_before_it_is_inflated() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    with pytest.raises(CorruptVersion):
        lie(GAP_XOR, 10, bomb, "F16")
    claims = zstandard.ZstdCompressor().compressobj(size=1 << 46)
    payload = claims.compress(b"x") + claims.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    with pytest.raises(CorruptVersion):  # allocating what it claims would be a MemoryError
        lie(GAP_XOR, 10, payload, "F16")


def test_raw_is_chosen_where_everything_changed() -> None:
    rng = np.random.default_rng(3)
    old, new = dense(rng, 10_000, 2), dense(rng, 10_000, 2)
    made = encode(old, new, "BF16")
    assert made.codec == RAW
    view: Any = np.frombuffer(made.payload, np.uint8)
    assert np.shares_memory(view, new)
