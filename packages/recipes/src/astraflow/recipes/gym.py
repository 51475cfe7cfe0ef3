"""The one place that imports reasoning-gym: it pulls in all of its task families, which takes seconds.

Import this module where a thread or a process can afford that, never first inside a rollout.
"""

from __future__ import annotations

import warnings
from typing import Any

with warnings.catch_warnings():
    # One of its dependencies compares strings with `is`; the compiler says so on the first import.
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym


def basic_arithmetic(*, digits: int, operator: str, size: int, seed: int) -> Any:
    """`size` two-term problems; item i depends on `seed` + i alone. Terms are drawn from [0, 10^digits]."""
    return reasoning_gym.create_dataset(
        "basic_arithmetic",
        min_terms=2,
        max_terms=2,
        min_digits=digits,
        max_digits=digits,
        operators=[operator],
        allow_parentheses=False,
        allow_negation=False,
        size=size,
        seed=seed,
    )
