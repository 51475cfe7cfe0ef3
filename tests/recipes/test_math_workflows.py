from __future__ import annotations

from collections.abc import Sequence

import pytest

from astraflow.dataflow import FinishReason, Message, Prompt, RolloutTask
from astraflow.recipes.math_tasks import MathTask, make_prompt
from astraflow.recipes.math_workflows import solver_only, solver_verifier, verify_claim


class Said:
    def __init__(self, text: str, finish_reason: FinishReason) -> None:
        self.text = text
        self.finish_reason: FinishReason = finish_reason
        self.reward: float | None = None


class Script:
    """A policy that says what it was given, in order; `...` at an answer's end means that it ran out of budget."""

    def __init__(self, model_id: str, *answers: str) -> None:
        self.model_id = model_id
        self.answers = list(answers)
        self.asked: list[str] = []
        self.turns: list[Said] = []

    async def chat(
        self, messages: Sequence[Message], /, *, prefill: str = "", role: str = "", fresh: bool = False
    ) -> Said:
        assert fresh, "answers that are rewarded on their own need sequences of their own"
        assert role == self.model_id
        assert messages[0].role == "system"
        self.asked.append(messages[-1].content)
        answer = self.answers.pop(0)
        ended = not answer.endswith("...")
        self.turns.append(Said(prefill + answer.removesuffix("..."), "stop" if ended else "length"))
        return self.turns[-1]

    async def generate(self, prompt: Sequence[int], /, *, role: str = "", fresh: bool = False) -> Said:
        raise NotImplementedError

    @property
    def rewards(self) -> list[float | None]:
        assert not self.answers, "not all was asked for"
        return [turn.reward for turn in self.turns]


def task(claim: int | None = None, *, reversed_digits: bool = False) -> RolloutTask:
    prompt = make_prompt(MathTask(digits=(2, 2), reversed_digits=reversed_digits), "34 + 59", "train")
    if claim is not None:
        prompt = Prompt(
            prompt.id, prompt.source, prompt.messages, prompt.reference, {**prompt.metadata, "claim": claim}
        )
    return RolloutTask(
        task_id="t", prompt=prompt, workflow="solver_verifier", n_samples=1, sampling={}, seed=0, deadline_s=1
    )


async def play(task: RolloutTask, solver: Script, verifier: Script) -> dict[str, float]:
    return (await solver_verifier(task, {"solver": solver, "verifier": verifier})).metrics


async def test_a_right_answer_that_is_accepted_ends_it() -> None:
    solver, verifier = Script("solver", "93"), Script("verifier", "93")
    metrics = await play(task(), solver, verifier)
    assert (solver.rewards, verifier.rewards) == ([1.0], [1.0])
    assert solver.asked == ["What is 34 + 59?"]
    assert verifier.asked == ["What is 34 + 59? Claim: 93"]
    assert metrics == {
        "solver_correct": 1.0,
        "solver_lenient": 1.0,
        "final_correct": 1.0,
        "verifier_correct": 1.0,
        "retried": 0.0,
    }


async def test_a_rejected_answer_is_tried_once_more_and_each_answer_has_its_own_reward() -> None:
    solver, verifier = Script("solver", "83", "93"), Script("verifier", "93")
    metrics = await play(task(), solver, verifier)
    assert (solver.rewards, verifier.rewards) == ([0.0, 1.0], [1.0])
    assert solver.asked[1] == "What is 34 + 59? 83 is wrong."
    assert (metrics["solver_correct"], metrics["final_correct"], metrics["retried"]) == (0.0, 1.0, 1.0)


async def test_a_verdict_is_wrong_when_it_rejects_what_is_right_or_accepts_what_is_wrong() -> None:
    solver, verifier = Script("solver", "93", "83"), Script("verifier", "83")
    metrics = await play(task(), solver, verifier)
    assert (solver.rewards, verifier.rewards) == ([1.0, 0.0], [0.0])
    assert (metrics["solver_correct"], metrics["final_correct"]) == (1.0, 0.0)
    solver, verifier = Script("solver", "83"), Script("verifier", "83")
    metrics = await play(task(), solver, verifier)
    assert (solver.rewards, verifier.rewards, metrics["verifier_correct"]) == ([0.0], [0.0], 0.0)


