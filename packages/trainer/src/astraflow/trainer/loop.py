"""The training loop of one policy: attach, then batch -> step -> publish -> report, with checkpoints in between.

The loop owns the order of things and no arithmetic. While a step runs, the next batch is fetched, the weights of the
last one are published from a copy, and a checkpoint is written from another. Invariants: the policy's version is the
number of batches trained; workers can pull a version before it is announced; versions are announced in order; a batch
counts as consumed from the moment its step ended, and the next checkpoint says so; a batch is committed only after a
checkpoint that has it is durable. The backend is called from one thread at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import msgspec
import structlog

from astraflow.dataflow import (
    AttachRequest,
    BatchRequest,
    CommitRequest,
    DataflowService,
    PolicyVersion,
    RunFailed,
    StepReport,
    TrainBatch,
)
from astraflow.weightsync import Publisher, PublishReport, Store, Tensors

from .ahead import Ahead
from .checkpoint import CheckpointMeta, latest_checkpoint, save_checkpoint, write_directory
from .config import TrainerConfig
from .interface import BadBatch, PolicySpec, PublishesItself, PublishTarget, SavesAside, TrainerBackend
from .launch import world
from .registry import load_backend

CALL_S = 60.0
"""How long one call to the dataflow may take, reconnecting included, on top of what it was asked to wait."""

POLL_S = 10.0

_CONSTRUCTING = threading.Lock()
"""transformers' from_pretrained changes the process's default device and dtype while it runs: one backend at a time."""

log = structlog.get_logger(__name__)
T = TypeVar("T")

Publish = Callable[[Tensors, int], Awaitable[PublishReport]]


class TrainSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How training ended: the policy's `version`, the one this process began at, optimiser steps skipped since
    (non-finite gradients), and the last checkpoint."""

    model_id: str
    version: int
    started_at: int
    skipped: int
    checkpoint: Path


async def train(
    spec: PolicySpec,
    config: TrainerConfig,
    dataflow: DataflowService,
    store: Store,
    *,
    export: Path | None = None,
    resume: bool = True,
) -> TrainSummary:
    """Train one policy until the dataflow says it is finished, then write `export` as a Hugging Face directory.

    Goes on from the newest checkpoint in `spec.directory` if there is one. Cancelled, it ends the step under way, saves
    a checkpoint and lets the cancellation go on.

    Raises:
        ValueError: several ranks, and a backend that knows only one.
        FileExistsError: `resume` is false and there are checkpoints.
        Fenced, StaleIncarnation: another trainer has taken this policy over.
        RunFailed: the dataflow has given the run up; a checkpoint is saved.
        BadBatch: a batch cannot be trained.
        Unavailable, TimeoutError: the dataflow did not answer in time.
    """
    work = _Work()
    found = await work.run(lambda: latest_checkpoint(Path(spec.directory)))
    if found and not resume:
        raise FileExistsError(f"{spec.model_id}: {found.directory} exists; resume it or choose another directory")
    backend_class = await work.run(lambda: load_backend(config.backend))  # importing torch takes seconds
    backend = await work.run(lambda: _construct(backend_class, spec, config, store))
    async with _stopping(backend, work):
        loop = _Loop(spec, config, dataflow, work, backend)
        if found:
            await work.run(lambda: backend.load(found.directory))
            loop.restore(found.meta, found.directory)
        try:
            await loop.run(store)
        except (anyio.get_cancelled_exc_class(), RunFailed):
            with anyio.CancelScope(shield=True):  # as long as the disk takes: a thread cannot be cancelled anyway
                await loop.save()
            raise
        checkpoint = await loop.save()
        if export is not None:
            await work.run(lambda: write_directory(export, backend.export))
        return TrainSummary(
            model_id=spec.model_id,
            version=loop.version,
            started_at=found.meta.version if found else 0,
            skipped=loop.skipped,
            checkpoint=checkpoint,
        )


async def follow(spec: PolicySpec, config: TrainerConfig, store: Store) -> None:
    """Be another rank than 0 of torchrun's, doing what `train` on rank 0 does to its backend, until that ends.

    Raises RankLost if rank 0 is gone.
    """
    from .team import follow as follow_rank_0

    await follow_rank_0(spec, config, store)


