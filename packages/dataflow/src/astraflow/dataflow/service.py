"""The dataflow: workers lease and submit, trainers ask for batches, policies publish; nobody is ever called.

A plain object on one event loop. Each call looks at the state, changes it in one go and returns; only waits await,
so nothing is seen half done and a cancelled call leaves nothing behind. What time brings (a lease that ends, a worker
that fell silent) is noticed by the next call or wait, at the latest when it is due.

Invariants: policies share prompts and workers but no state, so that none waits for another (but in synchronous mode,
on purpose); every sample of every task is settled once; memory is bounded by the policies' horizons.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from .config import DataflowConfig
from .dispatch import SWEEP_S, Dispatch
from .evaluations import Evaluations
from .health import Health
from .ingest import missing_ids, policy_group, problems
from .interface import (
    Attachment,
    AttachRequest,
    Balance,
    BatchReply,
    BatchRequest,
    CommitRequest,
    Control,
    Empty,
    EvaluateRequest,
    Evaluation,
    EvaluationQuery,
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    Phase,
    Policies,
    PolicyVersion,
    Registration,
    RolloutGroup,
    RolloutTask,
    RunFailed,
    SampleResult,
    Status,
    StepReport,
    SubmitReply,
    SubmitRequest,
    TaskProgress,
    WatchRequest,
)
from .journal import Bounded, NoJournal, Registered, Settled, Touched
from .line import Line
from .observer import Observer
from .overview import Overview
from .policy import PolicyStream, abandoned
from .resume import all_stages, follow, resume
from .selection import Selection
from .signals import Signal
from .sources import EvalSuite, PromptSource
from .tasks import OpenTask
from .workers import Worker


class Dataflow:
    """Implements `DataflowService`. `clock` counts seconds and never goes back; with a `journal` it goes on from what
    that holds, and nobody is told of anything that is not in it."""

    def __init__(
        self,
        config: DataflowConfig,
        source: PromptSource,
        suites: Iterable[EvalSuite] = (),
        *,
        observer: Observer | None = None,
        journal: NoJournal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._observer = observer
        self._journal = journal or NoJournal()
        self._clock = clock
        self._phase: Phase = "starting"
        self._suspended: Phase | None = None
        self._source = source
        self._selection = Selection(config)
        record = self._journal.record
        self._policies = {feed.model_id: PolicyStream(feed, config, self._journal) for feed in config.policies}
        self._dispatch = Dispatch(config, source, clock(), record)
        self._workers, self._leases, self._tasks = self._dispatch.workers, self._dispatch.leases, self._dispatch.tasks
        self._evaluations = Evaluations(config, suites, record)
        self._work = Line()
        self._published = Signal()
        self._health = Health(config, self._dispatch, self._policies, self._journal, clock())
        self._overview = Overview(
            config, self._dispatch, self._policies, self._selection, source, self._health, clock()
        )
        stages = all_stages(source, self._selection, self._policies)
        if self._journal.restored is not None:
            resume(self._journal.restored, self._dispatch, self._policies, stages, self._evaluations, clock())
            self._phase = msgspec.msgpack.decode(self._journal.restored.state["phase"], type=Phase)
        follow(self._journal, lambda: self._suspended or self._phase, self._dispatch, self._policies, stages)

    def suspend(self) -> None:
        """Send everybody home for now. The run is not over: whoever starts it again from its journal goes on."""
        self._suspended, self._phase = self._phase, "finished"
        self._wake()

    # --- workers -----------------------------------------------------------------------------------------------

    async def register(self, request: Registration, /) -> Empty:
        now = self._clock()
        if self._workers.register(request, now):
            self._lose(self._leases.of(request.worker_id), now)
        self._journal.record(Registered(request))
        self._dispatch.sweep_by(now + self._config.worker_silence_s)
        self._work.notify()
        return Empty()

    async def lease(self, request: LeaseRequest, /) -> LeaseReply:
        """Evaluation tasks first, then retries, then new training tasks; empty after `wait_s`, also for a worker that
        is not registered (its heartbeat says so)."""
        end = self._clock() + request.wait_s
        while True:
            now = self._clock()
            worker = self._workers.hear(request.worker_id, now)
            self._sweep(now)
            if self._phase == "finished":
                return LeaseReply(finished=True)
            self._journal.check()
            tasks = self._grant(worker, request, now) if worker and self._workers.serving(worker, now) else ()
            if self._dispatch.has_work(training=self._generating, room=self._room, now=now):
                self._work.pass_on()
            if tasks:
                await self._journal.durable()
            if tasks or now >= end:
                return LeaseReply(tasks=tasks)
            await self._work.wait(end - now, self._dispatch.next_sweep - now)

    async def submit(self, request: SubmitRequest, /) -> SubmitReply:
        """Returns when what it brought (or another brought before) is in the journal."""
        await self._journal.room()
        now = self._clock()
        accepted = duplicates = 0
        rejected: list[str] = []
        wrong = problems(request.results)
        for position, result in enumerate(request.results):
            self._workers.hear(result.worker_id, now)
            task = self._tasks.get(result.task_id)
            if task is None or task.has(result.sample_index) or task.outlived(result):
                duplicates += 1
                continue
            if not 0 <= result.sample_index < task.task.n_samples:
                rejected.append(f"task {result.task_id} has no sample {result.sample_index}")
                continue
            problem = wrong.get(position, "")
            if problem:
                rejected.append(problem)
            else:
                accepted += 1
            self._settle(task, result, problem, now)
        self._sweep(now)
        await self._journal.durable()
        return SubmitReply(accepted=accepted, duplicates=duplicates, rejected=tuple(rejected))

    async def heartbeat(self, request: Heartbeat, /) -> HeartbeatReply:
        """Leases that the worker has not named for half the silence limit go to others: their grant never arrived."""
        now = self._clock()
        worker = self._workers.hear(request.worker_id, now)
        self._sweep(now)
        if worker is None:
            return HeartbeatReply(known=False, cancel=request.tasks, finished=self._phase == "finished")
        worker.take(request.stats)
        if request.leaving:
            worker.left = True
            self._lose(self._leases.of(request.worker_id), now)
        for task_id in request.declined:
            self._decline(request.worker_id, task_id, now)
        self._leases.name(request.worker_id, request.tasks, now)
        for progress in request.progress:
            self._progressed(request.worker_id, progress, now)
        self._lose(self._leases.unnamed(request.worker_id, now - self._config.worker_silence_s / 2), now)
        unwanted = tuple(t for t in request.tasks if self._leases.holder(t) != request.worker_id)
        return HeartbeatReply(cancel=unwanted, finished=self._phase == "finished")

    async def watch(self, request: WatchRequest, /) -> Policies:
        end = self._clock() + request.wait_s
        while True:
            versions = self._versions()
            news = any(
                request.known.get(v.model_id) != v.version
                or request.incarnations.get(v.model_id, v.incarnation) != v.incarnation
                for v in versions
            )
            now = self._clock()
            if news or now >= end or self._phase == "finished":
                return Policies(versions=versions)
            await self._published.wait(end - now)

    # --- trainers ----------------------------------------------------------------------------------------------

    async def attach(self, request: AttachRequest, /) -> Attachment:
        """Raises ValueError for a policy that this run does not train, and for another run's checkpoint."""
        policy = self._policy(request.model_id)
        incarnation = policy.attach(request)
        self._health.attached(self._clock())
        for task in self._tasks.training_tasks():
            self._bound(task, {request.model_id: request.version})
        self._work.notify()
        await self._journal.durable()
        return Attachment(incarnation=incarnation, steps=policy.feed.steps)

    async def next_batch(self, request: BatchRequest, /) -> BatchReply:
        """The batch for (model_id, version), the same however often it is asked for until a commit beyond it.

        Raises:
            Fenced: another trainer has taken this one's place.
            RunFailed: no batch will come; the message says why, with figures.
            ValueError: the version is not the next one.
        """
        policy = self._policy(request.model_id)
        end = self._clock() + request.wait_s
        while True:
            now = self._clock()
            self._sweep(now)
            policy.check(request.incarnation)
            if self._phase == "finished" or request.version >= policy.feed.steps:
                return BatchReply(finished=True)
            policy.ask(request.version, now)
            if policy.served(request.version) is None:
                self._cut(policy, request.version, now)
            served = policy.served(request.version)
            if served is not None or policy.ended:
                await self._journal.durable()
                batch = None if served is None else served.batch or await self._journal.batch(served.batch_id)
                return BatchReply(batch=batch, finished=batch is None)
            failure = self._health.failure(policy, now)
            if failure:
                raise RunFailed(failure)
            if now >= end:
                return BatchReply()
            # Asking may have dropped stale data or opened a round of synchronous mode.
            self._work.notify()
            failing_at = self._workers.heard_at + self._config.worker_grace_s
            with policy.waiting_call():
                await policy.changed.wait(min(end, self._dispatch.next_sweep, failing_at + SWEEP_S) - now)

    async def publish(self, request: PolicyVersion, /) -> Empty:
        policy = self._policy(request.model_id)
        policy.publish(request)
        self._selection.advance(request.model_id, policy.version, self._source.epoch)
        self._health.progress(self._clock())
        due = self._evaluations.due(self._versions()) if self._phase == "running" else None
        if due is not None:
            self._begin(due)
        await self._journal.durable()
        self._published.notify()
        self._work.notify()
        return Empty()

    async def report(self, request: StepReport, /) -> Empty:
        policy = self._policy(request.model_id)
        policy.check(request.incarnation)
        if policy.report(request, self._clock()) and self._observer is not None:
            figures = {**self._selection.stats_of(request.model_id), **policy.data(request.version - 1)}
            flat = {f"{stage}/{name}": value for stage, row in figures.items() for name, value in row.items()}
            self._observer.on_step(msgspec.structs.replace(request, metrics={**request.metrics, **flat}))
        return Empty()

    async def commit(self, request: CommitRequest, /) -> Empty:
        policy = self._policy(request.model_id)
        policy.check(request.incarnation)
        policy.commit(request.version)
        await self._journal.durable()
        return Empty()

    # --- people and the driver ---------------------------------------------------------------------------------

    async def control(self, request: Control, /) -> Empty:
        self._phase = request.phase
        self._journal.record(Touched())
        self._wake()
        await self._journal.durable()
        return Empty()

    async def evaluate(self, request: EvaluateRequest, /) -> Empty:
        """Raises ValueError for a suite that is not configured."""
        self._begin(request)
        await self._journal.durable()
        return Empty()

    def _begin(self, request: EvaluateRequest) -> None:
        for task in self._evaluations.begin(request, self._versions()):
            self._dispatch.open(task)
        self._work.notify()

    async def evaluation(self, request: EvaluationQuery, /) -> Evaluation:
        """Raises ValueError for an unknown label, RunFailed if no worker is left to finish it."""
        run = self._evaluations.get(request.label)
        end = self._clock() + request.wait_s
        while True:
            now = self._clock()
            self._sweep(now)
            if run.finished or now >= end:
                return run.report()
            failure = self._health.rollout_failure(now)
            if failure:
                raise RunFailed(failure)
            await run.changed.wait(min(end, self._dispatch.next_sweep) - now)

    async def status(self, request: Empty, /) -> Status:
        now = self._clock()
        self._sweep(now)
        return self._overview.status(self._phase, now)

    async def balance(self, request: Empty, /) -> Balance:
        now = self._clock()
        self._sweep(now)
        return self._overview.balance(now)

    def targets(self) -> dict[str, int]:
        """How large each pool should be, in its GPUs or, where it has none, its workers."""
        return {pool.pool: pool.target for pool in self._overview.balance(self._clock()).pools}

    # --- granting ----------------------------------------------------------------------------------------------

    def _grant(self, worker: Worker, request: LeaseRequest, now: float) -> tuple[RolloutTask, ...]:
        ended = self._dispatch.exhausted
        training = [policy.feed.model_id for policy in self._training]
        tasks = self._dispatch.grant(
            worker,
            request,
            now,
            versions={published.model_id: published.version for published in self._versions()},
            training=lambda: self._generating,
            room=self._room,
            admits=lambda prompt: self._selection.admits(prompt, training),
        )
        if self._dispatch.exhausted and not ended:
            self._wake()
        return tasks

    def _room(self, running: int) -> bool:
        """Does any policy want another group, so many being under way?"""
        return any(policy.wants_group(running) for policy in self._policies.values())

    @property
    def _generating(self) -> bool:
        """May training tasks be leased? In synchronous mode only while every trainer that needs data waits for it."""
        training = self._training
        if self._phase != "running" or not training:
            return False
        return not self._config.synchronous or all(policy.waiting for policy in training)

    # --- taking ------------------------------------------------------------------------------------------------

    def _settle(self, task: OpenTask, result: SampleResult, problem: str, now: float) -> None:
        trajectory, training = result.trajectory, task.task.purpose == "train"
        begun = trajectory.status == "timed_out" and result.tokens > 0
        if training:
            self._overview.sampled(result)
        if problem or trajectory.status != "ok":
            reason = problem or trajectory.error or trajectory.status
            self._health.went_wrong(result.worker_id, reason, now, training=training)
            if training and not begun and task.task.attempt < self._config.failures.retries:
                task.run_again(result.sample_index, reason)
            else:
                task.settle(result.sample_index, None, reason)
                self._journal.record(Settled(result.task_id, result.sample_index, None, reason))
        else:
            self._health.went_well(result.worker_id, now, training=training)
            self._bound(task, abandoned(result.incarnations, self._policies))
            task.settle(result.sample_index, trajectory)
            self._journal.record(Settled(result.task_id, result.sample_index, trajectory))
        if task.complete:
            self._close(task, now)
        elif task.returned:
            self._lose((task.task.task_id,), now)

    def _close(self, task: OpenTask, now: float) -> None:
        """The task is complete, or given up with what is in."""
        self._dispatch.end(task)
        group = task.group()
        if task.task.purpose == "eval":
            ended = self._evaluations.add(task.evaluation, group)
            if ended is not None and self._observer is not None:
                self._observer.on_evaluation(ended)
        else:
            self._ingest(task, group, now)
        self._work.notify()
        if self._observer is not None:
            self._observer.on_group(group)

    def _progressed(self, worker_id: str, progress: TaskProgress, now: float) -> None:
        """Keep the lease of a task that goes on; give up one of which nothing can be trained any more."""
        if self._leases.progress(worker_id, progress.task_id, progress.tokens, now):
            self._health.progress(now)
        task = self._tasks.get(progress.task_id)
        if task is None or task.task.purpose != "train" or self._leases.holder(progress.task_id) != worker_id:
            return
        fed = [policy for name, policy in self._policies.items() if name in task.task.sampling]
        if task.past(progress.began, fed) and task.past(task.freshest(progress.began), fed):
            task.missing = "stale"
            self._close(task, now)

    def _bound(self, task: OpenTask, versions: dict[str, int]) -> None:
        """Tokens of this task count as at most these versions: newer ones were abandoned."""
        if task.bound(versions):
            self._journal.record(Bounded(task.task.task_id, task.newest_version))

    def _decline(self, worker_id: str, task_id: str, now: float) -> None:
        given_up = self._dispatch.decline(worker_id, task_id, now)
        if given_up is not None:
            self._close(given_up, now)
        self._work.notify()

    def _ingest(self, task: OpenTask, group: RolloutGroup, now: float) -> None:
        present = [trajectory for trajectory in group.trajectories if trajectory is not None]
        missing = {task.missing: missing_ids(group)}
        if len(present) < self._config.failures.min_samples:
            group = RolloutGroup(task=group.task, trajectories=(None,) * len(group.trajectories))
            missing["incomplete"] = tuple(name for name in missing_ids(group) if name not in missing[task.missing])
        self._overview.grouped(present, now)
        for name, policy in self._policies.items():
            newest = task.newest_for(name, policy.version)
            mine = policy_group(group, name)
            self._selection.outcome(name, mine)
            policy.take(mine, group, missing, task.error, newest, now)
            policy.changed.notify()

    # --- serving -----------------------------------------------------------------------------------------------

    def _cut(self, asking: PolicyStream, version: int, now: float) -> None:
        """Cut the batch asked for if there is enough; in synchronous mode that of every policy, when all are ready."""
        tail = self._dispatch.exhausted and not self._tasks.training
        if self._config.synchronous:
            training = self._training
            if self._tasks.training or not all(policy.waiting for policy in training):
                return
            ready = {policy: policy.ready(policy.version, tail) for policy in training}
            if not tail and not all(ready.values()):
                return
        else:
            ready = {asking: asking.ready(version, tail)}
        for policy, is_ready in ready.items():
            if is_ready:
                self._health.progress(now)
                policy.cut(version if policy is asking else policy.version, now)
            policy.ended = tail and not is_ready
            policy.changed.notify()
        self._work.notify()
        if not self._training:
            # Nobody needs training data any more: give up what is under way, so that workers hear it must stop.
            for task in self._tasks.training_tasks():
                self._close(task, now)

    # --- time --------------------------------------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        """Take the tasks whose deadline has passed, or whose worker is silent, away from their workers; say so when
        nothing goes on."""
        self._lose(self._dispatch.sweep(now), now)
        self._health.look(now)
        self._overview.look(now)

    def _lose(self, task_ids: tuple[str, ...], now: float) -> None:
        if task_ids:
            for task in self._dispatch.lose(task_ids):
                self._close(task, now)
            self._work.notify()

    # --- small things ------------------------------------------------------------------------------------------

    def _policy(self, model_id: str) -> PolicyStream:
        policy = self._policies.get(model_id)
        if policy is None:
            raise ValueError(f"this run does not train {model_id!r}; it trains {sorted(self._policies)}")
        return policy

    @property
    def _training(self) -> list[PolicyStream]:
        """The policies that need more data."""
        return [policy for policy in self._policies.values() if not policy.done]

    def _versions(self) -> tuple[PolicyVersion, ...]:
        return tuple(policy.published for policy in self._policies.values() if policy.published is not None)

    def _wake(self) -> None:
        """Something changed for everybody."""
        self._work.notify_all()
        self._published.notify()
        for policy in self._policies.values():
            policy.changed.notify()
        self._evaluations.wake()
