"""Whether a run gets on: what fails on whom, whether anything goes on at all, and when to give up.

Invariant: whoever waits hears within a bound that nothing will come, with the figures and the first cause; before that
it is said in the log and the status.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from .config import DataflowConfig
from .dispatch import Dispatch
from .failures import Outcomes
from .journal import NoJournal
from .policy import PolicyStream
from .watchdog import Watchdog

LOOK_S = 0.5
"""The watchdog looks at most this often."""

log = structlog.get_logger(__name__)


class Health:
    """Looks at the state of a dataflow; changes only its own."""

    def __init__(
        self,
        config: DataflowConfig,
        dispatch: Dispatch,
        policies: Mapping[str, PolicyStream],
        journal: NoJournal,
        now: float,
    ) -> None:
        self._config = config
        self._journal = journal
        self._dispatch = dispatch
        self._policies = policies
        self._outcomes = Outcomes(config.failures.error_results)
        self._watchdog = Watchdog(config.stalled_s, now)
        self._next_look = now

    # --- what happens ------------------------------------------------------------------------------------------

    def progress(self, now: float) -> None:
        """A batch was cut, weights were published, tokens were sampled."""
        self._watchdog.progress(now)

    def attached(self, now: float) -> None:
        """A trainer attached: what failed before it is forgotten."""
        self._outcomes.clear()
        self._watchdog.progress(now)

    def went_well(self, worker_id: str, now: float, *, training: bool) -> None:
        """A sample came in."""
        self._watchdog.progress(now)
        self._dispatch.workers.note(worker_id, None, now)
        if training:
            self._outcomes.add(None)

    def went_wrong(self, worker_id: str, reason: str, now: float, *, training: bool) -> None:
        """A sample failed."""
        if training:
            self._outcomes.add(reason)
        worker = self._dispatch.workers.note(worker_id, reason, now)
        if worker is not None:
            log.warning("worker_quarantined", worker_id=worker_id, reason=worker.record.reason)

    def look(self, now: float) -> None:
        """Say it when nothing goes on."""
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        if self._watchdog.look(now, waited_for=self._waited_for(now)):
            log.warning("no_progress", idle_s=round(self._watchdog.idle_s(now), 1), state=self.figures(now))

    # --- what is to be said ------------------------------------------------------------------------------------

    def failure(self, policy: PolicyStream, now: float) -> str:
        """Why no batch will come for this policy; empty if one may. In synchronous mode all fail together."""
        streams = self._policies.values() if self._config.synchronous else (policy,)
        failure = next(filter(None, (stream.failure for stream in streams)), "")
        if not failure and not self._dispatch.tasks.training:
            failure = self._dispatch.source_failure
        return failure or self.rollout_failure(now)

    def rollout_failure(self, now: float) -> str:
        """Why nothing will come of rollouts any more; empty while something may."""
        if self._journal.failure:
            return self._journal.failure
        silent_s = now - self._dispatch.workers.heard_at
        if silent_s > self._config.worker_grace_s:
            grace = f"worker_grace_s {self._config.worker_grace_s:g}"
            return f"no rollout worker was heard of for {silent_s:.0f} s ({grace}); {self.figures(now)}"
        if self._outcomes.full and self._outcomes.share >= self._config.failures.max_error_share:
            return f"nearly everything fails: {self._outcomes}"
        return self.warning(now) if self._watchdog.failed(now) else ""

    def warning(self, now: float) -> str:
        """What to say while somebody waits and nothing goes on; empty while something does."""
        if not self._waited_for(now):
            return ""
        if not self._watchdog.slow(now):
            return self._evaluation_first(now)
        return f"nothing went on for {self._watchdog.idle_s(now):.0f} s: {self.figures(now)}"

    def _evaluation_first(self, now: float) -> str:
        """Trainers may wait because every worker evaluates."""
        evaluating, (alive, _) = len(self._dispatch.pins), self._dispatch.workers.counts(now)
        if not evaluating or evaluating < alive or not self._asked_for(now):
            return ""
        return f"training waits for an evaluation: all {alive} workers are at it"

    def figures(self, now: float) -> str:
        """How things stand."""
        tasks, (alive, aside) = self._dispatch.tasks, self._dispatch.workers.counts(now)
        buffered = ", ".join(f"{name} {policy.buffered}" for name, policy in self._policies.items())
        return (
            f"{tasks.training} training and {tasks.evaluating} evaluation tasks are open, {len(self._dispatch.leases)} "
            f"of them leased; {alive} workers are alive, {aside} of them in quarantine; buffered: {buffered}; "
            f"{self._outcomes}"
        )

    def _waited_for(self, now: float) -> bool:
        """Does anybody wait? A trainer asks again and again; an evaluation is there until it is finished."""
        return self._asked_for(now) or self._dispatch.tasks.evaluating > 0

    def _asked_for(self, now: float) -> bool:
        return any(policy.asking(now, self._config.worker_silence_s) for policy in self._policies.values())
