from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.recipes.math_tasks import (
    CLAIM_ERRORS,
    MathTask,
    held_out_prompts,
    is_held_out,
    train_prompts,
    with_claims,
)
from astraflow.recipes.scoring import first_integer, is_correct, last_integer, write_integer


def test_problems_have_exactly_the_digits_asked_for_and_right_answers() -> None:
    for prompt in train_prompts(MathTask(train_problems=100), seed=3) + held_out_prompts(MathTask(), 100):
        a, b = prompt.metadata["a"], prompt.metadata["b"]
        assert isinstance(a, int)
        assert isinstance(b, int)
        assert 10 <= a <= 99
        assert 0 <= b <= 9
        assert prompt.metadata["expression"] == f"{a} + {b}"
        assert prompt.metadata["opening"] == f"{a} + {b} = "
        assert prompt.reference == str(a + b)
        assert prompt.messages[-1].content == f"What is {a} + {b}?"


def test_held_out_problems_are_never_trained_on() -> None:
    held_out = {str(p.metadata["expression"]) for p in held_out_prompts(MathTask(), 300)}
    assert len(held_out) == 300
    for seed in range(3):
        prompts = train_prompts(MathTask(), seed=seed)
        trained = {str(p.metadata["expression"]) for p in prompts}
        assert len(trained) == len(prompts) == 500
        assert not trained & held_out
        assert not any(map(is_held_out, trained))


def test_swapped_terms_fall_on_the_same_side() -> None:
    assert all(is_held_out(f"{a} + {b}") == is_held_out(f"{b} + {a}") for a in range(10, 40) for b in range(10, 40))


def test_the_seed_decides_the_training_problems_and_nothing_else() -> None:
    task = MathTask(train_problems=40)
    assert train_prompts(task, seed=1) == train_prompts(task, seed=1)
    assert train_prompts(task, seed=1) != train_prompts(task, seed=2)
    other = held_out_prompts(msgspec.structs.replace(task, wording="other"), 20)
    plain = held_out_prompts(task, 20)
    assert [p.reference for p in other] == [p.reference for p in plain]
    assert all(a.messages != b.messages and a.id != b.id for a, b in zip(other, plain, strict=True))


def test_more_held_out_problems_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="of 900 held-out problems exist"):
        held_out_prompts(MathTask(), 900)


@pytest.mark.parametrize(("operator", "digits"), [("-", (2, 1)), ("*", (1, 1)), ("+", (2, 2))])
def test_other_operators(operator: str, digits: tuple[int, int]) -> None:
    task = msgspec.convert({"operator": operator, "digits": digits, "train_problems": 20}, MathTask)
    prompts = train_prompts(task, seed=0)
    assert len(prompts) == 20
    assert all(is_correct(eval(str(p.metadata["expression"])), p.reference) for p in prompts)


def test_claims_are_right_in_half_of_the_problems_and_plausible_in_the_rest() -> None:
    prompts = with_claims(held_out_prompts(MathTask(), 300))
    errors = []
    for prompt in prompts:
        claim = prompt.metadata["claim"]
        assert isinstance(claim, int)
        assert claim >= 0
        errors.append(claim - int(prompt.reference))
    assert errors.count(0) == 150
    assert set(errors) == {0, *CLAIM_ERRORS}
    train = train_prompts(MathTask(train_problems=50), seed=0)
    assert sum(str(p.metadata["claim"]) == p.reference for p in train) == 25


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("39", 39, 39),
        (" 39.", 39, 39),
        ("39 because 34 + 5 is 39, not 40", 39, 40),
        ("-4", -4, -4),
        ("9-5", 9, 5),
        ("1,234", 1234, 1234),
        ("39.5", None, None),
        ("", None, None),
        ("thirty-nine", None, None),
        ("9" * 5000, None, None),
    ],
)
def test_numbers_are_read(text: str, first: int | None, last: int | None) -> None:
    assert first_integer(text) == first
    assert last_integer(text) == last


@given(st.integers(-(10**12), 10**12), st.booleans())
def test_what_is_written_is_read_back(value: int, reversed_digits: bool) -> None:
    written = write_integer(value, reversed_digits=reversed_digits)
    assert first_integer(written, reversed_digits=reversed_digits) == value
    assert last_integer(f"so {written}", reversed_digits=reversed_digits) == value


def test_only_the_whole_answer_scores() -> None:
    assert is_correct(5, "5")
    assert not is_correct(51, "5")
    assert not is_correct(None, "5")
