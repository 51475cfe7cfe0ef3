"""The codec whose positions depend on the old values, and how `auto` chooses between it and the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from astraflow.weightsync import CorruptVersion
from astraflow.weightsync.codecs import (
    GAP_XOR,
    L0,
    L2,
    NAMES,
    PLANES,
    RAW,
    Codec,
    Encoded,
    apply,
    decode,
    encode,
    patch,
)
from astraflow.weightsync.codecs.order import FLOATS, add_steps, steps
from astraflow.weightsync.layout import ITEMSIZE

Bytes = NDArray[np.uint8]
Bits = NDArray[Any]


def bf16(values: NDArray[np.float32]) -> Bits:
    bits: Bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits


def f8(values: NDArray[np.float32], exponent: int, mantissa: int) -> Bits:
    """Bits of a float of 8 bits, rounded to zero; only what the tests' values need."""
    half = values.astype(np.float16).view(np.uint16)
    power = ((half >> 10) & 31).astype(np.int64) - 15 + 2 ** (exponent - 1) - 1
    body = (power.clip(0, 2**exponent - 2) << mantissa) | ((half & 0x3FF) >> (10 - mantissa))
    bits: Bits = (body | ((half >> 8) & 0x80)).astype(np.uint8)
    return bits


CAST: dict[str, Callable[[NDArray[np.float32]], Bits]] = {
    "BF16": bf16,
    "F16": lambda values: values.astype(np.float16).view(np.uint16),
    "F32": lambda values: values.astype(np.float32).view(np.uint32),
    "F8_E4M3": lambda values: f8(values, 4, 3),
    "F8_E5M2": lambda values: f8(values, 5, 2),
}


def step(dtype: str, elements: int, rate: float, seed: int = 0) -> tuple[Bytes, Bytes]:
    """Weights before and after an optimiser moved each of them by about `rate`."""
    rng = np.random.default_rng(seed)
    master = rng.normal(scale=0.02, size=elements).astype(np.float32)
    moved = master + (rate * rng.normal(size=elements)).astype(np.float32)
    return CAST[dtype](master).view(np.uint8), CAST[dtype](moved).view(np.uint8)


def restored(old: Bytes, made: Encoded, dtype: str) -> Bytes:
    frame = old.copy()
    if made.changed:
        apply(made.codec, made.changed, made.payload, frame, dtype)
    return frame


def bits_per_change(made: Encoded) -> float:
    return 8 * len(made.payload) / made.changed


def test_what_it_costs_at_one_percent() -> None:
    """Under the entropy of positions and steps that do not know the old values, which no base-free code can pass."""
    old, new = step("BF16", 4 << 20, 2.5e-7)
    before, after = old.view(np.uint16), new.view(np.uint16)
    at = np.flatnonzero(before != after)
    share = len(at) / len(before)
    assert 0.008 < share < 0.012
    _, counts = np.unique(steps(before[at], after[at]), return_counts=True)
    values = -sum(count / len(at) * math.log2(count / len(at)) for count in counts)
    positions = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share

    aware, free, xor = (encode(old, new, "BF16", codec) for codec in ("l2", "l0", "xor"))
    assert [aware.codec, free.codec, xor.codec] == [L2, L0, GAP_XOR]
    for made in (aware, free, xor):
        assert np.array_equal(restored(old, made, "BF16"), new)
    assert bits_per_change(aware) < 0.82 * (positions + values)
    assert bits_per_change(aware) < 8 < bits_per_change(free) < bits_per_change(xor)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("rate", [3e-7, 3e-6, 3e-5, 1e-3])
def test_auto_is_never_much_larger_than_the_best(dtype: str, rate: float) -> None:
    old, new = step(dtype, 1 << 20, rate)
    names: list[Codec] = ["raw", "planes", "xor", "l0", "l2"]
    made = {name: encode(old, new, dtype, name) for name in names}
    auto = encode(old, new, dtype)
    assert all(np.array_equal(restored(old, one, dtype), new) for one in (*made.values(), auto))
    assert len(auto.payload) <= 1.03 * min(len(one.payload) for one in made.values()) + 64
    assert all(one.codec in NAMES for one in made.values())


