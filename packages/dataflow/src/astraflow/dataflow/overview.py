"""What people and whoever scales the pools want to know: the status at a glance, and the balance of demand and supply.

Pure reading of the other parts, beside a few figures of its own. Invariant: what is reported is of one moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog

from .balance import pool_target, wait_fraction
from .config import DataflowConfig
from .dispatch import Dispatch
from .figures import PolicyBalance, PoolBalance
from .health import Health
from .interface import Balance, Phase, SampleResult, Status, Trajectory
from .lengths import Lengths
from .policy import PolicyStream
from .selection import Selection
from .sources import PromptSource
from .window import Window, means_by_name

log = structlog.get_logger(__name__)


class Overview:
    """The reports of one dataflow."""

    def __init__(
        self,
        config: DataflowConfig,
        dispatch: Dispatch,
        policies: Mapping[str, PolicyStream],
        selection: Selection,
        source: PromptSource,
        health: Health,
        now: float,
    ) -> None:
        self._window_s = config.window_s
        self._dispatch = dispatch
        self._policies = policies
        self._selection = selection
        self._source = source
        self._health = health
        self._metrics: Window[dict[str, float]] = Window(config.window_s)
        self._lengths = Lengths()
        self._example: Trajectory | None = None
        self._next_report = now + config.window_s

    def sampled(self, result: SampleResult) -> None:
        """A training sample came back, however it ended."""
        self._lengths.add(result.tokens, timed_out=result.trajectory.status == "timed_out")
        if result.trajectory.status == "ok":
            self._example = result.trajectory

    def grouped(self, trajectories: Iterable[Trajectory], now: float) -> None:
        """A training group has these samples."""
        self._metrics.add(now, means_by_name(trajectory.metrics for trajectory in trajectories))

    def look(self, now: float) -> None:
        """Log the balance once in a window while any policy trains."""
        if now < self._next_report:
            return
        self._next_report = now + self._window_s
        balance = self.balance(now)
        if any(policy.training for policy in balance.policies):
            log.info(
                "balance",
                waiting={policy.model_id: round(policy.wait_fraction, 3) for policy in balance.policies},
                produced={policy.model_id: policy.produced for policy in balance.policies},
                consumed={policy.model_id: policy.consumed for policy in balance.policies},
                pools={pool.pool: f"{pool.size:g} {pool.unit}, wanted {pool.target}" for pool in balance.pools},
            )

    def balance(self, now: float) -> Balance:
        """Who waited for whom over the window, and how large each pool should be: what the neediest of the policies
        that still train and that it serves wants of it."""
        policies = tuple(
            PolicyBalance(
                model_id=name,
                wait_fraction=wait_fraction(policy.steps_taken(now)),
                produced=policy.produced_lately(now),
                consumed=policy.consumed_lately(now),
                training=not policy.done,
            )
            for name, policy in self._policies.items()
        )
        pools = []
        for pool in self._dispatch.workers.pools(now):
            wants = {
                policy.model_id: pool_target(pool.size, policy.wait_fraction, policy.produced, policy.consumed)
                for policy in policies
                if policy.training and policy.model_id in pool.policies
            }
            pools.append(
                PoolBalance(
                    pool=pool.name,
                    unit=pool.unit,
                    size=pool.size,
                    workers=pool.workers,
                    capacity=pool.capacity,
                    running=pool.running,
                    wanted_by=wants,
                    target=max(wants.values(), default=1),
                )
            )
        return Balance(window_s=self._window_s, policies=policies, pools=tuple(pools))

    def status(self, phase: Phase, now: float) -> Status:
        balance = self.balance(now)
        tasks, over = self._dispatch.tasks, phase == "finished"
        failures = ("" if over else self._health.failure(policy, now) for policy in self._policies.values())
        return Status(
            phase=phase,
            policies=tuple(
                policy.status(
                    now,
                    tasks.training,
                    max((pool.wanted_by.get(name, 1) for pool in balance.pools), default=1),
                    self._selection.stats_of(name),
                )
                for name, policy in self._policies.items()
            ),
            workers=self._dispatch.workers.statuses(now),
            leased=len(self._dispatch.leases),
            pending_eval=tasks.evaluating,
            evaluating=len(self._dispatch.pins),
            metrics=means_by_name(self._metrics.values(now)),
            data={"source": self._source.stats(), "selection": self._selection.stats()},
            example=self._example,
            lengths=self._lengths.report(),
            warning="" if over else self._health.warning(now),
            error=next(filter(None, failures), ""),
        )
