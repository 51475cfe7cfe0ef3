"""The one thread that writes: it takes what it is handed, one after the other, and says how each went.

Invariant: after a failure nothing more is written, so that the file never has a hole.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from .records import Record

Done = Callable[[Exception | None], object]


class WriterThread:
    """Starts at once; `stop` ends it when all that was handed over is done."""

    def __init__(self, write: Callable[[list[Record]], None], name: str) -> None:
        self._write = write
        self._queue: queue.SimpleQueue[tuple[list[Record], Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, records: list[Record], done: Done) -> None:
        """Have `records` written; `done` is called in the thread, with what went wrong or None."""
        self._queue.put((records, done))

    def stop(self) -> None:
        """Wait for the end of what was handed over. Blocks."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        failed: Exception | None = None
        while (work := self._queue.get()) is not None:
            records, done = work
            if failed is None:
                try:
                    self._write(records)
                except Exception as error:  # whatever it was, the run must hear of it: nobody else is listening
                    failed = error
            done(failed)
