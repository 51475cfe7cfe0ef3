from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from astraflow.recipes.supervisor import Child, ServiceDied, Supervisor, supervise


class Scripts(Supervisor):
    """Supervises scripts instead of the recipes command."""

    def start(self, name: str, argv: Sequence[str], max_restarts: int) -> None:
        child = Child(
            name=name,
            argv=[sys.executable, "-c", *argv],
            log=self._logs / f"{name}.log",
            max_restarts=max_restarts,
        )
        self.children[name] = child
        self._tasks.start_soon(self._keep, child)


async def test_a_killed_child_is_started_again_and_ends(tmp_path: Path) -> None:
    script = (
        "import os,time,pathlib; p=pathlib.Path(os.environ['MARK']); n=len(p.read_text()) if p.exists() else 0;"
        "p.write_text('x'*(n+1)); time.sleep(60 if n==0 else 0)"
    )
    env = {**os.environ, "MARK": str(tmp_path / "mark")}
    async with anyio.create_task_group() as tasks:
        supervisor = Scripts(tasks, tmp_path, env)
        supervisor.start("one", [script], max_restarts=2)
        with anyio.fail_after(20):
            while not (tmp_path / "mark").exists():  # noqa: ASYNC110
                await anyio.sleep(0.02)
            process = supervisor.children["one"].process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            await supervisor.wait_done("one")
    assert supervisor.children["one"].restarts == 1


async def test_a_child_that_cannot_live_ends_the_run_with_its_log(tmp_path: Path) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ServiceDied, match="(?s)exit code 3 after 1 restarts.*no such luck")):
        async with anyio.create_task_group() as tasks:
            supervisor = Scripts(tasks, tmp_path, dict(os.environ))
            supervisor.start("bad", ["print('no such luck', flush=True); raise SystemExit(3)"], max_restarts=1)


async def test_what_a_person_must_mend_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(ServiceDied, match="(?s)exit code 2 after 0 restarts.*no such model")):
        async with anyio.create_task_group() as tasks:
            supervisor = Scripts(tasks, tmp_path, dict(os.environ))
            supervisor.start("bad", ["print('no such model', flush=True); raise SystemExit(2)"], max_restarts=5)


async def test_no_child_outlives_the_block(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        supervisor = Scripts(tasks, tmp_path, dict(os.environ))
        supervisor.start("long", ["import time; time.sleep(600)"], max_restarts=0)
        with anyio.fail_after(20):
            while supervisor.children["long"].process is None:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        process = supervisor.children["long"].process
        tasks.cancel_scope.cancel()
    assert process.returncode is not None


async def test_supervise_stops_on_failure_in_the_block(tmp_path: Path) -> None:
    with pytest.RaisesGroup(ZeroDivisionError):
        async with supervise(tmp_path, dict(os.environ)):
            raise ZeroDivisionError
