"""Exceptions as messages: declared ones come back as themselves, everything else as `RemoteError` with a summary."""

from __future__ import annotations

import traceback
from typing import Literal

import msgspec

from .describe import Description
from .interface import DeadlineExceeded, FrameTooLarge, RemoteError, Unavailable

MAX_TEXT = 4096
SUMMARY_FRAMES = 3

Code = Literal["declared", "error", "deadline", "cancelled", "unavailable", "too_large"]


class FailureBody(msgspec.Struct, frozen=True, array_like=True):
    """Why a call failed. `kind` is the exception's class name; it selects among the interface's own errors only."""

    code: Code
    kind: str = ""
    message: str = ""
    summary: str = ""


def failure_of(error: Exception, description: Description) -> FailureBody:
    """What the caller is told of an exception that left a handler.

    A group with a single exception in it (a task group's) counts as that exception.
    """
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    message = _said(error)
    for base in type(error).__mro__:
        if base in description.errors:
            return FailureBody("declared", base.__name__, message)
    frames = encodable("".join(traceback.format_tb(error.__traceback__)[-SUMMARY_FRAMES:])[-MAX_TEXT:])
    return FailureBody("error", type(error).__name__, message, frames)


def encodable(text: str) -> str:
    """The text with what UTF-8 cannot hold (a file name's stray bytes, say) escaped."""
    return text.encode(errors="backslashreplace").decode()


def _said(error: Exception) -> str:
    try:
        return encodable(str(error)[:MAX_TEXT])
    except Exception as failed:  # the handler's own class: it may raise anything, and the caller still wants an answer
        return f"(its text could not be made: {type(failed).__name__})"


def error_of(failure: FailureBody, description: Description, method: str) -> Exception:
    """The exception that the caller of `method` sees."""
    where = f"{description.name}.{method}"
    match failure.code:
        case "declared":
            for declared in description.errors:
                if declared.__name__ == failure.kind:
                    return declared(failure.message)
        case "deadline":
            return DeadlineExceeded(f"{where} did not end within its deadline")
        case "unavailable":
            return Unavailable(f"{where}: {failure.message}")
        case "too_large":
            return FrameTooLarge(f"{where}: {failure.message}")
    return RemoteError(failure.kind or failure.code, failure.message, failure.summary)
