"""The trainer's contract: what a backend is, so that another can take its place, and how training is configured.

The loop (`train`) owns the order of things: attach, get batch, step, publish, report, checkpoint, commit. A backend
owns the model, the optimiser and the arithmetic. Invariants a backend keeps:

* gradients do not depend on how a mini-batch is packed or split;
* log-probabilities are taken at the temperature the tokens were sampled with;
* a step with non-finite gradients changes nothing and is reported (`skipped`); the version still advances.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from astraflow.dataflow import TrainBatch

LossName = Literal["m2po", "ppo", "grpo"]


class LossConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The policy loss.

    `m2_threshold` is M2PO's tau; `clip_low`/`clip_high` the PPO range 1 - low, 1 + high; `dual_clip` bounds the
    loss of negative advantages (0: off); `kl` weighs the k3 estimate against the reference policy.
    """

    name: LossName = "m2po"
    m2_threshold: float = 0.01
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0
    kl: float = 0.001


class AdvantageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`group`: (r - mean)/(std + 1e-5) within the group; `batch`: then normalised over the batch's trained tokens."""

    group: bool = True
    batch: bool = True


class OptimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW on fp32 master weights, linear warm-up over `warmup_steps` optimiser steps, then constant."""

    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    warmup_steps: int = 0


class TrainerConfig(OptimConfig, frozen=True, kw_only=True):
    """How one policy is trained.

    `minibatches` optimiser steps are made per batch; `micro_tokens` bounds the tokens of one forward pass (packed,
    without padding). `checkpoint_every` counts versions (0: only at the end).
    """

    backend: str = "torch"
    loss: LossConfig = LossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    minibatches: int = 4
    micro_tokens: int = 2048
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    checkpoint_every: int = 10
    keep_checkpoints: int = 2
    anchor_every: int = 10


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One policy to train: `model` and `reference` are local Hugging Face directories; `directory` is where its
    checkpoints go."""

    model_id: str
    model: str
    directory: str
    reference: str | None = None
    device: str = "cpu"
    seed: int = 0
    threads: int = 1


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics` by name: loss, grad_norm, ratio_mean, ratio_max, clip_share, m2, kl, entropy, mismatch_mean,
    mismatch_max, advantage_mean, reward_mean, tokens, tokens_per_s, skipped …"""

    metrics: dict[str, float]


class BadBatch(Exception):
    """A batch that cannot be trained (empty, wrong model, token ids beyond the vocabulary); nothing changed."""


class TrainerBackend(Protocol):
    """One policy's model and optimiser. Constructed from (`PolicySpec`, `TrainerConfig`); an entry point of the
    group `astraflow.trainers`. All methods block and are called from one thread at a time, never the event loop's."""

    def __init__(self, spec: PolicySpec, config: TrainerConfig, /) -> None: ...

    def step(self, batch: TrainBatch, /) -> StepResult:
        """Train one batch (all its mini-batches). Raises BadBatch."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """The weights to publish, Hugging Face names -> tensors in the published dtype (bf16, or fp32 if the model
        is trained in fp32). Valid until the next `step`."""
        ...

    def save(self, directory: Path, /) -> None:
        """Write model, optimiser, schedule and RNG into an existing empty directory."""
        ...

    def load(self, directory: Path, /) -> None:
        """Go back to exactly what `save` wrote."""
        ...

    def export(self, directory: Path, /) -> None:
        """Write a Hugging Face directory (weights, configuration, tokenizer) that AutoModelForCausalLM loads."""
        ...