def test_fp32_masters_all_of_which_moved() -> None:
    old, new = step("F32", 1 << 20, 1e-6)
    auto = encode(old, new, "F32")
    assert auto.changed > 0.99 * (1 << 20)
    assert len(auto.payload) < 0.6 * len(new)
    assert np.array_equal(restored(old, auto, "F32"), new)


def test_without_small_weights_there_is_no_class_and_no_cost() -> None:
    """All of one exponent: the old values say nothing, so the base-free code is as good and cheaper to decode."""
    rng = np.random.default_rng(0)
    old = bf16(rng.uniform(1, 2, 1 << 20).astype(np.float32))
    new = old.copy()
    new[rng.random(old.size) < 0.01] ^= 1
    for codec in ("auto", "l2"):
        made = encode(old.view(np.uint8), new.view(np.uint8), "BF16", codec)
        assert made.codec == L0


def test_a_replaced_frame_falls_back_to_byte_planes() -> None:
    old, _ = step("BF16", 1 << 20, 0)
    new, _ = step("BF16", 1 << 20, 0, seed=1)
    for codec in ("auto", "planes"):
        made = encode(old, new, "BF16", codec)
        assert made.codec == PLANES
        assert len(made.payload) < 0.85 * len(new)
        assert np.array_equal(restored(old, made, "BF16"), new)
    assert encode(old, new, "BF16", "raw").codec == RAW


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(FLOATS)),
    elements=st.integers(1, 60_000),
    share=st.sampled_from([0.02, 0.1, 0.5, 1.0]),
    small=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_any_bits_round_trip(dtype: str, elements: int, share: float, small: float, seed: int) -> None:
    """NaN payloads, both zeros, infinities and subnormals among them; a class may be most of the frame, or none."""
    rng = np.random.default_rng(seed)
    kind, itemsize = FLOATS[dtype], ITEMSIZE[dtype]
    old = rng.integers(0, 256, elements * itemsize, dtype=np.uint8).view(f"u{itemsize}")
    high = rng.random(elements) >= small  # few of the smallest exponents, as in trained weights
    old[high] |= old.dtype.type(1 << (kind.mantissa + kind.exponent - 1))
    new = old.copy()
    hit = rng.random(elements) < share * np.where(high, 0.2, 1.0)
    new[hit] ^= rng.integers(1, 4, int(hit.sum())).astype(new.dtype)
    made = encode(old.view(np.uint8), new.view(np.uint8), dtype, "l2")
    assert made.changed == np.count_nonzero(old != new)
    assert restored(old.view(np.uint8), made, dtype).tobytes() == new.tobytes()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(FLOATS)), st.integers(0, 2**32))
