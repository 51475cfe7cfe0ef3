"""Doing sums, as the recipes have it in common: configuration, training prompts, and the solver's held-out suite."""

from __future__ import annotations

from astraflow.dataflow import EvalSuite, ListSource, PromptSource, Sampling

from .config import RunConfig
from .math_tasks import MathTask, held_out_prompts, train_prompts
from .recipe import Headline


class SumsConfig(RunConfig, frozen=True, kw_only=True):
    """A run whose policies learn sums."""

    task: MathTask = MathTask()


def greedy(config: RunConfig) -> dict[str, Sampling]:
    """How every policy of the run samples in its evaluation."""
    return {
        name: Sampling(max_new_tokens=policy.max_new_tokens, temperature=0.0)
        for name, policy in config.policies.items()
    }


class SumsParts:
    """Training prompts, and how the solver alone does on held-out ones."""

    def source(self, config: SumsConfig, /) -> PromptSource:
        return ListSource(train_prompts(config.task, seed=config.seed), seed=config.seed)

    def suites(self, config: SumsConfig, /) -> list[EvalSuite]:
        problems = tuple(held_out_prompts(config.task, config.eval.problems))
        return [EvalSuite(name="solver", prompts=problems, workflow="solver_only", sampling=greedy(config))]


SOLVER = Headline(title="solver", suite="solver", metric="solver_correct")
SOLVER_ONLY = {"solver_only": "astraflow.recipes.math_workflows:solver_only"}