@pytest.mark.parametrize("unreadable", ["93 is the...", "I do not know"])
async def test_an_unreadable_verdict_accepts_and_earns_nothing(unreadable: str) -> None:
    solver, verifier = Script("solver", "93"), Script("verifier", unreadable)
    metrics = await play(task(), solver, verifier)
    assert (solver.rewards, verifier.rewards) == ([1.0], [0.0])
    assert (metrics["retried"], metrics["final_correct"]) == (0.0, 1.0)


async def test_rambling_does_not_pay_and_is_not_judged() -> None:
    solver, verifier = Script("solver", "93 because..."), Script("verifier")
    metrics = await play(task(), solver, verifier)
    assert (solver.rewards, verifier.rewards) == ([0.0], [])
    assert metrics == {"solver_correct": 0.0, "solver_lenient": 1.0, "final_correct": 0.0, "retried": 0.0}


async def test_a_claim_in_the_prompt_is_what_the_verifier_is_trained_on() -> None:
    """The verdict on the solver's answer, right nearly always against a bad solver, is masked then."""
    solver, verifier = Script("solver", "83", "93"), Script("verifier", "93", "73")
    metrics = await play(task(claim=93), solver, verifier)
    assert verifier.asked == ["What is 34 + 59? Claim: 83", "What is 34 + 59? Claim: 93"]
    assert verifier.rewards == [None, 0.0]
    assert (metrics["verifier_correct"], metrics["claim_correct"], metrics["final_correct"]) == (1.0, 0.0, 1.0)


async def test_always_rejecting_earns_half_on_balanced_claims() -> None:
    rewards = []
    for claim in (93, 92):
        verifier = Script("verifier", "777")
        await verify_claim(task(claim), {"verifier": verifier})
        rewards += verifier.rewards
    assert rewards == [0.0, 1.0]


async def test_numbers_are_written_and_read_in_the_order_of_the_task() -> None:
    solver, verifier = Script("solver", "38", "39"), Script("verifier", "39", "39")
    metrics = await play(task(claim=93, reversed_digits=True), solver, verifier)
    assert (solver.rewards, verifier.rewards) == ([0.0, 1.0], [None, 1.0])
    assert verifier.asked == ["What is 34 + 59? Claim: 38", "What is 34 + 59? Claim: 39"]
    assert solver.asked[1] == "What is 34 + 59? 38 is wrong."
    assert metrics["final_correct"] == 1.0


async def test_the_evaluations_of_one_policy() -> None:
    solver = Script("solver", "93 and so on...")
    outcome = await solver_only(task(), {"solver": solver})
    assert outcome.metrics == {"solver_correct": 0.0, "solver_lenient": 1.0}
    verifier = Script("verifier", "so 93...")
    outcome = await verify_claim(task(93), {"verifier": verifier})
    assert outcome.metrics == {"verifier_correct": 0.0, "verifier_lenient": 1.0}
    with pytest.raises(ValueError, match="carries no claim"):
        await verify_claim(task(), {"verifier": Script("verifier")})


async def test_people_can_read_the_exchange() -> None:
    policies = {"solver": Script("solver", "83", "93"), "verifier": Script("verifier", "93")}
    outcome = await solver_verifier(task(), policies)
    assert [(m.name, m.content) for m in outcome.messages] == [
        ("", "What is 34 + 59?"),
        ("solver", "34 + 59 = 83"),
        ("verifier", "34 + 59 = 93 → rejects 83"),
        ("", "What is 34 + 59? 83 is wrong."),
        ("solver", "34 + 59 = 93"),
    ]