def test_steps_are_a_bijection_of_all_bits(dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    itemsize = ITEMSIZE[dtype]
    before, after = rng.integers(0, 256, (2, 100 * itemsize), dtype=np.uint8).view(f"u{itemsize}")
    assert np.array_equal(add_steps(before, steps(before, after)), after)


def test_a_step_counts_representable_numbers() -> None:
    smallest = np.array([0x0000, 0x8000, 0x3F80, 0xBF80], np.uint16)
    beside = np.array([0x0001, 0x8001, 0x3F81, 0xBF81], np.uint16)
    assert steps(smallest, beside).tolist() == [2, 1, 2, 1]  # up, down, up, down: zigzag
    assert steps(np.array([0x8000], np.uint16), np.array([0x0000], np.uint16)).tolist() == [2]


@pytest.mark.parametrize("codec", ["xor", "l0", "l2"])
def test_a_copy_is_made_on_the_way(codec: Codec) -> None:
    old, new, made = frame(codec)
    room = np.zeros_like(old)
    change = decode(made.codec, made.changed, made.payload, old, "BF16")
    assert patch(change, old, room, "BF16") == xxhash.xxh3_128_digest(new.data)
    assert np.array_equal(room, new)


def frame(codec: Codec, dtype: str = "BF16") -> tuple[Bytes, Bytes, Encoded]:
    old, new = step(dtype, 100_000, {"BF16": 3e-6, "F16": 3e-7, "F32": 1e-12}.get(dtype, 3e-5))
    made = encode(old, new, dtype, codec)
    assert NAMES[made.codec] == codec
    return old, new, made


@pytest.mark.parametrize(
    ("codec", "dtype"), [("raw", "BF16"), ("planes", "BF16"), ("xor", "F32"), ("l0", "BF16"), ("l0", "F8_E4M3"),
                         ("l2", "BF16"), ("l2", "F16")]
)  # fmt: skip
def test_damage_is_refused_or_harmless(codec: Codec, dtype: str) -> None:
    """Bits flipped, cut short, longer, other bytes: CorruptVersion, and the frame as it was, or a frame of its size."""
    old, _, made = frame(codec, dtype)
    rng = np.random.default_rng(3)
    good = np.frombuffer(made.payload, np.uint8)
    refused = 0
    for turn in range(600):
        bad = good.copy()
        if turn % 4 == 0:  # the headers, of which a flip elsewhere in a long payload would tell little
            bad[rng.integers(0, min(len(bad), 120), 2)] ^= 1 << rng.integers(0, 8, 2, dtype=np.uint8)
        elif turn % 4 == 1:
            bad[rng.integers(0, len(bad), 3)] ^= 1 << rng.integers(0, 8, 3, dtype=np.uint8)
        elif turn % 4 == 2:
            bad = bad[: rng.integers(0, len(bad))]
        else:
            start = rng.integers(0, min(len(bad), 60))
            bad = np.concatenate([bad[:start], rng.integers(0, 256, rng.integers(0, 3000), dtype=np.uint8)])
        target = old.copy()
        try:
            apply(made.codec, made.changed, bad.tobytes(), target, dtype)
        except CorruptVersion:
            refused += 1
            assert np.array_equal(target, old)
    assert refused > 100


@settings(max_examples=300, deadline=None)
@given(
    codec=st.integers(-1, 6),
    changed=st.one_of(st.integers(-2, 2000), st.sampled_from([1 << 31, 1 << 62, -(1 << 62)])),
    payload=st.binary(max_size=400),
    dtype=st.sampled_from(sorted(ITEMSIZE)),
)
def test_bytes_that_nobody_wrote(codec: int, changed: int, payload: bytes, dtype: str) -> None:
    target = np.zeros(1024 * ITEMSIZE[dtype], np.uint8)
    try:
        apply(codec, changed, payload, target, dtype)
    except CorruptVersion:
        assert not target.any()


def test_headers_that_lie() -> None:
    old, _, made = frame("l2")
    payload = bytes(made.payload)
    classes = payload[0]
    counts = 1 + classes

    def lie(payload: bytes, changed: int = made.changed, base: Bytes = old) -> None:
        with pytest.raises(CorruptVersion):
            apply(L2, changed, payload, base.copy(), "BF16")

    def at(offset: int, value: int) -> bytes:
        return payload[:offset] + value.to_bytes(4, "little") + payload[offset + 4 :]

    lie(b"")
    lie(bytes([0]) + payload[1:])
    lie(bytes([255]) + payload[1:])
    lie(payload[:1] + payload[1:counts][::-1] + payload[counts:])  # cuts that descend
    lie(payload[: counts - 1] + bytes([255]) + payload[counts:])  # members nobody counted on
    lie(payload + b"x")
    for changed in (made.changed - 1, made.changed + 1, 1 << 40):
        lie(payload, changed)
    for field in range(3 * (classes + 1)):
        for value in (0xFFFFFFFF, 1 << 24, 0):
            lie(at(counts + 4 * field, value))
    lie(payload, base=np.full_like(old, 0x3F))  # no element is small: every class is empty here
