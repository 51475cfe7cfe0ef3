"""What every data algorithm is: something with a state that can be kept, and figures that can be shown.

The kinds (`Selector`, `Filter`, `Correction`, `Order`, `Pick`, `PromptSource`) are Protocols that extend `Stage`.
Subclass one to inherit what is not needed (no state, no figures), or just match its shape.

Invariant: a stage decides by its options, its seed, its state and what it is told alone, never by time or a global
random generator: after `restore(state())` it decides as if it had never stopped.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Protocol, TypeVar

import msgspec

T = TypeVar("T")


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage may know of its place: a constructor that has a parameter `context` gets it. `model_id` is the
    policy it is for, `source` the name that a prompt source goes by."""

    seed: int = 0
    model_id: str = ""
    source: str = ""
    n_samples: int = 1

    def within(self, *names: object) -> Context:
        """The context of a part of this stage: the same, with a seed of its own."""
        text = "/".join(str(name) for name in (self.seed, self.model_id, self.source, *names))
        seed = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
        return msgspec.structs.replace(self, seed=seed)


class AlgorithmFailed(Exception):
    """A data algorithm raised, or gave what it must not; the message names it and says what."""


class Stage(Protocol):
    """The part that is common to all data algorithms."""

    def state(self) -> Any:
        """All that must survive a restart, as a msgspec Struct or plain values; None for a stage without any."""
        return None

    def restore(self, state: Any, /) -> None:
        """Go on from what `state` gave, or from the plain values it comes back as from msgpack (see `read_state`).

        Raises:
            ValueError: it is another stage's.
        """
        if state is not None:
            raise ValueError(f"{type(self).__name__} has no state to restore, but was given {state!r:.100}")

    def stats(self) -> dict[str, float]:
        """Figures by name, for people and metrics."""
        return {}


def read_state(state: Any, kind: type[T]) -> T:
    """A state as `kind`, whether it is one or comes from msgpack as plain values.

    Raises:
        ValueError: it is none.
    """
    try:
        return msgspec.convert(state, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"the state is no {kind.__name__}: {error}") from error


class Dice:
    """Uniform random numbers in [0, 1) of which the whole state is how many were drawn."""

    def __init__(self, seed: int) -> None:
        self._key = seed.to_bytes(8, "big", signed=True)
        self.drawn = 0

    def roll(self) -> float:
        digest = blake2b(self.drawn.to_bytes(8, "big"), key=self._key, digest_size=8).digest()
        self.drawn += 1
        return (int.from_bytes(digest, "big") >> 11) * 2.0**-53
