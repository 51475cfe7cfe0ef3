"""What was said to anybody is in the file: a dataflow that goes on from it is as if it had never stopped."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from astraflow.dataflow import (
    AttachRequest,
    CommitRequest,
    Control,
    Dataflow,
    Empty,
    EvalSuite,
    EvaluateRequest,
    EvaluationQuery,
    Heartbeat,
    JournalError,
    ListSource,
    Message,
    PolicyFeed,
    Replay,
    RunFailed,
    Sampling,
    SubmitRequest,
    inspect_journal,
    open_journal,
)

Opener = Callable[..., AbstractAsyncContextManager[Dataflow]]


def copied(path: Path, name: str) -> Path:
    """The file as a process that dies now would leave it."""
    there = path.with_name(name)
    for suffix in ("", "-wal"):
        if Path(f"{path}{suffix}").exists():
            shutil.copy(f"{path}{suffix}", f"{there}{suffix}")
    return there


@pytest.fixture
def opened(kit: Any) -> Opener:
    """A dataflow with two policies that goes on from a file."""

    @asynccontextmanager
    async def open_it(path: Path, **fields: Any) -> AsyncIterator[Dataflow]:
        defaults: dict[str, Any] = {
            "policies": (
                PolicyFeed(model_id="solver", batch_size=4, steps=10),
                PolicyFeed(model_id="verifier", batch_size=2, steps=10),
            ),
            "n_samples": 2,
            "filters": (),
        }
        source = fields.pop("source", None) or ListSource(kit.prompts(8), seed=0)
        suites = fields.pop("suites", ())
        config = kit.config(**{**defaults, **fields})
        async with open_journal(path) as journal:
            yield Dataflow(config, source, suites, journal=journal, clock=kit.clock)

    return open_it


NAMES = ("solver", "verifier")


async def work(kit: Any, dataflow: Dataflow, groups: int, *, fail: bool = False) -> None:
    for task in await kit.lease(dataflow, groups):
        rows = [dict.fromkeys(NAMES, float(index)) for index in range(task.n_samples)]
        if fail:
            rows = rows[:1]
        await kit.submit(dataflow, task, rows)


async def test_it_goes_on_as_if_nothing_had_happened(kit: Any, opened: Opener, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(path) as dataflow:
        await kit.start(dataflow, policies=NAMES)
        one = await kit.attach(dataflow, "solver")
        await kit.attach(dataflow, "verifier")
        await work(kit, dataflow, 3)
        first = (await kit.ask(dataflow, one, 0, "solver")).batch
        await kit.publish(dataflow, one, 1, "solver")
        await work(kit, dataflow, 2, fail=True)
        before = await dataflow.status(Empty())
        killed = copied(path, "b.sqlite")
    async with opened(killed) as dataflow:
        after = await dataflow.status(Empty())
        assert after.phase == "running"
        for old, new in zip(before.policies, after.policies, strict=True):
            assert (new.version, new.incarnation) == (old.version, old.incarnation)
            assert (new.buffered, new.running) == (old.buffered, old.running)
            assert (new.produced, new.consumed, new.dropped) == (old.produced, old.consumed, old.dropped)
        assert after.leased == 2
        second = (await kit.ask(dataflow, one, 1, "solver")).batch
        assert second is None, "six sequences came, four were served"
        two = await kit.attach(dataflow, "solver")
        assert two == one + 1
        assert (await kit.ask(dataflow, two, 0, "solver")).batch == first


async def test_late_results_of_leases_before_the_death_count(kit: Any, opened: Opener, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(path) as dataflow:
        await kit.start(dataflow, policies=NAMES)
        (task,) = await kit.lease(dataflow)
        result = kit.result(task, 0, kit.trajectory(dict.fromkeys(NAMES, 1.0)))
        await dataflow.submit(SubmitRequest(results=(result,)))
        killed = copied(path, "b.sqlite")
    async with opened(killed) as dataflow:
        again = await dataflow.submit(SubmitRequest(results=(result,)))
        assert (again.accepted, again.duplicates) == (0, 1)
        other = kit.result(task, 1, kit.trajectory(dict.fromkeys(NAMES, 0.0)))
        assert (await dataflow.submit(SubmitRequest(results=(other,)))).accepted == 1
        status = await dataflow.status(Empty())
        assert [policy.buffered for policy in status.policies] == [2, 2]
        assert status.leased == 0


async def test_the_worker_that_held_a_task_keeps_it_or_another_gets_it(
    kit: Any, opened: Opener, tmp_path: Path
) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(path) as dataflow:
        await kit.start(dataflow, "w0", "w1", policies=NAMES)
        (mine,) = await kit.lease(dataflow, worker="w0")
        (lost,) = await kit.lease(dataflow, worker="w1")
        killed = copied(path, "b.sqlite")
    async with opened(killed) as dataflow:
        for _ in range(10):
            kit.clock.advance(2.0)
            reply = await dataflow.heartbeat(Heartbeat(worker_id="w0", tasks=(mine.task_id,)))
            assert reply.known
            assert reply.cancel == ()
        tasks = await kit.lease(dataflow, worker="w0")
        assert [task.task_id for task in tasks] == [lost.task_id]
        assert tasks[0].attempt == 1


async def test_tokens_of_abandoned_weights_count_as_the_point_gone_back_to(
    kit: Any, opened: Opener, tmp_path: Path
) -> None:
    """A worker that has not pulled yet leases a task after the trainer went back."""
    policies = (PolicyFeed(model_id="solver", batch_size=2, max_staleness=1, steps=20),)
    path = tmp_path / "a.sqlite"
    async with opened(path, policies=policies) as dataflow:
        await kit.start(dataflow)
        one = await kit.attach(dataflow)
        for version in range(1, 10):
            await kit.publish(dataflow, one, version)
        two = await kit.attach(dataflow, version=5)
        (task,) = await kit.lease(dataflow)
        for version in (6, 7):
            await kit.publish(dataflow, two, version)
        trajectory = kit.trajectory({"solver": 1.0}, {"solver": 9})
        results = tuple(kit.result(task, index, trajectory, incarnations={"solver": one}) for index in range(2))
        await dataflow.submit(SubmitRequest(results=results[:1]))
        killed = copied(path, "b.sqlite")
    async with opened(killed, policies=policies) as dataflow:
        await dataflow.submit(SubmitRequest(results=results[1:]))
        assert (await kit.ask(dataflow, two, 7)).batch is None
        status = await dataflow.status(Empty())
        assert status.policies[0].dropped == {"stale": 2}, "5 is two behind 7"


async def test_committed_batches_are_forgotten_when_no_checkpoint_needs_them(
    kit: Any, opened: Opener, tmp_path: Path
) -> None:
    path = tmp_path / "a.sqlite"
    policies = (PolicyFeed(model_id="solver", batch_size=2, steps=20),)
    async with opened(path, policies=policies) as dataflow:
        await kit.start(dataflow)
        one = await kit.attach(dataflow)
        batches = []
        for version in range(6):
            for task in await kit.lease(dataflow):
                await kit.submit(dataflow, task, [{"solver": 1.0}, {"solver": 0.0}])
            batches.append((await kit.ask(dataflow, one, version)).batch)
            await kit.publish(dataflow, one, version + 1)
            if version % 2:
                await dataflow.commit(CommitRequest(model_id="solver", incarnation=one, version=version + 1))
        killed = copied(path, "b.sqlite")
    async with opened(killed, policies=policies) as dataflow:
        with pytest.raises(ValueError, match="the batch at version 4 was asked for"):
            await kit.ask(dataflow, one, 4)
        consumed = tuple(batch.batch_id for batch in batches[:4])
        two = (await dataflow.attach(AttachRequest(model_id="solver", version=4, consumed=consumed))).incarnation
        assert [(await kit.ask(dataflow, two, at)).batch for at in (4, 5)] == batches[4:]
        other = ("x", *consumed[:3], "y")
        with pytest.raises(ValueError, match="another run's checkpoint"):
            await dataflow.attach(AttachRequest(model_id="solver", version=5, consumed=other))
    rows = sqlite3.connect(killed).execute("SELECT version, kept FROM batches ORDER BY version").fetchall()
    assert rows == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]


async def test_an_evaluation_goes_on(kit: Any, opened: Opener, tmp_path: Path) -> None:
    suite = EvalSuite(
        name="held_out", prompts=kit.prompts(3, "held"), workflow="math", sampling={"solver": Sampling(temperature=0)}
    )
    path = tmp_path / "a.sqlite"
    async with opened(path, suites=[suite]) as dataflow:
        await kit.start(dataflow, policies=NAMES)
        await dataflow.evaluate(EvaluateRequest(label="before", suites=("held_out",)))
        (first,) = await kit.lease(dataflow)
        trajectory = kit.trajectory({"solver": 1.0}, metrics={"correct": 1.0})
        await dataflow.submit(SubmitRequest(results=(kit.result(first, 0, trajectory),)))
        killed = copied(path, "b.sqlite")
    async with opened(killed, suites=[suite]) as dataflow:
        for task in await kit.lease(dataflow, 2):
            assert task.suite == "held_out"
            await dataflow.submit(SubmitRequest(results=(kit.result(task, 0, trajectory),)))
        ended = await dataflow.evaluation(EvaluationQuery(label="before", wait_s=0.0))
        assert ended.finished
        assert ended.suites[0].metrics["correct"].n == 3
        killed = copied(killed, "c.sqlite")
    async with opened(killed, suites=[suite]) as dataflow:
        assert await dataflow.evaluation(EvaluationQuery(label="before", wait_s=0.0)) == ended


async def test_two_dataflows_on_one_file(kit: Any, opened: Opener, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(path):
        with pytest.raises(JournalError, match=f"held by another dataflow \\(process {os.getpid()}\\)"):
            async with opened(path):
                pass
    async with opened(path):
        pass


async def test_another_schema_and_other_files_are_refused(opened: Opener, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(path):
        pass
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(JournalError, match=r"has schema 99, .* reads and writes 1: go on with the version"):
        async with opened(path):
            pass
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(JournalError, match="is not a dataflow's journal"):
        async with opened(other):
            pass
    text = tmp_path / "text"
    text.write_text("no database at all, just a text that is long enough to be looked at " * 20)
    with pytest.raises(JournalError, match="is not a dataflow's journal"):
        async with opened(text):
            pass


async def test_another_run_is_refused(kit: Any, opened: Opener, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(path) as dataflow:
        await kit.start(dataflow, policies=NAMES)
    with pytest.raises(JournalError, match=r"trains \['solver', 'verifier'\], this one trains \['solver'\]"):
        async with opened(path, policies=(PolicyFeed(model_id="solver", batch_size=4),)):
            pass
    with pytest.raises(ValueError, match="another source"):
        async with opened(path, source=ListSource(kit.prompts(9), seed=0)):
            pass


async def test_a_failed_write_fails_everybody(kit: Any, opened: Opener, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"

    async def run() -> None:
        async with opened(path) as dataflow:
            await kit.start(dataflow, policies=NAMES)
            one = await kit.attach(dataflow, "solver")
            (task,) = await kit.lease(dataflow)
            with sqlite3.connect(path) as other:
                other.execute("DROP TABLE samples")
            with pytest.raises(RunFailed, match=r"the journal .*a\.sqlite cannot be written \(.*samples.*Make room"):
                await kit.submit(dataflow, task, [dict.fromkeys(NAMES, 1.0)] * 2)
            for call in (
                kit.lease(dataflow),
                kit.ask(dataflow, one, 0, "solver"),
                dataflow.control(Control(phase="finished")),
                dataflow.attach(AttachRequest(model_id="solver")),
            ):
                with pytest.raises(RunFailed, match="cannot be written"):
                    await call
            assert "cannot be written" in (await dataflow.status(Empty())).error

    with pytest.raises(RunFailed, match="cannot be written"):  # whoever closes it hears it, too
        await run()


SCRIPT = """
import asyncio, sys
from pathlib import Path
from astraflow.dataflow import *

