"""How far a sample is: tokens sampled so far and the versions it began at, asked for while it still runs.

Invariant: tokens never become fewer, whether a generation begins, ends or is cancelled.
"""

from __future__ import annotations

import anyio

from .interface import Engine, Generation


class Meter:
    """One sample's rollout, of all its policies. `scope` is what to cancel when its time is up."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.began: dict[str, int] = {}
        """The oldest version that a generation of this policy began at."""
        self._done = 0
        self._running: dict[str, tuple[str, Engine]] = {}
        self._seen: dict[str, int] = {}

    def begin(self, request_id: str, model_id: str, engine: Engine) -> None:
        self._running[request_id] = (model_id, engine)

    def end(self, request_id: str, generation: Generation | None) -> None:
        """`generation` None: it was cancelled or failed; what it was last seen to have sampled counts all the same."""
        model_id, _ = self._running.pop(request_id)
        seen = self._seen.pop(request_id, 0)
        if generation is not None and generation.versions:
            self._note(model_id, generation.versions[0])
        self._done += len(generation.tokens) if generation is not None else seen

    def read(self) -> int:
        """Tokens sampled so far; brings `began` up to date."""
        for request_id, (model_id, engine) in self._running.items():
            progress = engine.progress(request_id)
            if progress.tokens:
                self._seen[request_id] = progress.tokens
                self._note(model_id, progress.began)
        return self._done + sum(self._seen.values())

    def _note(self, model_id: str, version: int) -> None:
        self.began[model_id] = min(version, self.began.get(model_id, version))
