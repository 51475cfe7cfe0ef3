"""Solver + Verifier on arithmetic: what the two policies say to each other, and what each is rewarded for.

The rule (published, see the function): a solver's answer is rewarded for being right; a verdict for matching whether
the claim it judged is right. Both policies compute: the answer opens with `34 + 5 = ` and the first number is read. The
verifier accepts a claim if it is the number that it finds itself. (A model of this size that is asked for yes or no
stays at chance.)

Invariant: rambling never pays. An answer that runs into its budget without its end token is unreadable: it earns 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from astraflow.dataflow import Message, Prompt, RolloutTask
from astraflow.raas import Outcome, PolicyHandle, Turn

from .scoring import first_integer, is_correct, last_integer, write_integer

SOLVER = "solver"
VERIFIER = "verifier"


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt of `math_tasks`, as the workflows use it."""

    messages: tuple[Message, ...]
    reference: str
    opening: str
    reversed_digits: bool
    claim: int | None

    @classmethod
    def of(cls, prompt: Prompt) -> Problem:
        claim = prompt.metadata.get("claim")
        return cls(
            messages=prompt.messages,
            reference=prompt.reference,
            opening=str(prompt.metadata.get("opening", "")),
            reversed_digits=bool(prompt.metadata.get("reversed_digits", False)),
            claim=None if claim is None else int(claim),
        )

    def with_remark(self, remark: str) -> tuple[Message, ...]:
        """The question with something added to its last message."""
        *before, last = self.messages
        return (*before, Message(last.role, f"{last.content} {remark}"))

    def write(self, value: int) -> str:
        return write_integer(value, reversed_digits=self.reversed_digits)


@dataclass(frozen=True, slots=True)
class Answer:
    """A policy's number: `value` None if it cannot be read; `lenient` is the last number, finished or not."""

    turn: Turn
    value: int | None
    lenient: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verifier's judgement of a claim. An unreadable one accepts, and is never right."""

    answer: Answer
    accepts: bool
    is_right: bool
    is_right_leniently: bool


async def solver_verifier(task: RolloutTask, policies: Mapping[str, PolicyHandle]) -> Outcome:
    """The solver answers, the verifier accepts or rejects, and on rejection the solver tries once more.

    Rewards: each answer of the solver, 1 if it is right, else 0, in a sequence of its own; the verifier, 1 if its
    verdict matches the correctness of the claim it judged, else 0. An unreadable verdict accepts and earns 0; an
    unreadable answer is not judged.

    What the verifier learns from: solvers are mostly wrong at first and mostly right at last, so a verifier rewarded
    on their answers alone could earn most by rejecting (later: accepting) everything. A training prompt therefore
    carries a claim, right in half of the problems, that the verifier judges too, in a sequence of its own, under the
    same rule. Where there is one, it alone is trained on and the verdict on the solver's answer is masked; all samples
    of a group then judge the same claim, as group statistics assume. Without a claim the verdict on the solver's
    answer is rewarded.

    Metrics: solver_correct, solver_lenient (last number, finished or not), final_correct, retried; where judged,
    verifier_correct (the solver's answer) and claim_correct (the prompt's claim).
    """
    problem = Problem.of(task.prompt)
    solver, verifier = policies[SOLVER], policies[VERIFIER]
    first = final = await _solve(solver, problem, problem.messages)
    said = [problem.messages[-1], _spoken(SOLVER, first)]
    metrics = _solver_metrics(first, problem)
    if first.value is not None:
        verdict = await _judge(verifier, problem, first.value)
        metrics["verifier_correct"] = float(verdict.is_right)
        said.append(_verdict_spoken(verdict, problem, first.value))
        if problem.claim is None:
            verdict.answer.turn.reward = float(verdict.is_right)
        if not verdict.accepts:
            feedback = problem.with_remark(feedback_remark(problem, first.value))
            final = await _solve(solver, problem, feedback)
            said += [feedback[-1], _spoken(SOLVER, final)]
    if problem.claim is not None:
        planted = await _judge(verifier, problem, problem.claim)
        planted.answer.turn.reward = float(planted.is_right)
        metrics["claim_correct"] = float(planted.is_right)
        said.append(_verdict_spoken(planted, problem, problem.claim))
    metrics["final_correct"] = float(is_correct(final.value, problem.reference))
    metrics["retried"] = float(final is not first)
    return Outcome(metrics=metrics, messages=tuple(said))


