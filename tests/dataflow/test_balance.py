"""Who waits for whom, and what each pool should be: on demand, by the published rule, and in the log."""

from __future__ import annotations

from typing import Any

from structlog.testing import capture_logs

from astraflow.dataflow import Dataflow, Empty, PolicyFeed, Registration, StepReport
from astraflow.dataflow.window import Sums


async def step(dataflow: Dataflow, incarnation: int, version: int, wait_s: float, step_s: float, name: str) -> None:
    report = StepReport(
        model_id=name,
        incarnation=incarnation,
        version=version,
        batch_id=f"{name}/{version}",
        wait_s=wait_s,
        step_s=step_s,
        metrics={},
    )
    await dataflow.report(report)


async def register(dataflow: Dataflow, name: str, pool: str, *policies: str, gpus: float = 0.0, pid: int = 1) -> None:
    await dataflow.register(Registration(worker_id=name, pool=pool, capacity=8, policies=policies, gpus=gpus, pid=pid))


async def test_a_pool_is_to_be_as_large_as_the_neediest_policy_wants(kit: Any) -> None:
    """6 GPUs at a wait of 26.9 %: 9 (AstraFlow's own figures); the other policy hardly waits and wants fewer."""
    feeds = [PolicyFeed(model_id=name, batch_size=4, steps=9) for name in ("solver", "verifier")]
    dataflow = kit.dataflow(feeds)
    await kit.start(dataflow, "w0", policies=("solver", "verifier"))
    for number in range(6):
        await register(dataflow, f"g{number}", "gpu", "solver", "verifier", gpus=1.0)
    await register(dataflow, "v0", "side", "verifier")
    solver, verifier = [await kit.attach(dataflow, name) for name in ("solver", "verifier")]
    for task in await kit.lease(dataflow, 2):
        await kit.mixed(dataflow, task, "solver", "verifier")
    assert (await kit.ask(dataflow, verifier, 0, "verifier")).batch is not None
    await step(dataflow, solver, 1, 26.9, 73.1, "solver")
    await step(dataflow, verifier, 1, 0.0, 10.0, "verifier")
    balance = await dataflow.balance(Empty())
    assert [(p.model_id, round(p.wait_fraction, 3), p.produced, p.consumed) for p in balance.policies] == [
        ("solver", 0.269, 8, 0),
        ("verifier", 0.0, 8, 4),
    ]
    gpu, main, side = balance.pools
    assert (gpu.pool, gpu.unit, gpu.size, gpu.workers, gpu.capacity) == ("gpu", "GPUs", 6.0, 6, 48)
    assert gpu.wanted_by == {"solver": 9, "verifier": 4}
    assert (main.unit, main.size, main.target) == ("workers", 1.0, 2)
    assert side.wanted_by == {"verifier": 1}
    assert dataflow.targets() == {"gpu": 9, "main": 2, "side": 1}


async def test_a_policy_that_is_done_wants_nothing(kit: Any) -> None:
    feeds = [PolicyFeed(model_id="solver", batch_size=4, steps=1), PolicyFeed(model_id="verifier", batch_size=4)]
    dataflow = kit.dataflow(feeds)
    await kit.start(dataflow, policies=("solver", "verifier"))
    incarnation = await kit.attach(dataflow, "solver")
    (task,) = await kit.lease(dataflow)
    await kit.mixed(dataflow, task, "solver", "verifier")
    assert (await kit.ask(dataflow, incarnation, 0)).batch is not None
    await step(dataflow, incarnation, 1, 9.0, 1.0, "solver")
    (pool,) = (await dataflow.balance(Empty())).pools
    assert pool.wanted_by == {"verifier": 1}


async def test_a_trainer_that_waits_counts_before_its_step_is_reported(kit: Any) -> None:
    dataflow = kit.dataflow(worker_silence_s=100.0)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    await step(dataflow, incarnation, 1, 0.0, 10.0, "solver")
    await kit.publish(dataflow, incarnation, 1)
    await kit.ask(dataflow, incarnation, 1)
    kit.clock.advance(30)
    await kit.ask(dataflow, incarnation, 1)
    (policy,) = (await dataflow.balance(Empty())).policies
    assert policy.wait_fraction == 0.75
    assert dataflow.targets() == {"main": 4}


async def test_the_balance_is_logged_once_in_a_window(kit: Any) -> None:
    dataflow = kit.dataflow(window_s=10.0, worker_silence_s=100.0)
    await kit.start(dataflow)
    with capture_logs() as logs:
        for _ in range(25):
            kit.clock.advance(1)
            await dataflow.status(Empty())
    reports = [entry for entry in logs if entry["event"] == "balance"]
    assert len(reports) == 2
    assert reports[0]["pools"] == {"main": "1 workers, wanted 1"}


def test_sums_are_of_the_span_however_often_something_is_added() -> None:
    sums = Sums(100.0)
    for second in range(1000):
        for _ in range(50):
            sums.add(second + 0.5, 2)
    assert 98 * 100 <= sums.total(1000.0) <= 101 * 100
    assert sums.total(2000.0) == 0
