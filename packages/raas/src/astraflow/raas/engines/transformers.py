"""The `transformers` engine: continuous batching of a Hugging Face model in a thread of this process.

Invariant: the thread does one thing at a time, a step of the batch or a change of weights, so every token of a step
has the version of that step, and nothing runs while `commit` does.

The batch is our own (`batch.py`) rather than the library's `init_continuous_batching`: for short answers with many
equal prompts on one CPU thread that one was three times slower (a dense mask across all requests, keys
repeated per head, `torch.multinomial` over the vocabulary, no sharing of a prompt that is still being computed).

Untested on `cuda`: written for it, but only CPU runs have been checked.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import structlog

from astraflow.raas.interface import (
    EngineError,
    EngineGone,
    EngineSpec,
    EngineStats,
    GenerateRequest,
    Generation,
    Progress,
)
from astraflow.weightsync import Sink, TensorSink

if TYPE_CHECKING:
    from astraflow.raas.engines.batch import Batch, Job

log = structlog.get_logger(__name__)


class _Reply:
    """A result that the thread hands to a coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def send(self, result: Any) -> None:
        """From any thread; an exception is raised where the future is awaited."""
        try:
            self._loop.call_soon_threadsafe(self._settle, result)
        except RuntimeError:  # the loop is closed: nobody waits any more
            if not self._loop.is_closed():
                raise

    def _settle(self, result: Any) -> None:
        if self.future.done():
            return
        if isinstance(result, BaseException):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


class _Swap:
    def __init__(self, commit: Callable[[], None], version: int) -> None:
        self.commit = commit
        self.version = version
        self.reply = _Reply()


