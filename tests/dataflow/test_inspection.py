"""What the `dataflow` command says of a journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow import (
    EvalSuite,
    EvaluateRequest,
    Message,
    Sampling,
    SubmitRequest,
    inspect_journal,
)

NAMES = ("solver", "verifier")


async def test_the_inspector_reads_while_it_is_written(
    kit: Any, opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
        for done in await kit.lease(dataflow, 2):
            await kit.mixed(dataflow, done, *NAMES)
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
