"""math-multi-agent: a solver and a verifier learn sums together, each with weights of its own.

The solver answers, the verifier recomputes and accepts or rejects, a rejected solver tries once more. Problems come
from the reasoning-gym library; held-out problems are never trained on.
"""

from __future__ import annotations

import msgspec

from astraflow.dataflow import EvalSuite
from astraflow.trainer import LossConfig, TrainerConfig

from .config import EvalConfig, PolicyConfig, RolloutConfig
from .math_tasks import MathTask, held_out_prompts, with_claims
from .recipe import Headline, Recipe
from .sums import SOLVER, SumsConfig, SumsParts, greedy

WORKFLOWS = "astraflow.recipes.math_workflows"


class MathConfig(SumsConfig, frozen=True, kw_only=True):
    """Solver and verifier learn sums."""


class MathParts(SumsParts):
    """Prompts and evaluations of the recipe."""

    def suites(self, config: SumsConfig, /) -> list[EvalSuite]:
        n = config.eval.problems
        if n == 0:
            return []
        problems = tuple(held_out_prompts(config.task, n))
        reworded = tuple(held_out_prompts(msgspec.structs.replace(config.task, wording="other"), n))
        sampling = greedy(config)
        return [
            EvalSuite(name="solver", prompts=problems, workflow="solver_only", n_samples=1, sampling=sampling),
            EvalSuite(name="reworded", prompts=reworded, workflow="solver_only", n_samples=1, sampling=sampling),
            EvalSuite(name="team", prompts=problems, workflow="solver_verifier", n_samples=1, sampling=sampling),
            EvalSuite(
                name="verifier",
                prompts=tuple(with_claims(problems)),
                workflow="verify_claim",
                n_samples=1,
                sampling=sampling,
            ),
        ]


HEADLINES = (
    SOLVER,
    Headline(title="solver, lenient parser", suite="solver", metric="solver_lenient"),
    Headline(title="solver, other wording", suite="reworded", metric="solver_correct"),
    Headline(title="solver, other wording, lenient", suite="reworded", metric="solver_lenient"),
    Headline(title="solver + verifier", suite="team", metric="final_correct"),
    Headline(title="verifier, balanced claims", suite="verifier", metric="verifier_correct"),
    Headline(title="verifier, lenient parser", suite="verifier", metric="verifier_lenient"),
)

LAPTOP = MathConfig(
    steps=16,
    policies={
        "solver": PolicyConfig(batch_size=96, max_new_tokens=4),
        "verifier": PolicyConfig(batch_size=96, max_new_tokens=4),
    },
    trainer=TrainerConfig(lr=1e-5, loss=LossConfig(name="m2po", kl=0.001)),
)

TINY = MathConfig(
    steps=7,
    policies={
        "solver": PolicyConfig(model="package:tiny", batch_size=128, max_new_tokens=4),
        "verifier": PolicyConfig(model="package:tiny", batch_size=128, max_new_tokens=4),
    },
    rollout=RolloutConfig(max_context=96, max_running=64, capacity=64),
    trainer=TrainerConfig(lr=3e-4, loss=LossConfig(name="m2po", kl=0.001), checkpoint_every=5),
    eval=EvalConfig(problems=200),
    task=MathTask(digits=(2, 2), reversed_digits=True),
)

GPU = MathConfig(
    steps=100,
    policies={
        "solver": PolicyConfig(batch_size=256, max_new_tokens=4),
        "verifier": PolicyConfig(batch_size=256, max_new_tokens=4),
    },
    rollout=RolloutConfig(capacity=256, max_running=256),
    trainer=TrainerConfig(lr=2e-5, micro_tokens=16384, loss=LossConfig(name="m2po", kl=0.001)),
)

RECIPE: Recipe[MathConfig] = Recipe(
    name="math-multi-agent",
    summary="a solver and a verifier learn sums together (Solver + Verifier workflow)",
    parts=MathParts(),
    presets={"laptop": LAPTOP, "tiny": TINY, "gpu": GPU},
    default_preset="laptop",
    gpu_preset="gpu",
    workflow="solver_verifier",
    workflows={
        name: f"{WORKFLOWS}:{function}"
        for name, function in {
            "solver_verifier": "solver_verifier",
            "solver_only": "solver_only",
            "verify_claim": "verify_claim",
        }.items()
    },
    suites=("solver", "reworded", "team", "verifier"),
    headlines=HEADLINES,
    view_metrics=("solver_correct", "final_correct", "claim_correct"),
)
