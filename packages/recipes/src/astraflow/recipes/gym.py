"""The arithmetic of the reasoning-gym library.

Import this module where a thread or a process can afford that, never first inside a rollout.
"""

from __future__ import annotations

from typing import Any

from astraflow.dataflow import gym_dataset


def basic_arithmetic(*, digits: int, operator: str, size: int, seed: int) -> Any:
    """`size` two-term problems; item i depends on `seed` + i alone. Terms are drawn from [0, 10^digits]."""
    return gym_dataset(
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
