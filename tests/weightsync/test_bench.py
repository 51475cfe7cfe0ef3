"""The comparison's own parts: that what it measures is right, and what the whole parts take of memory."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from astraflow.weightsync.bench import Results, judge, memory, page
from astraflow.weightsync.bench.bounds import bounds
from astraflow.weightsync.bench.data import Trained, bf16
from astraflow.weightsync.bench.encodings import Encoding, encodings
from astraflow.weightsync.bench.files import FileSpeed, file_apply
from astraflow.weightsync.bench.report import Row, Table
from astraflow.weightsync.bench.speed import Pair, Scaling, Speed, measure, scaling

U16 = NDArray[np.uint16]


@pytest.fixture(scope="module")
def versions() -> tuple[U16, U16]:
    """Half a million bf16 values, 1 % of them changed by a step that moves each by about as much."""
    rng = np.random.default_rng(0)
    master = rng.normal(scale=0.02, size=500_000).astype(np.float32)
    return bf16(master), bf16(master + (2.5e-7 * rng.normal(size=master.size)).astype(np.float32))


def pair(old: U16, new: U16) -> Pair:
    """Cut in two frames, of which the second is small."""
    sides = [[side[:-1000].view(np.uint8), side[-1000:].view(np.uint8)] for side in (old, new)]
    return Pair(sides[0], sides[1])


@pytest.mark.parametrize("encoding", encodings(), ids=lambda encoding: encoding.name)
def test_every_encoding_brings_back_every_bit(encoding: Encoding, versions: tuple[U16, U16]) -> None:
    speed = measure(encoding, pair(*versions))
    assert speed.size > 0
    far, same = np.zeros(300_000, np.uint16), np.zeros(300_000, np.uint16)
    far[[0, 65_535, 131_071, 299_999]] = 7  # gaps of one less than, and more than, 16 bits tell
    measure(encoding, Pair([same.view(np.uint8)], [far.view(np.uint8)]))
    measure(encoding, Pair([same.view(np.uint8)], [same.view(np.uint8)]))


def test_an_encoding_that_loses_a_bit_is_found(versions: tuple[U16, U16]) -> None:
    lossy = next(encoding for encoding in encodings() if encoding.name.startswith("index32"))
    broken = lossy._replace(pack=lambda old, new: lossy.pack(old, new ^ np.eye(1, len(new), 10, np.uint8)[0]))
    with pytest.raises(AssertionError, match="index32"):
        measure(broken, pair(*versions))


def test_bounds() -> None:
    """A quarter of 4000 equal values changed, by one step up or down: 4 H(1/4) bits for where, 1 for which way."""
    old = np.full(4000, 0x3F80, np.uint16)
    new = old.copy()
    new[::4] += np.tile(np.array([1, 0xFFFF], np.uint16), 500)
    where = 4 * -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    assert bounds(old, new) == pytest.approx((where + 1, where + 1))
    small = np.full(4000, 0x0080, np.uint16)  # none of those changed: the exponent tells
    half = bounds(np.concatenate([old, small]), np.concatenate([new, small]))
    assert half.given_exponent == pytest.approx(where + 1)
    assert half.base_free > where + 2


def test_the_share_that_is_asked_for() -> None:
    rng = np.random.default_rng(0)
    master = rng.normal(scale=0.02, size=(100, 1000)).astype(np.float32)
    model = Trained({"w": master}, {"w": rng.normal(size=master.shape).astype(np.float32)})
    for share in (0.01, 0.2):
        changed = model.before()["w"] != model.after(share)["w"]
        assert changed.mean() == pytest.approx(share, rel=0.011)


def test_bf16_is_rounded_as_torch_does() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    values[:3] = [1 + 2**-8, 1 + 3 * 2**-8, 0.0]  # ties go to even
    theirs = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bf16(values), theirs)


def test_files_and_threads_are_measured(versions: tuple[U16, U16]) -> None:
    encoding = encodings()[-1]
    assert min(scaling(encoding, pair(*versions), 2)) > 0
    assert min(file_apply(pair(*versions))) > 0


def results(aware_bits: float) -> Results:
    names = {encoding.name: 48.0 for encoding in encodings()} | {"XOR + zstd-1 (as slime)": 22.0, "L2": aware_bits}
    rows = [Row(name, 1600 / bits, bits, Speed(1, 2e9, 2e9)) for name, bits in names.items()]
    table = Table(0.01, bounds(np.array([0x80, 0x80], np.uint16), np.array([0x80, 0x81], np.uint16)), rows)
    table = table._replace(bound=table.bound._replace(base_free=9.8))
    rises = dict.fromkeys([*names, "publisher", "file", "live"], 1 << 20)
    return Results(10**6, [table], FileSpeed(5e9, 2e9), Scaling(1.9, 2.0), rises, 10**8)


def test_a_bar_that_is_missed_fails() -> None:
    assert all(bar.passed for bar in judge(results(7.5)))
    assert [bar.what for bar in judge(results(9.9)) if not bar.passed] == [
        "L2 at 1 % at least 6 times smaller than index32 + value (AstraFlow)",
        "L2 at 1 % at least 2.5 times smaller than XOR + zstd-1 (as slime)",
        "L2 under the base-free bound at every share",
    ]
    text = page(results(9.9), seed=3)
    assert "| 4.85 | FAIL |" in text
    assert "seed 3" in text


@pytest.mark.slow
def test_memory_of_publisher_and_sinks(tmp_path: Path) -> None:
    """Of a model of 300 MB, 1 % of it changed: one copy and frames; frames; what is staged and what undoes it."""
    rng = np.random.default_rng(0)
    old = {f"w{number}": bf16(rng.normal(scale=0.02, size=5 << 20).astype(np.float32)) for number in range(5)}
    new = {name: np.where(rng.random(bits.size) < 0.01, bits ^ 1, bits) for name, bits in old.items()}
    memory.save(tmp_path / "pair.npz", old, new)
    model = memory.COPIES * sum(bits.nbytes for bits in old.values())
    frames = 12 * (10 << 20)
    assert model > 300e6
    assert model < memory.in_child(tmp_path / "pair.npz", "publisher") < model + frames
    assert memory.in_child(tmp_path / "pair.npz", "file") < frames
    assert memory.in_child(tmp_path / "pair.npz", "live") < model * 0.15 + frames
