"""Reading numbers out of answers, and scoring them.

Invariant: an answer counts only if it is exactly the number asked for. The library's scorer gives partial credit to
text that contains the answer ("51" for 5), so a number is read first and nothing but 1.0 is accepted.
"""

from __future__ import annotations

import re

from .gym import basic_arithmetic

NUMBER = re.compile(r"(?:(?<!\w)-)?\d+(?:,\d{3})*(?:\.\d+)?", re.ASCII)
LONGEST = 32
_SCORER = basic_arithmetic(digits=1, operator="+", size=1, seed=0)


def first_integer(text: str, *, reversed_digits: bool = False) -> int | None:
    """The first number in `text` if it is an integer, else None."""
    found = NUMBER.search(text)
    return None if found is None else _integer(found.group(), reversed_digits)


def last_integer(text: str, *, reversed_digits: bool = False) -> int | None:
    """The last number in `text` if it is an integer, else None: the lenient reading."""
    found = NUMBER.findall(text)
    return _integer(found[-1], reversed_digits) if found else None


def write_integer(value: int, *, reversed_digits: bool = False) -> str:
    """The digits of `value`, last one first if asked for: what `first_integer` reads back."""
    digits = str(abs(value))
    return ("-" if value < 0 else "") + (digits[::-1] if reversed_digits else digits)


def is_correct(answer: int | None, reference: str) -> bool:
    """Whether the library's scorer gives `answer` full marks against the reference answer."""
    return answer is not None and float(_SCORER.score_answer(str(answer), {"answer": reference})) == 1.0


def _integer(number: str, reversed_digits: bool) -> int | None:
    digits = number.removeprefix("-").replace(",", "")
    if "." in digits or len(digits) > LONGEST:
        return None
    value = int(digits[::-1] if reversed_digits else digits)
    return -value if number.startswith("-") else value
