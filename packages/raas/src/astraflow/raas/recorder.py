"""Records what a policy sampled as training sequences: token in, token out.

Pure bookkeeping, no I/O. Invariants: a recorded sequence is exactly the ids the engine saw and sampled, in that order;
`loss_mask` is true exactly on sampled tokens; a later turn extends a sequence only when its prompt begins with exactly
the tokens so far (same role, same temperature), otherwise it starts another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Ids

import numpy as np

from astraflow.dataflow import Array, FinishReason, Sequence

from .interface import Generation


class Stream:
    """One sequence while it grows, and the rewards its turns were given."""

    def __init__(self, role: str, temperature: float) -> None:
        self.role = role
        self.temperature = temperature
        self.tokens: list[int] = []
        self.loss_mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason: FinishReason = "stop"
        self._turns = 0
        self._rewards: dict[int, float | None] = {}

    @property
    def reward(self) -> float | None:
        """The reward of the last turn that was given one; None (masked) if none was."""
        return self._rewards[max(self._rewards)] if self._rewards else None

    def accepts(self, prompt: Ids[int], role: str, temperature: float) -> bool:
        """Does `prompt` begin with exactly the tokens so far?"""
        return (
            role == self.role
            and temperature == self.temperature
            and len(prompt) >= len(self.tokens)
            and list(prompt[: len(self.tokens)]) == self.tokens
        )

    def extend(self, prompt: Ids[int], generation: Generation) -> int:
        """Append what `prompt` adds to the tokens so far, then what was sampled; returns the turn's number."""
        given = list(prompt[len(self.tokens) :])
        sampled = len(generation.tokens)
        self.tokens += [*given, *generation.tokens]
        self.loss_mask += [False] * len(given) + [True] * sampled
        self.logprobs += [0.0] * len(given) + list(generation.logprobs)
        self.versions += [-1] * len(given) + list(generation.versions)
        self.finish_reason = generation.finish_reason
        self._turns += 1
        return self._turns - 1

    def set_reward(self, turn: int, reward: float | None) -> None:
        """Reward the sequence on behalf of a turn; the last rewarded turn decides.

        Raises:
            ValueError: the reward is NaN or infinite. A sample that could not be scored has no reward (None).
        """
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"reward {reward} is not finite; use None for an answer that could not be scored")
        self._rewards[turn] = None if reward is None else float(reward)

    def reward_of(self, turn: int) -> float | None:
        return self._rewards.get(turn)

    def sequence(self, model_id: str) -> Sequence:
        """tokens int32 [L], loss_mask bool [L], logprobs float32 [L], versions int32 [L]."""
        return Sequence(
            model_id=model_id,
            role=self.role,
            tokens=Array.of(np.array(self.tokens, dtype=np.int32)),
            loss_mask=Array.of(np.array(self.loss_mask, dtype=np.bool_)),
            logprobs=Array.of(np.array(self.logprobs, dtype=np.float32)),
            versions=Array.of(np.array(self.versions, dtype=np.int32)),
            temperature=self.temperature,
            finish_reason=self.finish_reason,
            reward=self.reward,
        )


class RecordedTurn:
    """One answer and the sequence it belongs to; implements `Turn`."""

    def __init__(self, stream: Stream, number: int, text: str, finish_reason: FinishReason) -> None:
        self._stream = stream
        self._number = number
        self._text = text
        self._finish_reason = finish_reason

    @property
    def text(self) -> str:
        return self._text

    @property
    def finish_reason(self) -> FinishReason:
        return self._finish_reason

    @property
    def reward(self) -> float | None:
        return self._stream.reward_of(self._number)

    @reward.setter
    def reward(self, value: float | None) -> None:
        self._stream.set_reward(self._number, value)


class Recorder:
    """The sequences of one policy in one trajectory."""

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self._streams: list[Stream] = []

    def record(
        self,
        prompt: Ids[int],
        generation: Generation,
        text: str,
        *,
        temperature: float,
        role: str = "",
        fresh: bool = False,
    ) -> RecordedTurn:
        """Record one answer to `prompt` [P]; it extends the longest sequence that its prompt continues.

        Raises:
            ValueError: the generation has not one log-probability and one version per token.
        """
        counts = len(generation.tokens), len(generation.logprobs), len(generation.versions)
        if len(set(counts)) != 1:
            raise ValueError(f"the engine returned {counts} tokens, log-probabilities and versions: they must agree")
        fitting = [] if fresh else [s for s in self._streams if s.accepts(prompt, role, temperature)]
        if fitting:
            stream = max(fitting, key=lambda s: len(s.tokens))
        else:
            stream = Stream(role, temperature)
            self._streams.append(stream)
        return RecordedTurn(stream, stream.extend(prompt, generation), text, generation.finish_reason)

    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences in which something was sampled, in the order they were begun."""
        return tuple(stream.sequence(self.model_id) for stream in self._streams if any(stream.loss_mask))
