"""Text to token ids and back, for policies that speak through a chat template.

Invariant: `encode(render(messages))` are the ids of the tokenizer's own `apply_chat_template(tokenize=True)`; text that
was sampled is never encoded again (see `handles`), only what is new.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from astraflow.dataflow import Message

REMEMBERED = 1024
"""Encodings kept: the samples of a group share their prompt."""


class Tokenizer(Protocol):
    """What a handle needs of a tokenizer."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        ...

    def render(self, messages: Sequence[Message], /) -> str:
        """The chat template's text up to where the assistant's answer begins."""
        ...

    def encode(self, text: str, /) -> tuple[int, ...]:
        """Ids of rendered text: special tokens in it are recognised, none is added."""
        ...

    def decode(self, ids: Sequence[int], /, *, special: bool) -> str:
        """Text of ids, with or without the special tokens."""
        ...


class ChatTokenizer:
    """A transformers tokenizer as a `Tokenizer`."""

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_token_ids = tuple(stop_token_ids)
        self._encode = functools.lru_cache(maxsize=REMEMBERED)(self._encode_now)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop_token_ids

    def render(self, messages: Sequence[Message], /) -> str:
        chat = [{"role": message.role, "content": message.content} for message in messages]
        return str(self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))

    def encode(self, text: str, /) -> tuple[int, ...]:
        return self._encode(text)

    def decode(self, ids: Sequence[int], /, *, special: bool) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        return str(text)

    def _encode_now(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def load_tokenizer(directory: str) -> ChatTokenizer:
    """The tokenizer and stop tokens of a Hugging Face directory. Needs the extra `astraflow-raas[transformers]`.

    Raises:
        ValueError: the tokenizer has no chat template, or nothing says which token ends an answer.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    if not tokenizer.chat_template:
        raise ValueError(f"{directory}: the tokenizer has no chat template; use a chat (instruct) model")
    stops = stop_token_ids(Path(directory), tokenizer.eos_token_id)
    if not stops:
        raise ValueError(f"{directory}: no end token; set eos_token_id in generation_config.json")
    return ChatTokenizer(tokenizer, stops)


def stop_token_ids(directory: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """The end tokens that generation_config.json names, and the tokenizer's own; in order, each once."""
    named: list[int] = []
    path = directory / "generation_config.json"
    if path.exists():
        value = json.loads(path.read_text()).get("eos_token_id")
        named = [value] if isinstance(value, int) else list(value or ())
    if eos_token_id is not None:
        named.append(eos_token_id)
    return tuple(dict.fromkeys(named))
