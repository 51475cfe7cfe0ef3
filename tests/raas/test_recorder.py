"""The recorder: what is trained is exactly what was sampled."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.raas import Generation, Recorder

IDS = st.integers(0, 4)
"""Few ids, so that prompts often begin alike."""


@dataclass
class Asked:
    """A turn as it was asked for."""

    continued: bool
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    role: str
    fresh: bool


asked = st.builds(
    Asked,
    continued=st.booleans(),
    prompt=st.lists(IDS, min_size=1, max_size=4).map(tuple),
    answer=st.lists(IDS, max_size=4).map(tuple),
    role=st.sampled_from(["solver", "critic"]),
    fresh=st.booleans(),
)


def generation(tokens: tuple[int, ...], version: int = 0) -> Generation:
    logprobs = tuple(-0.5 - token for token in tokens)
    return Generation(tokens=tokens, logprobs=logprobs, versions=(version,) * len(tokens), finish_reason="stop")


@given(st.lists(asked, max_size=8))
def test_every_sampled_token_is_trained_once_in_its_context(turns: list[Asked]) -> None:
    recorder = Recorder("m")
    wanted: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
    last: tuple[int, ...] = ()
    for number, turn in enumerate(turns):
        prompt = last + turn.prompt if turn.continued else turn.prompt
        sampled = generation(turn.answer, version=number)
        recorder.record(prompt, sampled, "", temperature=1.0, role=turn.role, fresh=turn.fresh)
        last = prompt + turn.answer
        if turn.answer:
            wanted.append((prompt, turn.answer, number))
    found = []
    for sequence in recorder.sequences():
        sequence.check()
        tokens, mask = sequence.tokens.numpy().tolist(), sequence.loss_mask.numpy().tolist()
        logprobs, versions = sequence.logprobs.numpy().tolist(), sequence.versions.numpy().tolist()
        for position, (token, sampled_here) in enumerate(zip(tokens, mask, strict=True)):
            assert versions[position] == -1 or sampled_here
            assert logprobs[position] == (-0.5 - token if sampled_here else 0.0)
        for number in sorted({v for v in versions if v >= 0}):
            where = [p for p, v in enumerate(versions) if v == number]
            answer = tuple(tokens[p] for p in where)
            assert where == list(range(where[0], where[-1] + 1))
            found.append((tuple(tokens[: where[0]]), answer, number))
    assert sorted(found, key=lambda turn: turn[2]) == wanted


@given(st.lists(IDS, min_size=1, max_size=5), st.lists(IDS, min_size=1, max_size=5), st.integers(0, 9))
def test_a_sequence_is_extended_only_by_exactly_its_tokens(prompt: list[int], answer: list[int], position: int) -> None:
    so_far = [*prompt, *answer]
    broken = list(so_far)
    broken[position % len(broken)] += 1
    for following, sequences in ((so_far, 1), (broken, 2)):
        recorder = Recorder("m")
        recorder.record(prompt, generation(tuple(answer)), "", temperature=1.0)
        recorder.record([*following, 3], generation((1,)), "", temperature=1.0)
        assert len(recorder.sequences()) == sequences


def test_a_shorter_prompt_starts_another_sequence() -> None:
    recorder = Recorder("m")
    recorder.record([1, 2], generation((3, 4)), "", temperature=1.0)
    recorder.record([1, 2, 3], generation((4,)), "", temperature=1.0)
    assert [sequence.tokens.numpy().tolist() for sequence in recorder.sequences()] == [[1, 2, 3, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"role": "critic"}, {"fresh": True}])
def test_another_temperature_or_role_or_fresh_starts_another(change: dict[str, object]) -> None:
    recorder = Recorder("m")
    settings: dict[str, object] = {"temperature": 1.0, "role": "solver"}
    recorder.record([1, 2], generation((3,)), "", **settings)  # type: ignore[arg-type]
    recorder.record([1, 2, 3, 4], generation((5,)), "", **(settings | change))  # type: ignore[arg-type]
    first, second = recorder.sequences()
    assert second.tokens.numpy().tolist() == [1, 2, 3, 4, 5]
    assert second.loss_mask.numpy().tolist() == [False] * 4 + [True]
    assert first.tokens.numpy().tolist() == [1, 2, 3]


def test_the_last_rewarded_turn_decides_and_none_masks() -> None:
    recorder = Recorder("m")
    first = recorder.record([1, 2], generation((3,)), "", temperature=1.0)
    second = recorder.record([1, 2, 3, 4], generation((5,)), "", temperature=1.0)
    assert recorder.sequences()[0].reward is None
    first.reward = 0.25
    assert recorder.sequences()[0].reward == 0.25
    second.reward = 1
    first.reward = 0.5
    assert (first.reward, second.reward, recorder.sequences()[0].reward) == (0.5, 1.0, 1.0)
    second.reward = None
    assert recorder.sequences()[0].reward is None


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    turn = Recorder("m").record([1, 2], generation((3,)), "", temperature=1.0)
    with pytest.raises(ValueError, match="not finite"):
        turn.reward = reward


def test_a_generation_that_does_not_add_up_is_refused() -> None:
    short = Generation(tokens=(1, 2), logprobs=(-1.0,), versions=(0, 0), finish_reason="stop")
    with pytest.raises(ValueError, match="must agree"):
        Recorder("m").record([1, 2], short, "", temperature=1.0)


def test_a_sequence_without_a_sampled_token_is_left_out() -> None:
    recorder = Recorder("m")
    recorder.record([1, 2], generation(()), "", temperature=1.0)
    assert recorder.sequences() == ()