async def solver_only(task: RolloutTask, policies: Mapping[str, PolicyHandle]) -> Outcome:
    """The solver alone. Metrics: solver_correct, solver_lenient."""
    problem = Problem.of(task.prompt)
    answer = await _solve(policies[SOLVER], problem, problem.messages)
    return Outcome(metrics=_solver_metrics(answer, problem), messages=(problem.messages[-1], _spoken(SOLVER, answer)))


async def verify_claim(task: RolloutTask, policies: Mapping[str, PolicyHandle]) -> Outcome:
    """The verifier alone, on the claim in the prompt's metadata. Metrics: verifier_correct, verifier_lenient (its last
    number, finished or not).

    Raises:
        ValueError: the prompt carries no claim.
    """
    problem = Problem.of(task.prompt)
    if problem.claim is None:
        raise ValueError(f"prompt {task.prompt.id!r} carries no claim to verify: make it with with_claims()")
    verdict = await _judge(policies[VERIFIER], problem, problem.claim)
    verdict.answer.turn.reward = float(verdict.is_right)
    metrics = {"verifier_correct": float(verdict.is_right), "verifier_lenient": float(verdict.is_right_leniently)}
    return Outcome(metrics=metrics, messages=(_verdict_spoken(verdict, problem, problem.claim),))


def claim_remark(problem: Problem, claim: int) -> str:
    """What the verifier is told of a claim."""
    return f"Claim: {problem.write(claim)}"


def feedback_remark(problem: Problem, claim: int) -> str:
    """What the solver is told of a rejection; not the verifier's number, which it would learn to copy."""
    return f"{problem.write(claim)} is wrong."


async def _solve(solver: PolicyHandle, problem: Problem, messages: tuple[Message, ...]) -> Answer:
    answer = await _answer(solver, problem, messages, SOLVER)
    answer.turn.reward = float(is_correct(answer.value, problem.reference))
    return answer


async def _judge(verifier: PolicyHandle, problem: Problem, claim: int) -> Verdict:
    asked = problem.with_remark(claim_remark(problem, claim))
    answer = await _answer(verifier, problem, asked, VERIFIER)
    truth = is_correct(claim, problem.reference)
    accepts = answer.value is None or answer.value == claim
    return Verdict(
        answer=answer,
        accepts=accepts,
        is_right=answer.value is not None and accepts == truth,
        is_right_leniently=answer.lenient is not None and (answer.lenient == claim) == truth,
    )


async def _answer(policy: PolicyHandle, problem: Problem, messages: tuple[Message, ...], role: str) -> Answer:
    turn = await policy.chat(messages, prefill=problem.opening, role=role, fresh=True)
    text = turn.text.removeprefix(problem.opening)
    finished = turn.finish_reason == "stop"
    value = first_integer(text, reversed_digits=problem.reversed_digits) if finished else None
    return Answer(turn, value, last_integer(text, reversed_digits=problem.reversed_digits), turn.text)


def _solver_metrics(answer: Answer, problem: Problem) -> dict[str, float]:
    return {
        "solver_correct": float(is_correct(answer.value, problem.reference)),
        "solver_lenient": float(is_correct(answer.lenient, problem.reference)),
    }


def _spoken(name: str, answer: Answer) -> Message:
    return Message("assistant", answer.text, name)


def _verdict_spoken(verdict: Verdict, problem: Problem, claim: int) -> Message:
    word = "accepts" if verdict.accepts else "rejects"
    if verdict.answer.value is None:
        word += " (unreadable)"
    return Message("assistant", f"{verdict.answer.text} → {word} {problem.write(claim)}", VERIFIER)