class TransformersEngine:
    """Samples from a local Hugging Face model with full attention. See `Engine`; `spec.options` has none."""

    def __init__(self, spec: EngineSpec, /) -> None:
        if spec.options:
            raise EngineError(f"{spec.model_id}: the transformers engine has no options; got {sorted(spec.options)}")
        self._spec = spec
        self._version = 0
        self._inbox: queue.SimpleQueue[Job | _Swap | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed: str | None = "it was not started"
        self._cause: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._model: Any = None
        self._batch: Batch | None = None
        self._sink: Sink | None = None
        self._jobs: dict[str, Job] = {}

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        started = time.perf_counter()
        try:
            self._model, self._batch = await anyio.to_thread.run_sync(self._load)
        except EngineError:
            raise
        except Exception as error:  # from_pretrained raises whatever its file formats do
            raise EngineError(f"cannot load {self._spec.model} for {self._spec.model_id}: {error}") from error
        self._closed = None
        self._thread = threading.Thread(target=self._run, name=f"engine-{self._spec.model_id}", daemon=True)
        self._thread.start()
        # A daemon, so that an exception in main does not hang on it; stopped before the interpreter takes torch apart.
        atexit.register(self._stop)
        log.info("engine started", model_id=self._spec.model_id, seconds=round(time.perf_counter() - started, 2))

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._stop)
        atexit.unregister(self._stop)
        self._model = self._batch = self._sink = None

    async def generate(self, request: GenerateRequest, /) -> Generation:
        self._check(request)
        from astraflow.raas.engines.batch import Job

        reply = _Reply()
        job = Job(request, reply.send)
        self._put(job)
        self._jobs[request.request_id] = job
        try:
            result: Generation = await reply.future
            return result
        finally:
            job.cancelled = True
            del self._jobs[request.request_id]

    def sink(self) -> Sink:
        """The model's live tensors, always the same sink; a tied head is found under its own name as well."""
        if self._sink is None:
            if self._model is None:
                raise EngineError(f"engine {self._spec.model_id} has no weights: start it first")
            self._sink = TensorSink(self._model.state_dict())
        return self._sink

    async def swap(self, commit: Callable[[], None], version: int, /) -> float:
        swap = _Swap(commit, version)
        self._put(swap)
        # Once handed over it runs: leaving earlier would let the caller touch weights that are being written.
        with anyio.CancelScope(shield=True):
            paused: float = await swap.reply.future
        return paused

    def progress(self, request_id: str, /) -> Progress:
        job = self._jobs.get(request_id)
        sampled = len(job.versions) if job is not None else 0
        return Progress(sampled, job.versions[0]) if job is not None and sampled else Progress()

    def stats(self) -> EngineStats:
        batch = self._batch
        if batch is None:
            return EngineStats(running=0, waiting=0, generated_tokens=0)
        return EngineStats(
            running=len(batch.running),
            waiting=len(batch.waiting) + self._inbox.qsize(),
            generated_tokens=batch.generated,
        )

    def _check(self, request: GenerateRequest) -> None:
        """Raises EngineError for a request that could not run, before it meets the others."""
        if self._batch is None:
            raise self._gone()
        sampling, vocab = request.sampling, self._batch.vocab_size
        problem = None
        if not request.prompt:
            problem = "the prompt is empty"
        elif sampling.max_new_tokens < 1:
            problem = f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1"
        elif len(request.prompt) + sampling.max_new_tokens > self._spec.max_context:
            problem = (
                f"{len(request.prompt)} prompt tokens and {sampling.max_new_tokens} new ones are more than "
                f"max_context {self._spec.max_context}: shorten the prompt or raise max_context"
            )
        elif not 0 <= sampling.temperature < float("inf"):
            problem = f"temperature {sampling.temperature} is not a finite number of at least 0"
        elif not all(0 <= token < vocab for token in request.prompt):
            problem = f"a prompt token lies outside the vocabulary of {vocab}: was another tokenizer used?"
        if problem:
            raise EngineError(f"request {request.request_id} of {self._spec.model_id}: {problem}")

    def _load(self) -> tuple[Any, Batch]:
        # Imported here, in a thread: it takes seconds.
        from transformers.utils.logging import disable_progress_bar

        from astraflow.raas.engines.batch import Batch, load_model

        disable_progress_bar()
        model = load_model(self._spec)
        return model, Batch(model, self._spec)

    def _put(self, item: Job | _Swap | None) -> None:
        with self._lock:
            if self._closed is not None:
                raise self._gone()
            self._inbox.put(item)

    def _gone(self) -> EngineGone:
        error = EngineGone(f"engine {self._spec.model_id} does not run: {self._closed or 'it was closed'}")
        error.__cause__ = self._cause
        return error

    def _stop(self) -> None:
        with self._lock:
            if self._closed is None:
                self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        """The thread: a step of the batch, then whatever arrived meanwhile, until told to stop."""
        batch = self._batch
        assert batch is not None
        reason = "it was closed"
        try:
            while self._receive(batch):
                batch.step(self._version)
        except BaseException as error:  # whatever it is, those who wait must hear of it
            self._cause, reason = error, f"its thread died of {type(error).__name__}: {error}"
            log.error("engine died", model_id=self._spec.model_id, cause=repr(error))
        self._fail_all(batch, reason)

    def _receive(self, batch: Batch) -> bool:
        """Take what arrived, in order; waits while there is nothing to do. False when told to stop."""
        while not (batch.busy and self._inbox.empty()):
            item = self._inbox.get()
            if item is None:
                return False
            if isinstance(item, _Swap):
                self._exchange(item, batch)
            else:
                batch.waiting.append(item)
        return True

    def _exchange(self, swap: _Swap, batch: Batch) -> None:
        started = time.perf_counter()
        try:
            swap.commit()
        except Exception as error:  # the caller's own: it goes back to the caller, the old weights go on
            swap.reply.send(error)
            return
        self._version = swap.version
        batch.new_weights(recompute=self._spec.cache == "recompute")
        paused = time.perf_counter() - started
        log.debug("weights changed", model_id=self._spec.model_id, version=swap.version, paused=round(paused, 4))
        swap.reply.send(paused)

    def _fail_all(self, batch: Batch, reason: str) -> None:
        with self._lock:
            self._closed = reason
        for job in (*batch.running, *batch.waiting):
            job.done(self._gone())
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Swap):
                item.reply.send(self._gone())
            elif item is not None:
                item.done(self._gone())
