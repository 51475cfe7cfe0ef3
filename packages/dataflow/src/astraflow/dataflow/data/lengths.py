"""How long a prompt is: in tokens, as its chat template writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..interface import Prompt


def fits(tokenizer: str, max_tokens: int) -> Callable[[Prompt], bool]:
    """Whether a prompt has at most `max_tokens` tokens for the tokenizer at a directory or of a hub id; with
    `max_tokens` 0, always. Needs the extra `[data]`.

    Raises:
        ValueError: a bound without a tokenizer.
    """
    if not max_tokens:
        return lambda prompt: True
    if not tokenizer:
        raise ValueError(f"max_tokens is {max_tokens}: name the tokenizer that counts them")
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(tokenizer)
    return lambda prompt: prompt_tokens(loaded, prompt) <= max_tokens


def prompt_tokens(tokenizer: Any, prompt: Prompt) -> int:
    """Tokens of the prompt with the opening of an answer; of the bare texts where there is no chat template."""
    if not tokenizer.chat_template:
        return sum(len(tokenizer.encode(message.content)) for message in prompt.messages)
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return len(tokenizer.encode(text, add_special_tokens=False))
