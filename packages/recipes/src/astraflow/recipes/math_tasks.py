"""Arithmetic problems from the reasoning-gym library, as prompts: which are trained on, which held out, how they read.

Invariant: a held-out problem is never trained on, whatever the seed. Expressions are split by a hash of their terms
(3 + 4 and 4 + 3 fall on the same side), and the two sets are drawn from ranges of seeds far apart.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from astraflow.dataflow import Message, Prompt, Scalar

Operator = Literal["+", "-", "*"]
Wording = Literal["plain", "other"]

HELD_OUT_SHARE = 0.4
"""Share of all expressions that is kept for evaluation: of the 900 sums of two digits and one, about 360."""
SEED_SPACING = 1_000_000
HELD_OUT_SEED = 10**15
CLAIM_ERRORS = (-10, -2, -1, 1, 2, 10)
"""What a wrong claim is off by: slips that a person makes."""

_QUESTIONS = {"plain": "What is {}?", "other": "Work out {} and give only the number."}


class MathTask(msgspec.Struct, frozen=True, kw_only=True):
    """The problems of a run. The defaults suit SmolLM2-135M: it starts below 20 %, but not without reward."""

    digits: tuple[int, int] = (2, 1)
    """Digits of the two terms, exactly."""
    operator: Operator = "+"
    """What joins the terms."""
    wording: Wording = "plain"
    """How the question is put; `other` is for evaluation."""
    train_problems: int = 500
    """Most distinct problems to train on."""
    reversed_digits: bool = False
    """Numbers that policies write and read as claims have the last digit first (39 is 93): the order in which
    carries come, so that a very small model can learn sums."""
    system_prompt: str = ""
    """System message. Given even when empty: otherwise some chat templates insert a long one of their own."""


def train_prompts(task: MathTask, *, seed: int) -> list[Prompt]:
    """Up to `task.train_problems` distinct problems, each with a claim for the verifier, right in half of them."""
    expressions = _distinct(task, seed * SEED_SPACING, task.train_problems, held_out=False)
    return with_claims([make_prompt(task, expression, "train") for expression in expressions], seed=seed)


def held_out_prompts(task: MathTask, n: int) -> list[Prompt]:
    """`n` distinct problems, the same ones for every seed and wording, none of which is ever trained on.

    Raises:
        ValueError: there are not so many.
    """
    expressions = _distinct(task, HELD_OUT_SEED, n, held_out=True)
    if len(expressions) < n:
        raise ValueError(
            f"only {len(expressions)} of {n} held-out problems exist with digits {task.digits}; ask for fewer"
        )
    return [make_prompt(task, expression, "held-out") for expression in expressions]


def with_claims(prompts: Sequence[Prompt], *, seed: int = 0) -> list[Prompt]:
    """The prompts with `claim` in their metadata: right in every other one, wrong by a plausible slip in the rest."""
    rng = random.Random(seed)
    claimed = []
    for index, prompt in enumerate(prompts):
        answer = int(prompt.reference)
        slips = [answer + error for error in CLAIM_ERRORS if answer < 0 or answer + error >= 0]
        claim = answer if index % 2 == 0 else rng.choice(slips)
        claimed.append(msgspec.structs.replace(prompt, metadata={**prompt.metadata, "claim": claim}))
    return claimed


def is_held_out(expression: str) -> bool:
    """Whether a problem belongs to evaluation; the order of its terms does not matter."""
    left, operator, right = expression.split(" ")
    key = f"{operator} {' '.join(sorted((left, right)))}"
    return hashlib.sha256(key.encode()).digest()[0] < HELD_OUT_SHARE * 256


def _distinct(task: MathTask, seed: int, n: int, *, held_out: bool) -> list[str]:
    found: dict[str, None] = {}
    if n > 0:
        for expression in _expressions(task, seed):
            if is_held_out(expression) == held_out:
                found[expression] = None
                if len(found) == n:
                    break
    return list(found)


def _expressions(task: MathTask, seed: int) -> Iterator[str]:
    """Expressions of exactly the digits asked for: the library only bounds them, and draws 10^digits too."""
    from .gym import basic_arithmetic

    widest = max(task.digits)
    # Enough draws to meet nearly every expression there is (five times their number), but no endless search.
    draws = min(SEED_SPACING, 5 * (10**widest + 1) ** 2)
    dataset = basic_arithmetic(digits=widest, operator=task.operator, size=draws, seed=seed)
    for index in range(draws):
        expression = str(dataset[index]["metadata"]["expression"])
        left, _, right = expression.split(" ")
        if (len(left), len(right)) == task.digits:
            yield expression


def make_prompt(task: MathTask, expression: str, split: str) -> Prompt:
    """A problem as policies and workflows see it. `split` ends the source's name; see `Problem` for the metadata."""
    left, operator, right = expression.split(" ")
    a, b = int(left), int(right)
    answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
    metadata: dict[str, Scalar] = {
        "expression": expression,
        "a": a,
        "b": b,
        "opening": f"{expression} = ",
        "reversed_digits": task.reversed_digits,
    }
    return Prompt(
        id=f"{expression} ({task.wording})",
        source=f"basic_arithmetic/{split}",
        messages=(Message("system", task.system_prompt), Message("user", _QUESTIONS[task.wording].format(expression))),
        reference=str(answer),
        metadata=metadata,
    )
