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
    """The policy loss."""

    name: LossName = "m2po"
    """Surrogate: m2po, ppo or grpo."""
    m2_threshold: float = 0.01
    """M2PO's tau: bound on the mean squared log-ratio of tokens that move with their advantage."""
    clip_low: float = 0.2
    """PPO's range of the probability ratio begins at 1 - this."""
    clip_high: float = 0.28
    """PPO's range of the probability ratio ends at 1 + this."""
    dual_clip: float = 0.0
    """Bounds the loss of negative advantages at this many times the advantage (0: off)."""
    kl: float = 0.001
    """Weight of the divergence from the reference policy (k3 estimate; 0: no reference is loaded)."""


class AdvantageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How rewards become advantages."""

    group: bool = True
    """(reward - mean) / (std + 1e-5) within the group."""
    batch: bool = True
    """Then normalised over the batch's trained tokens."""


class OptimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW on fp32 master weights, linear warm-up, then constant."""

    lr: float = 1e-5
    """Learning rate."""
    beta1: float = 0.9
    """Decay of the gradients' mean."""
    beta2: float = 0.999
    """Decay of the gradients' square."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate rises from 0."""


class TrainerConfig(OptimConfig, frozen=True, kw_only=True):
    """How one policy is trained."""

    backend: str = "torch"
    """Name of the trainer (entry-point group astraflow.trainers)."""
    loss: LossConfig = LossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    minibatches: int = 4
    """Optimiser steps per batch."""
    micro_tokens: int = 2048
    """Tokens of one forward pass, packed without padding."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the arithmetic and of the published weights; master weights are fp32."""
    checkpoint_every: int = 10
    """Versions between checkpoints (0: only at the end)."""
    keep_checkpoints: int = 2
    """Checkpoints kept."""
    anchor_every: int = 10
    """Versions between full publications; the others are deltas."""


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One policy to train: `model` and `reference` are local Hugging Face directories; `directory` is where its
    checkpoints go."""

    model_id: str
    model: str
    directory: str
    reference: str | None = None
    device: str = "cpu"
    seed: int = 0


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
