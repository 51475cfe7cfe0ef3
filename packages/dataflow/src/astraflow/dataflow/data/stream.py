"""Prompts of which nobody knows how many come: read ahead in a thread, a chunk at a time.

Invariant: `next` never waits for the reader; what a restored stream gives is what it would have given, because it is
read again from its beginning up to there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec

from ..algorithms.stage import read_state
from ..algorithms.table import PromptTable
from ..interface import Prompt
from ..sources import PromptSource, SourceFailed

CHUNK = 128


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    given: int


class StreamSource(PromptSource):
    """The prompts that `read(epoch)` yields, epoch after epoch; `epochs` None goes on for ever.

    A prompt that `keep` does not want, or whose id came before in the same epoch, is passed over and counted.
    """

    def __init__(
        self,
        read: Callable[[int], Iterator[Prompt]],
        epochs: int | None = 1,
        keep: Callable[[Prompt], bool] = lambda prompt: True,
    ) -> None:
        self._read, self._epochs, self._keep = read, epochs, keep
        self._passed_over = 0
        self._epoch = 0
        self._given = 0
        self._begin(StreamState(epoch=0, given=0))

    def next(self) -> Prompt | None:
        """Raises SourceFailed if reading failed."""
        if len(self._ready) < CHUNK:
            self._read_ahead()
        if not self._ready:
            return None
        epoch, prompt = self._ready.popleft()
        self._given = self._given + 1 if epoch == self._epoch else 1
        self._epoch = epoch
        return prompt

    @property
    def ended(self) -> bool:
        return not self._ready and self._exhausted

    @property
    def epoch(self) -> int:
        return self._epoch

    def state(self) -> StreamState:
        return StreamState(epoch=self._epoch, given=self._given)

    def restore(self, state: Any, /) -> None:
        self._begin(read_state(state, StreamState))

    def stats(self) -> dict[str, float]:
        return {"epoch": float(self._epoch), "given": float(self._given), "passed_over": float(self._passed_over)}

    def _begin(self, at: StreamState) -> None:
        self._epoch, self._given = at.epoch, at.given
        self._ready: deque[tuple[int, Prompt]] = deque()
        self._chunks = self._chunked(at)
        self._fetch: Fetch | None = None
        self._exhausted = False

    def _read_ahead(self) -> None:
        """Take what the reader has, and let it go on."""
        if self._fetch is None and not self._exhausted:
            self._fetch = Fetch(self._chunks)
        if self._fetch is not None and self._fetch.done and not (self._fetch.failed and self._ready):
            chunk = self._fetch.result()
            self._fetch = None
            self._ready.extend(chunk)
            self._exhausted = not chunk

    def _chunked(self, at: StreamState) -> Iterator[list[tuple[int, Prompt]]]:
        """Lists of prompts with their epochs, from there on; runs in the reader's threads, one at a time."""
        epoch, skip = at.epoch, at.given
        while self._epochs is None or epoch < self._epochs:
            prompts = islice(self._wanted(epoch), skip, None)
            nothing = True
            while chunk := list(islice(prompts, CHUNK)):
                nothing = False
                yield [(epoch, prompt) for prompt in chunk]
            if nothing and not skip:
                raise ValueError(f"epoch {epoch} has no prompt")
            epoch, skip = epoch + 1, 0

    def _wanted(self, epoch: int) -> Iterator[Prompt]:
        seen: PromptTable[bool] = PromptTable()
        for prompt in self._read(epoch):
            if seen.get(prompt.id) or not self._keep(prompt):
                self._passed_over += 1
                continue
            seen.set(prompt.id, True)
            yield prompt


class Fetch:
    """The next item of an iterator, taken in a thread of its own, which is left alone if nobody wants it any more."""

    def __init__(self, chunks: Iterator[list[tuple[int, Prompt]]]) -> None:
        self._made: list[tuple[int, Prompt]] = []
        self._error: Exception | None = None
        self._finished = threading.Event()
        threading.Thread(target=self._run, args=(chunks,), name="prompt-stream", daemon=True).start()

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def result(self) -> list[tuple[int, Prompt]]:
        """The chunk, empty at the end. Raises SourceFailed with the cause."""
        if self._error is not None:
            raise SourceFailed(f"a stream of prompts failed: {self._error!r}") from self._error
        return self._made

    def _run(self, chunks: Iterator[list[tuple[int, Prompt]]]) -> None:
        try:
            self._made = next(chunks, [])
        except Exception as error:  # whatever a reader raises is the dataflow's to report
            self._error = error
        self._finished.set()
