"""The file of a journal: whose it is, what it takes to write it, what a failing disk does, and that it stays small."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from astraflow.dataflow import (
    AttachRequest,
    CommitRequest,
    Control,
    Empty,
    JournalError,
    ListSource,
    PolicyFeed,
    Replay,
    RunFailed,
    SubmitRequest,
)

NAMES = ("solver", "verifier")


async def test_two_dataflows_on_one_file(kit: Any, opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(path):
        with pytest.raises(JournalError, match=f"held by another dataflow \\(process {os.getpid()}\\)"):
            async with opened(path):
                pass
    async with opened(path):
        pass


async def test_another_schema_and_other_files_are_refused(opened: Any, tmp_path: Path) -> None:
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


async def test_a_failed_write_fails_everybody(kit: Any, opened: Any, tmp_path: Path) -> None:
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


async def test_a_slow_disk_holds_up_acknowledgements_and_nothing_else(
    kit: Any, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    kit: Any, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        killed = kit.copied(path, "b.sqlite")
    assert max(sizes[20:]) <= 1.2 * max(sizes[8:20]), sizes
    async with opened(killed, policies=policies, source=ListSource(kit.prompts(50), seed=0)) as dataflow:
        two = await kit.attach(dataflow, version=195)
        served = [(await kit.ask(dataflow, two, at)).batch for at in range(195, 200)]
        assert all(batch is not None for batch in served)
        after = await dataflow.status(Empty())
        assert after.policies[0].data["replay"]["kept"] > 0
