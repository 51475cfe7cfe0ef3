"""Where log events go: all of them as JSON lines into the run's log, warnings and errors also to the person."""

from __future__ import annotations

import logging
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import structlog

from .config import ConfigError
from .driver import Abandoned

LOUD = {"warning", "error", "critical", "exception"}


def setup_logging(path: Path, tell: Callable[[str], None]) -> None:
    """Configure structlog and the standard library's logging for this process."""
    file = path.open("a", buffering=1)

    def to_person(_: object, level: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if level in LOUD:
            details = " ".join(f"{k}={v}" for k, v in event.items() if k not in ("event", "exc_info", "exception"))
            tell(f"{level}: {event['event']} {details}".rstrip())
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            to_person,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=file),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter('{"level": "%(levelname)s", "logger": "%(name)s", "event": "%(message)s"}'))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


def quiet_transformers() -> None:
    """No progress bars and no reports of loading on the screen."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def show_failure(error: BaseException, log: Path, debug: bool) -> None:
    """Tell the person what failed; the traceback goes to the screen when debugging, else to the log.

    Of what the person did (a configuration that cannot be run, a second Ctrl-C, `q` in the debugger), only the
    message.
    """
    text = "".join(traceback.format_exception(error))
    structlog.get_logger("astraflow.recipes").info("run failed", traceback=text)
    if isinstance(error, ConfigError | Abandoned | BdbQuit):
        print(f"recipes: {str(error) or 'ended in the debugger'}", file=sys.stderr)
        return
    if debug:
        print(text, file=sys.stderr)
        return
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    print(f"recipes: {type(error).__name__}: {error}{notes}\n  traceback in {log}", file=sys.stderr)
