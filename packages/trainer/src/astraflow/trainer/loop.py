"""The training loop of one policy: attach, then batch -> step -> publish -> report, with checkpoints in between.

The loop owns the order of things and no arithmetic. Invariants: the policy's version is the number of batches trained;
workers can pull a version before it is announced; a batch counts as consumed from the moment its step ended, and the
next checkpoint says so; a batch is committed only after a checkpoint that has it is durable. All blocking work runs in
a thread, one call at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

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
from astraflow.weightsync import Publisher, PublishReport, Store

from .checkpoint import Checkpoint, CheckpointMeta, latest_checkpoint, save_checkpoint, write_directory
from .config import TrainerConfig
from .interface import BadBatch, PolicySpec, PublishesItself, PublishTarget, TrainerBackend
from .launch import world
from .registry import load_backend

CALL_S = 60.0
"""How long one call to the dataflow may take, reconnecting included, on top of what it was asked to wait."""

POLL_S = 10.0

_CONSTRUCTING = threading.Lock()
"""transformers' from_pretrained changes the process's default device and dtype while it runs: one backend at a time."""

log = structlog.get_logger(__name__)
T = TypeVar("T")


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
    try:
        return await _train(spec, config, dataflow, store, work, backend, found, export)
    finally:
        if isinstance(backend, PublishesItself):
            with anyio.CancelScope(shield=True):
                await work.run(backend.stop)


async def follow(spec: PolicySpec, config: TrainerConfig, store: Store) -> None:
    """Be another rank than 0 of torchrun's, doing what `train` on rank 0 does to its backend, until that ends.

    Raises RankLost if rank 0 is gone.
    """
    from .team import follow as follow_rank_0

    await follow_rank_0(spec, config, store)


async def _train(
    spec: PolicySpec,
    config: TrainerConfig,
    dataflow: DataflowService,
    store: Store,
    work: _Work,
    backend: TrainerBackend,
    found: Checkpoint | None,
    export: Path | None,
) -> TrainSummary:
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


class _Loop:
    """One policy's progress. `version` and `consumed` change together, right after a step's thread has ended."""

    def __init__(
        self, spec: PolicySpec, config: TrainerConfig, dataflow: DataflowService, work: _Work, backend: TrainerBackend
    ) -> None:
        self._spec, self._config = spec, config
        self._dataflow, self._work, self._backend = dataflow, work, backend
        self._incarnation = 0
        self._saved_version = -1
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
        await self._publish(publish, store.url)
        while True:
            waiting = time.perf_counter()
            batch = await self._next_batch()
            if batch is None:
                return
            stepping = time.perf_counter()
            result = await self._work.run(lambda batch=batch: self._step(batch))  # type: ignore[misc]
            await self._publish(publish, store.url)
            report = StepReport(
                model_id=self._spec.model_id,
                incarnation=self._incarnation,
                version=self.version,
                batch_id=batch.batch_id,
                wait_s=stepping - waiting,
                step_s=time.perf_counter() - stepping,
                metrics=result,
            )
            with anyio.fail_after(CALL_S):
                await self._dataflow.report(report)
            every = self._config.checkpoint_every
            if every and self.version % every == 0:
                await self.save()
                await self._commit()

    async def save(self) -> Path:
        """Checkpoint the current version, unless that is already on disk."""
        if self.version != self._saved_version:
            meta = CheckpointMeta(
                model_id=self._spec.model_id,
                version=self.version,
                consumed=self.consumed,
                incarnation=self._incarnation,
            )
            root, keep = Path(self._spec.directory), self._config.keep_checkpoints
            saved = await self._work.run(lambda: save_checkpoint(root, meta, self._backend.save, keep=keep))
            self._saved_version, self._checkpoint = meta.version, saved.directory
        return self._checkpoint

    async def _next_batch(self) -> TrainBatch | None:
        """The batch that makes the next version; None when the run is finished."""
        request = BatchRequest(
            model_id=self._spec.model_id, incarnation=self._incarnation, version=self.version, wait_s=POLL_S
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
        return metrics

    def _publisher(self, store: Store, target: PublishTarget) -> Callable[[], Awaitable[PublishReport]]:
        backend = self._backend
        if isinstance(backend, PublishesItself):
            return lambda: backend.publish(target, self.version)
        publisher = Publisher(
            store, stream=target.stream, incarnation=target.incarnation, anchor_every=target.anchor_every
        )

        async def publish() -> PublishReport:
            weights = await self._work.run(self._backend.weights)
            return await publisher.publish(weights, self.version)

        return publish

    async def _publish(self, publish: Callable[[], Awaitable[PublishReport]], url: str) -> None:
        published = await publish()
        announcement = PolicyVersion(
            model_id=self._spec.model_id,
            version=self.version,
            incarnation=self._incarnation,
            weights=url,
            digest=published.digest,
        )
        with anyio.fail_after(CALL_S):
            await self._dataflow.publish(announcement)

    async def _commit(self) -> None:
        request = CommitRequest(model_id=self._spec.model_id, incarnation=self._incarnation, version=self.version)
        with anyio.fail_after(CALL_S):
            await self._dataflow.commit(request)
