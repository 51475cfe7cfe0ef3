"""A policy as a workflow sees it: chat or continue ids, sampled by its engine, recorded token by token.

Invariant: ids that were sampled are used again as they are. When messages continue an earlier answer, the prompt is the
earlier ids plus the ids of what the template adds; if the template shows the earlier turns otherwise than they were,
the conversation is rendered from scratch and the recorder starts another sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import anyio
import anyio.lowlevel
import anyio.to_thread

from astraflow.dataflow import Message, RolloutTask, Sampling
from astraflow.dataflow import Sequence as TokenSequence

from .interface import Engine, GenerateRequest, Generation
from .meter import Meter
from .recorder import RecordedTurn, Recorder
from .tokenizer import Tokenizer

SLOW_CHARACTERS = 16_000
"""Longer text is encoded in a thread (about 1 ms per 1 500 characters)."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What serves one policy in a worker: shared by all rollouts.

    Rollouts pass the turnstile one by one, each in a turn of the event loop's own: an engine that answers a batch at
    once would otherwise have all of them scored in one turn, with nothing else served meanwhile.
    """

    engine: Engine
    tokenizer: Tokenizer
    turnstile: anyio.Lock = field(default_factory=anyio.Lock)

    async def turn(self) -> None:
        """Wait for a turn of the event loop that no other rollout of this policy begins in."""
        async with self.turnstile:
            await anyio.lowlevel.checkpoint()


@dataclass(frozen=True, slots=True)
class Conversation:
    """An answered prompt: its whole text, special tokens included, and its ids."""

    text: str
    tokens: tuple[int, ...]


class Transcript:
    """The messages of a trajectory as people read them, in the order they were said."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._shown: dict[str, tuple[Message, ...]] = {}

    def add(self, speaker: str, asked: tuple[Message, ...], answer: str) -> None:
        """Note an answer and those of the messages it was asked with that its last conversation did not show."""
        shown = self._shown.get(speaker, ())
        known = len(shown) if asked[: len(shown)] == shown else 0
        said = Message("assistant", answer, speaker)
        self.messages += [*asked[known:], said]
        self._shown[speaker] = (*asked, Message("assistant", answer))


class Handle:
    """One policy in one rollout; implements `PolicyHandle`."""

    def __init__(
        self,
        model_id: str,
        policy: Policy,
        sampling: Sampling,
        task: RolloutTask,
        index: int,
        transcript: Transcript,
        meter: Meter,
    ) -> None:
        self._model_id = model_id
        self._policy = policy
        self._tokenizer = policy.tokenizer
        self._sampling = sampling
        self._task = task
        self._index = index
        self._transcript = transcript
        self._meter = meter
        self._recorder = Recorder(model_id)
        self._conversations: list[Conversation] = []
        self._turns = 0

    @property
    def model_id(self) -> str:
        return self._model_id

    def sequences(self) -> tuple[TokenSequence, ...]:
        """What was sampled so far."""
        return self._recorder.sequences()

    async def chat(
        self, messages: Sequence[Message], /, *, prefill: str = "", role: str = "", fresh: bool = False
    ) -> RecordedTurn:
        """Answer `messages`; see `PolicyHandle.chat`.

        Raises:
            EngineError: the engine cannot answer (prompt too long, engine gone).
        """
        await self._policy.turn()
        asked = tuple(messages)
        text = self._tokenizer.render(asked)
        prompt = await self._ids(text)
        if prefill:
            prompt += await self._encode(prefill)
        generation = await self._sample(prompt)
        turn = self._record(prompt, generation, prefill, role, fresh)
        whole = text + prefill + self._tokenizer.decode(generation.tokens, special=True)
        self._conversations.append(Conversation(whole, prompt + generation.tokens))
        self._transcript.add(role or self._model_id, asked, turn.text)
        return turn

    async def generate(self, prompt: Sequence[int], /, *, role: str = "", fresh: bool = False) -> RecordedTurn:
        """Continue `prompt`, token ids [P]; see `PolicyHandle.generate`.

        Raises:
            EngineError: the engine cannot answer.
        """
        ids = tuple(prompt)
        turn = self._record(ids, await self._sample(ids), "", role, fresh)
        self._transcript.add(role or self._model_id, (), turn.text)
        return turn

    async def _ids(self, text: str) -> tuple[int, ...]:
        """The ids of rendered text, beginning with those of the longest conversation that it continues."""
        continued = [c for c in self._conversations if text.startswith(c.text)]
        if not continued:
            return await self._encode(text)
        earlier = max(continued, key=lambda c: len(c.text))
        return earlier.tokens + await self._encode(text[len(earlier.text) :])

    async def _encode(self, text: str) -> tuple[int, ...]:
        if len(text) > SLOW_CHARACTERS:
            return await anyio.to_thread.run_sync(self._tokenizer.encode, text)
        return self._tokenizer.encode(text)

    async def _sample(self, prompt: tuple[int, ...]) -> Generation:
        turn, self._turns = self._turns, self._turns + 1
        task = self._task
        request = GenerateRequest(
            request_id=f"{task.task_id}/{task.attempt}/{self._index}/{self._model_id}/{turn}",
            prompt=prompt,
            sampling=self._sampling,
            stop_token_ids=self._tokenizer.stop_token_ids,
            seed=turn_seed(task.seed, self._index, self._model_id, turn),
        )
        generation = None
        self._meter.begin(request.request_id, self._model_id, self._policy.engine)
        try:
            generation = await self._policy.engine.generate(request)
        except Exception as error:
            error.add_note(f"policy {self._model_id!r}, turn {turn}, prompt of {len(prompt)} tokens")
            raise
        finally:
            self._meter.end(request.request_id, generation)
        await self._policy.turn()
        return generation

    def _record(
        self, prompt: tuple[int, ...], generation: Generation, prefill: str, role: str, fresh: bool
    ) -> RecordedTurn:
        text = prefill + self._tokenizer.decode(generation.tokens, special=False)
        # Greedy answers carry log-probabilities at temperature 1.
        temperature = self._sampling.temperature or 1.0
        return self._recorder.record(prompt, generation, text, temperature=temperature, role=role, fresh=fresh)


def turn_seed(task_seed: int, index: int, model_id: str, turn: int) -> int:
    """A seed in [0, 2^63) for one answer: the same for the same task seed, sample, policy and turn."""
    digest = blake2b(f"{task_seed}/{index}/{model_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
