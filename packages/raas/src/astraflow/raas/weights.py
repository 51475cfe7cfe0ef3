"""Keeps every engine at its policy's newest version, or at one it is pinned to: pulled while the old one serves,
swapped in at once.

Invariants: one policy's slow or broken pull never holds up another's; a pull that fails leaves the old weights serving
and is tried again; between two updates of a policy pass at least `min_update_s` seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import anyio
import structlog

from astraflow.dataflow import DataflowService, Policies, PolicyVersion, WatchRequest
from astraflow.weightsync import Puller, PullReport, Sink, TransferMode, VersionGone, WeightSyncError, open_store

from .interface import Engine
from .patience import persist

WATCH_S = 10.0
WATCH_TIMEOUT_S = WATCH_S + 20.0
WATCH_PAUSE_S = 0.02
"""Between two looks, in case the dataflow answers at once without news."""

RETRY_S = (0.5, 10.0)
"""First and longest pause after a failed pull; it doubles."""

log = structlog.get_logger(__name__)


class PolicyWeights:
    """One policy's engine and where its weights come from."""

    def __init__(self, model_id: str, engine: Engine, transfer: TransferMode) -> None:
        self.model_id = model_id
        self.engine = engine
        self.wanted: PolicyVersion | None = None
        self.pinned: PolicyVersion | None = None
        self.gone = False
        """What it is pinned to is not to be had any more."""
        self.news = anyio.Event()
        self.full_bytes = 0
        self.delta_bytes = 0
        self.pause_s = 0.0
        self._transfer = transfer
        self._source = ""
        self._puller: Puller | None = None

    @cached_property
    def sink(self) -> Sink:
        """Asked for once the engine has started."""
        return self.engine.sink()

    @property
    def current(self) -> bool:
        """Does the engine hold what it should, as far as that is to be had?"""
        if self.pinned is not None:
            return self.gone or self.holds(self.pinned)
        if self.wanted is None:
            return True
        state = self.sink.state()
        return bool(state.digest) and (state.incarnation, state.version) >= (
            self.wanted.incarnation,
            self.wanted.version,
        )

    def serves(self, version: int) -> bool:
        """Is the engine at `version` or newer? What it has from a trainer that was replaced does not count."""
        abandoned = self.wanted is not None and self.sink.state().incarnation < self.wanted.incarnation
        return self.engine.version >= version and not abandoned

    def holds(self, version: PolicyVersion) -> bool:
        """Does the engine hold exactly this version?"""
        state = self.sink.state()
        return bool(state.digest) and (state.incarnation, state.version) == (version.incarnation, version.version)

    def pin(self, version: PolicyVersion | None) -> None:
        """Stay at this version, or follow the newest again."""
        if version != self.pinned:
            self.pinned, self.gone = version, False
            self.news.set()

    def want(self, version: PolicyVersion) -> None:
        if version != self.wanted:
            self.wanted = version
            self.news.set()

    async def update(self) -> bool:
        """Pull the newest version, or the one it is pinned to, and swap it in; False if the source does not have it
        yet.

        Raises:
            VersionGone: the source does not have the version it is pinned to any more; nothing changed.
            WeightSyncError: what the source holds could not be verified; nothing changed.
            OSError: the source could not be read; nothing changed.
        """
        target = self.pinned or self.wanted
        assert target is not None
        if self._puller is None or self._source != target.weights:
            self._source = target.weights
            self._puller = Puller(open_store(self._source), self.sink, mode=self._transfer)
        staged = await self._puller.stage((target.incarnation, target.version) if self.pinned else None)
        if staged is None:
            return False
        reports: list[PullReport] = []
        pause_s = await self.engine.swap(lambda: reports.append(staged.commit()), staged.version)
        self._note(reports[0], pause_s)
        return True

    def _note(self, report: PullReport, pause_s: float) -> None:
        self.full_bytes += report.full_bytes
        self.delta_bytes += report.delta_bytes
        self.pause_s += pause_s
        log.info(
            "weights_updated",
            policy=self.model_id,
            version=report.version,
            kind=report.kind,
            full_bytes=report.full_bytes,
            delta_bytes=report.delta_bytes,
            stage_s=round(report.stage_s, 3),
            pause_s=round(pause_s, 3),
        )


