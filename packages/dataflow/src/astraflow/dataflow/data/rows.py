"""From a row of a data set to a prompt.

Invariant: every row either becomes a prompt or is refused with its number and the column that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from ..interface import Message, Prompt, Scalar


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Which columns mean what. `prompt` holds the question's text, or messages with role and content; `id` empty: the
    row's number, or a digest of its prompt; `system` is a text that comes before every prompt; `metadata` are columns
    to keep."""

    prompt: str = "prompt"
    answer: str = ""
    id: str = ""
    system: str = ""
    metadata: tuple[str, ...] = ()

    def check(self, known: Iterable[str] | None, where: str) -> None:
        """Raises ValueError if one of them is not among the columns there are."""
        if known is None:
            return
        there = list(known)
        for column in (self.prompt, self.answer, self.id, *self.metadata):
            if column and column not in there:
                raise ValueError(f"{where} has no column {column!r}; it has {', '.join(there)}")


def row_prompt(row: Mapping[str, Any], source: str, columns: Columns, index: int | None = None) -> Prompt:
    """The prompt of a row of the data set `source`; `index` None where rows have no numbers that stay.

    Raises:
        ValueError: a column is missing or cannot be read.
    """
    where = f"{source}, row {index}" if index is not None else source
    system = (Message("system", columns.system),) if columns.system else ()
    messages = system + _messages(row.get(columns.prompt), f"{where}, column {columns.prompt!r}")
    number = str(index) if index is not None else _digest(messages)
    return Prompt(
        id=str(row[columns.id]) if columns.id else number,
        source=source,
        messages=messages,
        reference=str(row[columns.answer]) if columns.answer else "",
        metadata={name: _scalar(row.get(name)) for name in columns.metadata},
    )


def _digest(messages: tuple[Message, ...]) -> str:
    return blake2b(msgspec.msgpack.encode(messages), digest_size=8).hexdigest()


def _messages(question: Any, where: str) -> tuple[Message, ...]:
    if isinstance(question, str) and question:
        return (Message("user", question),)
    if not isinstance(question, Sequence) or not question:
        raise ValueError(f"{where}: wanted a text or messages, not {question!r:.60}")
    try:
        return tuple(msgspec.convert(message, Message) for message in question)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: a message needs role and content: {error}") from error


def _scalar(value: Any) -> Scalar:
    return value if isinstance(value, str | int | float | bool) else msgspec.json.encode(value).decode()
