"""Looking at many sequences at once finds exactly what looking at each of them finds."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.dataflow import Array, Sequence
from astraflow.dataflow.checking import well_formed
from astraflow.dataflow.ingest import problems

NUMBERS = st.sampled_from([-0.5, 0.0, -1e-30, 0.5, math.nan, math.inf, -math.inf])


def sequence(
    tokens: list[int], mask: list[bool], logprobs: list[float], versions: list[int], reward: float | None = 1.0
) -> Sequence:
    return Sequence(
        model_id="solver",
        role="",
        tokens=Array.of(np.array(tokens, np.int32)),
        loss_mask=Array.of(np.array(mask, np.bool_)),
        logprobs=Array.of(np.array(logprobs, np.float32)),
        versions=Array.of(np.array(versions, np.int32)),
        temperature=1.0,
        finish_reason="stop",
        reward=reward,
    )


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    """Mostly right ones."""
    length = draw(st.integers(1, 5))
    mask = [False] + [draw(st.booleans()) for _ in range(length - 1)]
    made: dict[str, Any] = {
        "tokens": [draw(st.integers(0, 9)) for _ in range(length)],
        "mask": mask,
        "logprobs": [-0.5 if trained else 0.0 for trained in mask],
        "versions": [draw(st.integers(0, 9)) if trained else -1 for trained in mask],
    }
    spoiled = draw(st.sampled_from(["", "", "", "tokens", "mask", "logprobs", "versions"]))
    if spoiled:
        place = draw(st.integers(0, length - 1))
        wrong = {"tokens": st.just(-1), "mask": st.just(True), "logprobs": NUMBERS, "versions": st.integers(-3, 9)}
        made[spoiled][place] = draw(wrong[spoiled])
    return sequence(**made, reward=draw(st.sampled_from([1.0, None, math.nan])))


def fresh(one: Sequence) -> Sequence:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Sequence)


def sound(one: Sequence) -> bool:
    try:
        one.check()
    except ValueError:
        return False
    return True


@settings(max_examples=400, deadline=None)
@given(st.lists(sequences(), max_size=4))
def test_what_passes_together_passes_alone_with_the_same_versions(made: list[Sequence]) -> None:
    together = [fresh(one) for one in made]
    if well_formed(together):
        for one in together:
            assert sound(fresh(one))
            trained = one.versions.numpy()[one.loss_mask.numpy()]
            expected = (int(trained.min()), int(trained.max())) if trained.size else (-1, -1)
            assert one.version_range == fresh(one).version_range == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(sequences(), max_size=4))
def test_problems_are_those_of_each_result(make_kit: Any, made: list[Sequence]) -> None:
    kit = make_kit()
    task = kit.task("t", len(made))
    results = [kit.result(task, index, kit.holding(fresh(one))) for index, one in enumerate(made)]
    found = problems(results)
    assert set(found) == {index for index, one in enumerate(made) if not sound(fresh(one))}
    assert all(f"task t sample {index} from w0" in text for index, text in found.items())


@pytest.mark.parametrize("field", ["tokens", "loss_mask", "logprobs", "versions"])
def test_arrays_that_are_not_what_they_say_do_not_pass(field: str) -> None:
    good = sequence([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], [-1, 4, 5])
    assert well_formed([good])
    assert good.version_range == (4, 5)
    array = getattr(good, field)
    for wrong in (
        Array("float64", array.shape, array.data),
        Array(array.dtype, (2,), array.data),
        Array(array.dtype, (3, 1), array.data),
        Array(array.dtype, array.shape, array.data[:-1]),
    ):
        spoiled = msgspec.structs.replace(good, **{field: wrong})
        assert not well_formed([spoiled])
        assert not sound(spoiled)
