"""reasoning-gym: the one place that imports it, which pulls in all of its task families and takes seconds.

Call these where a thread or a process can afford that, never first on an event loop.
"""

from __future__ import annotations

import warnings
from typing import Any


def gym_dataset(name: str, *, size: int, seed: int, **params: Any) -> Any:
    """The reasoning-gym data set `name`: `size` items (question, answer, metadata) of which item i depends on
    `seed` + i alone, so space the seeds of disjoint sets by at least `size`. Needs the extra `[data]`.

    Raises:
        ValueError: there is no such data set, or a parameter is wrong.
    """
    with warnings.catch_warnings():
        # One of its dependencies compares strings with `is`; the compiler says so on the first import.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **params)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym data set {name!r}: {error}") from error
