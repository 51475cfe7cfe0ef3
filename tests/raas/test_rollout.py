"""One sample: whatever its workflow does, it ends in one trajectory; an error is never a reward of 0."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import pytest

from astraflow.dataflow import Message, RolloutTask, Trajectory
from astraflow.raas import Meter, Outcome, Policy, PolicyHandle, run_sample

Answering = Callable[[RolloutTask, Mapping[str, PolicyHandle]], Awaitable[Outcome]]


async def roll(kit: Any, workflow: Answering, seconds: float = 5.0, **options: Any) -> tuple[Trajectory, Any]:
    engine = kit.ScriptedEngine(token_s=options.pop("token_s", 0.0))
    await engine.start()
    meter = Meter()
    meter.scope.deadline = anyio.current_time() + seconds
    policies = {"solver": Policy(engine, kit.CharTokenizer())}
    task = kit.make_task()
    return await run_sample(task, 1, {"answer": workflow}, policies, meter=meter, **options), engine


async def answer(task: RolloutTask, policies: Mapping[str, PolicyHandle]) -> Outcome:
    turn = await policies["solver"].chat(task.prompt.messages, role="solver")
    turn.reward = float(len(turn.text) > 3)
    return Outcome(metrics={"length": len(turn.text)})


async def test_a_workflow_that_ends_gives_its_sequences_metrics_and_messages(kit: Any) -> None:
    trajectory, engine = await roll(kit, answer)
    assert (trajectory.status, trajectory.error) == ("ok", "")
    (sequence,) = trajectory.sequences
    assert sequence.model_id == "solver"
    assert sequence.reward in (0.0, 1.0)
    assert [message.role for message in trajectory.messages] == ["user", "assistant"]
    assert trajectory.metrics == {"length": float(len(trajectory.messages[1].content))}
    assert int(sequence.loss_mask.numpy().sum()) == engine.generated


async def test_the_same_task_and_sample_give_the_same_trajectory(kit: Any) -> None:
    assert (await roll(kit, answer))[0] == (await roll(kit, answer))[0]


async def test_an_exception_fails_the_sample_and_says_where(kit: Any) -> None:
    async def broken(task: RolloutTask, policies: Mapping[str, PolicyHandle]) -> Outcome:
        await answer(task, policies)
        raise RuntimeError("the verifier crashed")

    trajectory, _ = await roll(kit, broken)
    assert trajectory.status == "failed"
    assert trajectory.sequences == ()
    assert "task 'sums/0' sample 1: RuntimeError: the verifier crashed (test_rollout.py:" in trajectory.error
    assert trajectory.messages != ()


async def test_in_debug_mode_the_exception_surfaces_with_its_place(kit: Any) -> None:
    async def broken(task: RolloutTask, policies: Mapping[str, PolicyHandle]) -> Outcome:
        await policies["solver"].generate([])
        return Outcome()

    class Refusing(kit.ScriptedEngine):  # type: ignore[misc]
        async def generate(self, request: Any, /) -> Any:
            raise ValueError("empty prompt")

    policies = {"solver": Policy(Refusing(), kit.CharTokenizer())}
    with pytest.raises(ValueError, match="empty prompt") as caught:
        await run_sample(kit.make_task(), 3, {"answer": broken}, policies, reraise=True)
    notes = "\n".join(caught.value.__notes__)
    assert "policy 'solver'" in notes
    assert "task 'sums/0', sample 3" in notes


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["reward", "metric"])
async def test_nan_fails_the_sample(kit: Any, value: float, where: str) -> None:
    async def scored(task: RolloutTask, policies: Mapping[str, PolicyHandle]) -> Outcome:
        turn = await policies["solver"].chat(task.prompt.messages)
        turn.reward = value if where == "reward" else 1.0
        return Outcome(metrics={"score": value if where == "metric" else 1.0})

    trajectory, _ = await roll(kit, scored)
    assert trajectory.status == "failed"
    assert trajectory.sequences == ()
    assert "ValueError" in trajectory.error


async def test_no_reward_masks(kit: Any) -> None:
    async def unscored(task: RolloutTask, policies: Mapping[str, PolicyHandle]) -> Outcome:
        await policies["solver"].chat(task.prompt.messages)
        return Outcome()

    trajectory, _ = await roll(kit, unscored)
    assert trajectory.status == "ok"
    assert trajectory.sequences[0].reward is None


async def test_a_hung_sample_times_out_and_its_generation_is_aborted(kit: Any) -> None:
    trajectory, engine = await roll(kit, answer, seconds=0.05, token_s=3600)
    assert trajectory.status == "timed_out"
    assert trajectory.sequences == ()
    assert engine.aborted == 1
    assert engine.running == 0


async def test_cancelling_the_caller_cancels_the_rollout(kit: Any) -> None:
    with anyio.move_on_after(0.05) as scope:
        await roll(kit, answer, token_s=3600)
    assert scope.cancelled_caught


async def test_an_unknown_workflow_names_the_nearest(kit: Any) -> None:
    task = kit.make_task(workflow="anser")
    trajectory = await run_sample(task, 0, {"answer": answer}, {})
    assert trajectory.status == "failed"
    assert "did you mean 'answer'" in trajectory.error


async def test_a_workflow_can_say_what_people_read(kit: Any) -> None:
    async def told(task: RolloutTask, policies: Mapping[str, PolicyHandle]) -> Outcome:
        await policies["solver"].chat(task.prompt.messages)
        return Outcome(messages=(Message("tool", "done"),))

    assert (await roll(kit, told))[0].messages == (Message("tool", "done"),)


async def test_a_cancellation_that_nobody_asked_for_is_the_workflows_failure(kit: Any) -> None:
    async def stumbles(task: RolloutTask, policies: Mapping[str, PolicyHandle]) -> Outcome:
        tool = asyncio.create_task(asyncio.sleep(60))
        tool.cancel()
        await tool
        return Outcome()

    trajectory, _ = await roll(kit, stumbles)
    assert trajectory.status == "failed"
    assert "waited for something that was cancelled" in trajectory.error
