from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from astraflow.weightsync import CorruptVersion, TensorSpec
from astraflow.weightsync.layout import (
    ITEMSIZE,
    canonical,
    check_layout,
    cut,
    frame_count,
    group_frames,
    safetensors_header,
)


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, nbytes=int(np.prod(shape)) * ITEMSIZE[dtype])


@given(sizes=st.lists(st.integers(0, 5000), max_size=30), frame_bytes=st.sampled_from([8, 64, 1024]))
def test_frames_and_groups_cover_every_byte_once(sizes: list[int], frame_bytes: int) -> None:
    layout = [spec(f"t{i:02}", "U8", size) for i, size in enumerate(sizes)]
    frames = cut(layout, frame_bytes)
    assert len(frames) == frame_count(layout, frame_bytes)
    covered = [0] * len(layout)
    for frame in frames:
        assert frame.offset == covered[frame.tensor]
        assert 0 < frame.length <= frame_bytes
        covered[frame.tensor] += frame.length
    assert covered == sizes
    groups = group_frames(frames, frame_bytes)
    assert [position for group in groups for position in group] == list(range(len(frames)))
    sizes = [sum(frames[position].length for position in group) for group in groups]
    assert all(0 < size <= frame_bytes for size in sizes)
    assert all(one + frames[after.start].length > frame_bytes for one, after in zip(sizes, groups[1:], strict=False))


def test_the_file_is_what_safetensors_reads() -> None:
    layout = canonical([spec("b", "F16", 3), spec("a", "F32", 2, 2), spec("scalar", "F64"), spec("none", "U8", 0, 7)])
    assert [item.name for item in layout] == ["scalar", "a", "b", "none"]
    body = np.arange(sum(item.nbytes for item in layout), dtype=np.uint8).tobytes()
    tensors = load(safetensors_header(layout) + body)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {item.name: item.shape for item in layout}
    assert tensors["b"].tobytes() == body[24:30]


@pytest.mark.parametrize(
    "bad",
    [
        [TensorSpec(name="a", dtype="F4", shape=(1,), nbytes=1)],
        [TensorSpec(name="a", dtype="F32", shape=(2,), nbytes=4)],
        [TensorSpec(name="a", dtype="F32", shape=(-1, -1), nbytes=4)],
        [spec("a", "F32", 1), spec("a", "F32", 1)],
        [spec("b", "F32", 1), spec("a", "F32", 1)],
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(bad: list[TensorSpec]) -> None:
    with pytest.raises(CorruptVersion):
        check_layout(bad)