class WeightWatcher:
    """Watches the dataflow for new versions and brings the engines to them."""

    def __init__(
        self,
        dataflow: DataflowService,
        engines: Mapping[str, Engine],
        *,
        transfer: TransferMode,
        min_update_s: float,
        patience_s: float,
    ) -> None:
        self._dataflow = dataflow
        self._policies = {name: PolicyWeights(name, engine, transfer) for name, engine in engines.items()}
        self._min_update_s = min_update_s
        self._patience_s = patience_s
        self._updated = anyio.Event()

    def versions(self) -> dict[str, int]:
        """What the engines serve now."""
        return {name: policy.engine.version for name, policy in self._policies.items()}

    def incarnations(self) -> dict[str, int]:
        """Whose weights the engines serve now, of those that had any from their trainers."""
        states = {name: policy.sink.state() for name, policy in self._policies.items()}
        return {name: state.incarnation for name, state in states.items() if state.digest}

    def totals(self) -> tuple[int, int, float]:
        """Bytes pulled in full, bytes pulled as deltas, seconds generation stood still; since the start."""
        policies = self._policies.values()
        return (
            sum(policy.full_bytes for policy in policies),
            sum(policy.delta_bytes for policy in policies),
            sum(policy.pause_s for policy in policies),
        )

    async def at_least(self, versions: Mapping[str, int]) -> None:
        """Wait until the engines serve these versions or newer ones; other workers' policies are not waited for."""
        wanted = [(self._policies[name], version) for name, version in versions.items() if name in self._policies]
        while not all(policy.serves(version) for policy, version in wanted):
            await self._updated.wait()

    def pin(self, versions: Iterable[PolicyVersion]) -> bool:
        """Stay at exactly these versions until `release`; False if it stays at others already."""
        named = {version.model_id: version for version in versions if version.model_id in self._policies}
        pinned = {name: policy.pinned for name, policy in self._policies.items() if policy.pinned is not None}
        if pinned and pinned != named:
            return False
        for name, version in named.items():
            self._policies[name].pin(version)
        return True

    def release(self) -> None:
        """Follow the newest versions again."""
        for policy in self._policies.values():
            policy.pin(None)

    async def exactly(self, versions: Iterable[PolicyVersion]) -> bool:
        """Wait until the engines serve exactly these versions, which they are pinned to; False if they never will."""
        wanted = [(self._policies[version.model_id], version) for version in versions]
        while not all(policy.holds(version) for policy, version in wanted):
            if any(policy.gone or policy.pinned != version for policy, version in wanted):
                return False
            await self._updated.wait()
        return True

    async def initial(self) -> None:
        """Bring every policy that has a published version to it before the worker takes work.

        Raises:
            Unavailable, TimeoutError: the dataflow could not be reached for as long as the patience lasts.
        """
        self._hear(await self._watch({}, {}, 0.0))
        async with anyio.create_task_group() as tasks:
            for policy in self._policies.values():
                if not policy.current:
                    tasks.start_soon(self._attempt, policy)

    async def run(self) -> None:
        """Watch and update until cancelled."""
        async with anyio.create_task_group() as tasks:
            for policy in self._policies.values():
                tasks.start_soon(self._follow, policy)
            while True:
                seen = [policy.wanted for policy in self._policies.values() if policy.wanted is not None]
                known = {version.model_id: version.version for version in seen}
                incarnations = {version.model_id: version.incarnation for version in seen}
                self._hear(await self._watch(known, incarnations, WATCH_S))
                await anyio.sleep(WATCH_PAUSE_S)

    async def _watch(self, known: dict[str, int], incarnations: dict[str, int], wait_s: float) -> Policies:
        request = WatchRequest(known=known, incarnations=incarnations, wait_s=wait_s)
        return await persist(
            "watch",
            lambda: self._dataflow.watch(request),
            timeout_s=WATCH_TIMEOUT_S,
            patience_s=self._patience_s,
        )

    def _hear(self, heard: Policies) -> None:
        for version in heard.versions:
            if version.model_id in self._policies:
                self._policies[version.model_id].want(version)

    async def _follow(self, policy: PolicyWeights) -> None:
        """Bring one policy to what is wanted, again and again."""
        pause_s = RETRY_S[0]
        while True:
            if policy.current:
                await policy.news.wait()
                policy.news = anyio.Event()
                continue
            if await self._attempt(policy):
                pause_s = RETRY_S[0]
                await anyio.sleep(self._min_update_s)
            else:
                with anyio.move_on_after(pause_s):
                    await policy.news.wait()
                policy.news = anyio.Event()
                pause_s = min(2 * pause_s, RETRY_S[1])

    async def _attempt(self, policy: PolicyWeights) -> bool:
        """One pull; returns whether the engine has other weights now."""
        try:
            done = await policy.update()
        except VersionGone as error:
            log.warning("pinned_version_gone", policy=policy.model_id, serving=policy.engine.version, error=str(error))
            policy.gone = policy.pinned is not None
            self._tell()
            return False
        except (WeightSyncError, OSError) as error:
            log.warning(
                "pull_failed",
                policy=policy.model_id,
                serving=policy.engine.version,
                error=f"{type(error).__name__}: {error}",
            )
            return False
        if done:
            self._tell()
        return done

    def _tell(self) -> None:
        """Whoever waits for versions looks again."""
        self._updated.set()
        self._updated = anyio.Event()