@asynccontextmanager
async def _stopping(backend: TrainerBackend, work: _Work) -> AsyncIterator[None]:
    """Tell a backend of several processes that no call follows, whatever happens."""
    try:
        yield
    finally:
        if isinstance(backend, PublishesItself):
            with anyio.CancelScope(shield=True):
                await work.run(backend.stop)


def _construct(kind: type[TrainerBackend], spec: PolicySpec, config: TrainerConfig, store: Store) -> TrainerBackend:
    with _CONSTRUCTING:
        backend = kind(spec, config)
    if world()[1] == 1:
        return backend
    from .team import Team

    return Team.of(backend, store)


class _Work:
    """Blocking work of one policy, off the event loop, one call at a time; a cancelled caller waits for its end."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(1)

    async def run(self, call: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)


class _Beside(NamedTuple):
    """What goes on beside a step."""

    batch: Ahead[TrainBatch | None]
    publication: Ahead[None]
    checkpoint: Ahead[None]


class _Loop:
    """One policy's progress. `version` and `consumed` change together, right after a step's thread has ended."""

    def __init__(
        self, spec: PolicySpec, config: TrainerConfig, dataflow: DataflowService, work: _Work, backend: TrainerBackend
    ) -> None:
        self._spec, self._config = spec, config
        self._dataflow, self._work, self._backend = dataflow, work, backend
        self._saving = _Work()
        self._incarnation = 0
        self._saved_version = -1
        self._score: float | None = None
        self._checkpoint = Path(spec.directory)
        self.version = 0
        self.consumed: tuple[str, ...] = ()
        self.skipped = 0

    def restore(self, meta: CheckpointMeta, directory: Path) -> None:
        if meta.model_id != self._spec.model_id:
            raise ValueError(f"{directory} is a checkpoint of {meta.model_id!r}, not of {self._spec.model_id!r}")
        self.version, self.consumed, self._incarnation = meta.version, meta.consumed, meta.incarnation
        self._saved_version, self._checkpoint = meta.version, directory
        log.info("resumed", policy=meta.model_id, version=meta.version, checkpoint=str(directory))

    async def run(self, store: Store) -> None:
        """Attach, publish what there is so that workers have a source, and train until finished."""
        request = AttachRequest(model_id=self._spec.model_id, version=self.version, consumed=self.consumed)
        with anyio.fail_after(CALL_S):
            attachment = await self._dataflow.attach(request)
        self._incarnation = attachment.incarnation
        target = PublishTarget(
            stream=self._spec.model_id, incarnation=self._incarnation, anchor_every=self._config.anchor_every
        )
        publish = self._publisher(store, target)
        await self._announce(publish, await self._weights(), self.version, store.url)
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            try:
                await self._steps(_Beside(Ahead(tasks), Ahead(tasks), Ahead(tasks)), publish, store.url)
            except Exception as error:  # to be raised as it is, and not as a group of one
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _steps(self, beside: _Beside, publish: Publish, url: str) -> None:
        """Train until finished; the next batch comes, the last weights go out and a checkpoint is written meanwhile."""
        beside.batch.begin(partial(self._next_batch, self.version))
        while True:
            waiting = time.perf_counter()
            batch = await beside.batch.take()
            if batch is None:
                break
            stepping = time.perf_counter()
            beside.batch.begin(partial(self._next_batch, batch.version + 1))
            metrics = await self._work.run(partial(self._step, batch))
            weights = await self._weights()
            report = StepReport(
                model_id=self._spec.model_id,
                incarnation=self._incarnation,
                version=self.version,
                batch_id=batch.batch_id,
                wait_s=stepping - waiting,
                step_s=time.perf_counter() - stepping,
                metrics=metrics,
            )
            await beside.publication.take()
            announced = anyio.Event()
            beside.publication.begin(partial(self._tell, publish, weights, url, report, announced))
            if isinstance(self._backend, PublishesItself):  # its ranks do one thing at a time
                await beside.publication.take()
            every = self._config.checkpoint_every
            if every and self.version % every == 0:
                await beside.checkpoint.take()
                await self._checkpoint_beside(beside.checkpoint, announced)
        await beside.publication.take()
        await beside.checkpoint.take()

    async def _checkpoint_beside(self, checkpoint: Ahead[None], announced: anyio.Event) -> None:
        """Save and commit; a backend that can say what to write goes on training while it is written."""
        meta = self._meta()
        write = self._backend.save
        if isinstance(self._backend, SavesAside):
            write = await self._work.run(self._backend.snapshot)
        checkpoint.begin(partial(self._save_and_commit, meta, write, announced))
        if not isinstance(self._backend, SavesAside):  # waits for the announcement too, which never waits for this
            await checkpoint.take()

    async def _save_and_commit(
        self, meta: CheckpointMeta, write: Callable[[Path], None], announced: anyio.Event
    ) -> None:
        await self._write(meta, write)
        await announced.wait()
        request = CommitRequest(model_id=self._spec.model_id, incarnation=self._incarnation, version=meta.version)
        with anyio.fail_after(CALL_S):
            await self._dataflow.commit(request)

    async def save(self) -> Path:
        """Checkpoint the current version, unless that is already on disk."""
        if self.version != self._saved_version:
            await self._write(self._meta(), self._backend.save)
        return self._checkpoint

    def _meta(self) -> CheckpointMeta:
        return CheckpointMeta(
            model_id=self._spec.model_id,
            version=self.version,
            consumed=self.consumed,
            incarnation=self._incarnation,
            score=self._score,
        )

    async def _write(self, meta: CheckpointMeta, write: Callable[[Path], None]) -> None:
        root, keep = Path(self._spec.directory), self._config.keep_checkpoints
        saved = await self._saving.run(lambda: save_checkpoint(root, meta, write, keep=keep))
        self._saved_version, self._checkpoint = meta.version, saved.directory

    async def _next_batch(self, version: int) -> TrainBatch | None:
        """The batch that makes `version` + 1; None when the run is finished."""
        request = BatchRequest(
            model_id=self._spec.model_id, incarnation=self._incarnation, version=version, wait_s=POLL_S
        )
        while True:
            with anyio.fail_after(POLL_S + CALL_S):
                reply = await self._dataflow.next_batch(request)
            if reply.finished:
                return None
            if reply.batch is not None:
                return reply.batch

    def _step(self, batch: TrainBatch) -> dict[str, float]:
        """In the thread: train `batch` and count it, so that no cancellation can come between the two."""
        if batch.version != self.version or batch.batch_id in self.consumed:
            raise BadBatch(
                f"{self._spec.model_id} is at version {self.version}: batch {batch.batch_id} was cut at "
                f"{batch.version}" + (" and has been trained already" if batch.batch_id in self.consumed else "")
            )
        metrics = self._backend.step(batch).metrics
        self.version += 1
        self.consumed = (*self.consumed, batch.batch_id)
        self.skipped += int(metrics.get("skipped", 0))
        self._score = metrics.get(self._config.keep_best)
        return metrics

    def _publisher(self, store: Store, target: PublishTarget) -> Publish:
        backend = self._backend
        if isinstance(backend, PublishesItself):
            return lambda _, version: backend.publish(target, version)
        publisher = Publisher(
            store, stream=target.stream, incarnation=target.incarnation, anchor_every=target.anchor_every
        )
        return publisher.publish

    async def _weights(self) -> Tensors:
        """A copy, which the next step does not change while it is published; nothing where the backend publishes."""
        if isinstance(self._backend, PublishesItself):
            return {}
        return await self._work.run(lambda: {name: _copy(tensor) for name, tensor in self._backend.weights().items()})

    async def _tell(
        self, publish: Publish, weights: Tensors, url: str, report: StepReport, announced: anyio.Event
    ) -> None:
        await self._announce(publish, weights, report.version, url)
        with anyio.fail_after(CALL_S):
            await self._dataflow.report(report)
        announced.set()

    async def _announce(self, publish: Publish, weights: Tensors, version: int, url: str) -> None:
        published = await publish(weights, version)
        announcement = PolicyVersion(
            model_id=self._spec.model_id,
            version=version,
            incarnation=self._incarnation,
            weights=url,
            digest=published.digest,
        )
        with anyio.fail_after(CALL_S):
            await self._dataflow.publish(announcement)


def _copy(tensor: Any) -> Any:
    """Of a torch tensor or a numpy array."""
    return tensor.clone() if hasattr(tensor, "clone") else tensor.copy()