async def main():
    config = DataflowConfig(policies=(PolicyFeed(model_id="solver", batch_size=4),), workflow="math", n_samples=2,
                            sampling={"solver": Sampling()})
    prompts = [Prompt(id=str(i), source="s", messages=()) for i in range(4)]
    async with open_journal(Path(sys.argv[1])) as journal:
        dataflow = Dataflow(config, ListSource(prompts, seed=0), journal=journal)
        await dataflow.register(Registration(worker_id="w", pool="p", capacity=1, policies=("solver",)))
        await dataflow.control(Control(phase="running"))
        for _ in range(1000):
            attached = await dataflow.attach(AttachRequest(model_id="solver"))
            print(attached.incarnation, flush=True)

asyncio.run(main())
"""


def test_what_was_said_survives_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(25)]
    process.send_signal(signal.SIGKILL)
    said += [int(line) for line in process.stdout.read().split()]
    process.wait()
    script = (
        "import asyncio,sys,msgspec; from pathlib import Path; from astraflow.dataflow import open_journal\n"
        "async def main():\n"
        "    async with open_journal(Path(sys.argv[1])) as journal:\n"
        "        state = msgspec.msgpack.decode(journal.restored.state['policy/solver'])\n"
        "        print(state['lineage']['incarnation'])\n"
        "asyncio.run(main())"
    )
    output = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert int(output.stdout) >= said[-1]


async def test_the_inspector_reads_while_it_is_written(
    kit: Any, opened: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def pages(*arguments: str) -> str:
        inspect_journal(["inspect", str(path), *arguments], prog="dataflow")
        return capsys.readouterr().out

    path = tmp_path / "a.sqlite"
    suite = EvalSuite(
        name="held_out", prompts=kit.prompts(1, "held"), workflow="math", sampling={"solver": Sampling(temperature=0)}
    )
    async with opened(path, suites=[suite]) as dataflow:
        await kit.start(dataflow, policies=NAMES)
        one = await kit.attach(dataflow, "solver")
        await dataflow.evaluate(EvaluateRequest(label="before", suites=("held_out",)))
        (asked,) = await kit.lease(dataflow)
        graded = kit.trajectory({"solver": 1.0}, metrics={"correct": 1.0})
        await dataflow.submit(SubmitRequest(results=(kit.result(asked, 0, graded),)))
        await work(kit, dataflow, 2)
        (task,) = await kit.lease(dataflow)
        read = kit.trajectory({"solver": 1.0}, messages=(Message("assistant", "forty-two"),))
        await dataflow.submit(SubmitRequest(results=(kit.result(task, 0, read),)))
        await kit.ask(dataflow, one, 0, "solver")
        overview = pages()
        assert "phase      running" in overview
        assert "policy solver\n  version      0, incarnation 1" in overview
        assert "4 taken, 4 trained, 0 buffered" in overview
        assert "correct 1.000" in overview
        assert "train: 3 remembered, 1 of them open, 3 readable" in overview
        assert "solver/1/0" in pages("--batches", "5")
        groups = pages("--groups", "5")
        assert "solver trained x 2, verifier buffered x 2" in groups
        assert "1 are in" in groups
        shown = pages("--trajectory", f"{task.task_id}/0")
        assert "forty-two" in shown
        assert "3 given, 3 of version 0" in shown
        with pytest.raises(SystemExit):
            pages("--trajectory", f"{task.task_id}/1")
        assert "is not in yet; leased 1 times, last to w0" in capsys.readouterr().err
    assert pages() == overview, "a finished one, too"


async def test_algorithms_go_on_with_what_they_know(kit: Any, opened: Opener, tmp_path: Path) -> None:
    """Replay has its samples back, a selector its rates, the prompts go on where they were."""
    settings: dict[str, Any] = {
        "policies": (PolicyFeed(model_id="solver", batch_size=4, steps=20, replay=Replay(ratio=0.5)),),
        "selectors": ("filter_solved(decay=0, threshold=0.9)",),
    }
    path = tmp_path / "a.sqlite"
    async with opened(path, **settings) as dataflow:
        await kit.start(dataflow)
        one = await kit.attach(dataflow)
        for version in range(6):
            for task in await kit.lease(dataflow, 2):
                await kit.submit(dataflow, task, [{"solver": 1.0}, {"solver": 1.0 if version else 0.0}])
            await kit.ask(dataflow, one, version)
            await kit.publish(dataflow, one, version + 1)
            await dataflow.commit(CommitRequest(model_id="solver", incarnation=one, version=version + 1))
        await anyio.sleep(0.1)  # what algorithms know may be behind by a moment
        await dataflow.control(Control(phase="running"))
        before = await dataflow.status(Empty())
        killed = copied(path, "b.sqlite")
        (expected,) = [task.prompt.id for task in await kit.lease(dataflow)]
    assert before.data["selection"]["rejected"] > 0
    async with opened(killed, **settings) as dataflow:
        after = await dataflow.status(Empty())
        assert after.data == before.data
        old, new = before.policies[0].data, after.policies[0].data
        assert new["replay"]["kept"] == old["replay"]["kept"] > 0
        assert new["filter_solved"]["solved"] == old["filter_solved"]["solved"] > 0
        for task in await kit.lease(dataflow):
            assert task.prompt.id == expected
            await kit.submit(dataflow, task, [{"solver": 0.0}, {"solver": 1.0}])
        batch = (await kit.ask(dataflow, one, 6)).batch
        assert [sample.replayed for sample in batch.samples] == [False, False, True, True]


async def test_batches_beyond_what_memory_holds_come_again_from_the_file(
    kit: Any, opened: Opener, tmp_path: Path
) -> None:
    policies = (PolicyFeed(model_id="solver", batch_size=2, max_staleness=0, steps=200),)
    path = tmp_path / "a.sqlite"
    async with opened(path, policies=policies) as dataflow:
        await kit.start(dataflow)
        one = await kit.attach(dataflow)
        batches = []
        for version in range(70):
            (task,) = await kit.lease(dataflow)
            await kit.submit(dataflow, task, [{"solver": 1.0}, {"solver": 0.0}], {"solver": version})
            batches.append((await kit.ask(dataflow, one, version)).batch)
            await kit.publish(dataflow, one, version + 1)
        two = await kit.attach(dataflow, version=0)
        assert [(await kit.ask(dataflow, two, at)).batch for at in range(70)] == batches
        killed = copied(path, "b.sqlite")
    async with opened(killed, policies=policies) as dataflow:
        assert [(await kit.ask(dataflow, two, at)).batch for at in range(70)] == batches


async def test_a_slow_disk_holds_up_acknowledgements_and_nothing_else(
    kit: Any, opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow.dataflow.journal.journal.FULL_BYTES", 400)
    path = tmp_path / "a.sqlite"
    async with opened(path) as dataflow:
        await kit.start(dataflow, policies=NAMES)
        tasks = await kit.lease(dataflow, 3)
        done: list[str] = []

        async def submit(task: Any) -> None:
            await kit.submit(dataflow, task, [dict.fromkeys(NAMES, 1.0), dict.fromkeys(NAMES, 0.0)])
            done.append(task.task_id)

        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # the writer can do nothing now
        async with anyio.create_task_group() as submits:
            for task in tasks:
                submits.start_soon(submit, task)
            await anyio.sleep(0.3)
            status, early = await dataflow.status(Empty()), list(done)
            other.execute("ROLLBACK")
        assert early == []
        assert status.policies[0].buffered < 6, "when much is waiting no more is taken"
        assert status.error == ""
        assert sorted(done) == sorted(task.task_id for task in tasks)
        assert (await dataflow.status(Empty())).policies[0].buffered == 6


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path) -> None:
    """The file may not grow beyond a limit, as on a full disk."""
    path = tmp_path / "a.sqlite"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + SCRIPT.replace("range(1000)", "range(10**6)"), str(path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "RunFailed: the journal" in done.stderr
    assert "Make room or mend the disk" in done.stderr
    with sqlite3.connect(path) as journal:
        (packed,) = journal.execute("SELECT value FROM state WHERE key = 'policy/solver'").fetchone()
    incarnation = msgspec.msgpack.decode(packed)["lineage"]["incarnation"]
    said = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    assert incarnation >= said[-1] > 5


async def test_the_file_does_not_grow_with_the_run(
    kit: Any, opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pages that are in use; and everything that may still be served is there."""
    for name, value in {
        "READABLE_GROUPS": 10,
        "REMEMBERED_GROUPS": 40,
        "REMEMBERED_VERSIONS": 20,
        "PRUNE_EVERY": 10,
    }.items():
        monkeypatch.setattr(f"astraflow.dataflow.journal.apply.{name}", value)
    policies = (PolicyFeed(model_id="solver", batch_size=4, steps=1000, replay=Replay(ratio=0.5, capacity=20)),)
    path = tmp_path / "a.sqlite"
    sizes: list[int] = []
    async with opened(path, policies=policies, source=ListSource(kit.prompts(50), seed=0)) as dataflow:
        await kit.start(dataflow)
        one = await kit.attach(dataflow)
        for version in range(200):
            for task in await kit.lease(dataflow, 2):
                sample = kit.trajectory({"solver": 1.0}, {"solver": version}, metrics={"m": 1.0})
                long = tuple(kit.sequence(reward=float(i), version=version, length=2000) for i in range(2))
                made = (msgspec.structs.replace(sample, sequences=(sequence,)) for sequence in long)
                results = tuple(kit.result(task, index, trajectory) for index, trajectory in enumerate(made))
                await dataflow.submit(SubmitRequest(results=results))
            await kit.ask(dataflow, one, version)
            await kit.publish(dataflow, one, version + 1)
            if version % 5 == 4:
                await dataflow.commit(CommitRequest(model_id="solver", incarnation=one, version=version + 1))
                with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
                    (used,) = db.execute(
                        "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"
                    )
                    sizes.append(used[0])
        killed = copied(path, "b.sqlite")
    assert max(sizes[20:]) <= 1.2 * max(sizes[8:20]), sizes
    async with opened(killed, policies=policies, source=ListSource(kit.prompts(50), seed=0)) as dataflow:
        two = await kit.attach(dataflow, version=195)
        served = [(await kit.ask(dataflow, two, at)).batch for at in range(195, 200)]
        assert all(batch is not None for batch in served)
        after = await dataflow.status(Empty())
        assert after.policies[0].data["replay"]["kept"] > 0
