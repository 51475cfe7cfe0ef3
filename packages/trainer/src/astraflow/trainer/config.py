"""How training is configured: typed structs with their defaults, and what of it cannot be run.

Invariant: a configuration that passed `check` can be trained with; `check` names the field and the reason.
"""

from __future__ import annotations

from typing import Literal

import msgspec

LOSS_NAMES = ("m2po", "ppo", "grpo", "gspo", "sapo", "cispo")
"""The losses that come with this package; `package.module:function` names one of the user's own."""


class LossConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The policy loss."""

    name: str = "m2po"
    """m2po, ppo, grpo, gspo, sapo, cispo, or package.module:function."""
    m2_threshold: float = 0.01
    """M2PO's tau: bound on the mean squared log-ratio of tokens that move with their advantage."""
    clip_low: float = 0.2
    """The probability ratio's range begins at 1 - this (m2po finds its own; gspo wants about 3e-4)."""
    clip_high: float = 0.28
    """The probability ratio's range ends at 1 + this (grpo: 1 + clip_low)."""
    dual_clip: float = 0.0
    """Bounds the loss of negative advantages at this many times the advantage (0: off)."""
    sapo_positive: float = 1.0
    """SAPO's temperature of the soft gate where the advantage is positive."""
    sapo_negative: float = 1.05
    """SAPO's temperature of the soft gate where the advantage is negative."""
    aggregate: Literal["auto", "tokens", "sequences", "constant"] = "auto"
    """Mean over tokens, over sequences' means, or a sum over a constant; auto: as the loss was published."""
    aggregate_tokens: int = 1024
    """The constant that each sequence's sum is divided by (aggregate constant)."""
    proximal: bool = False
    """The ratio is to log-probabilities recomputed before the batch's first step (decoupled PPO)."""
    correction: Literal["full", "truncate", "mask", "none"] = "full"
    """How exp(proximal - behaviour) weighs a token (with proximal): as it is, cut off (TIS), 0 outside (IcePop)."""
    correction_low: float = 0.5
    """Below this a token is masked (correction mask)."""
    correction_high: float = 2.0
    """Above this a weight is cut off or masked."""
    reject_low: float = 0.0
    """A sequence whose mean exp(proximal - behaviour) (geometric) is below this is not trained."""
    reject_high: float = 0.0
    """A sequence whose mean exp(proximal - behaviour) (geometric) is above this is not trained (0: no bound)."""
    kl: float = 0.001
    """Weight of the divergence from the reference policy (0: no reference is loaded)."""
    kl_estimate: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence, per token."""
    kl_in_reward: bool = False
    """The divergence is taken off the reward, token by token, instead of being a loss."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""


class AdvantageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How rewards become advantages."""

    estimator: Literal["group", "leave_one_out", "reward", "gae"] = "group"
    """Reward against its group's mean, against the others' mean, as it is, or generalised advantage estimation."""
    std: bool = True
    """group: divide by the group's standard deviation + 1e-5 (false: Dr. GRPO)."""
    batch: Literal["tokens", "sequences", "none"] = "tokens"
    """Then shifted and scaled to mean 0 and deviation 1 over the batch's trained tokens or its sequences."""
    gamma: float = 1.0
    """gae: discount of a token's future."""
    lam: float = 0.95
    """gae: lambda, 1 for whole returns, 0 for one step."""


class OptimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW on fp32 master weights, linear warm-up, then a schedule."""

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
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after that, to `lr_end` at `schedule_steps`."""
    schedule_steps: int = 0
    """Optimiser steps, warm-up included, after which the learning rate stays (linear, cosine)."""
    lr_end: float = 0.0
    """Learning rate at the end of the schedule."""


class CriticConfig(OptimConfig, frozen=True, kw_only=True):
    """A value model beside the policy, for gae."""

    enabled: bool = False
    """Train one (gae without it takes every value as 0)."""
    clip: float = 0.2
    """A value moves at most this far from what it was at the batch's start (0: unbounded)."""


class TrainerConfig(OptimConfig, frozen=True, kw_only=True):
    """How one policy is trained."""

    backend: str = "torch"
    """Name of the trainer (entry-point group astraflow.trainers)."""
    loss: LossConfig = LossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    processes: int = 1
    """Processes that train one policy together (torchrun, FSDP2); more than one only with --split."""
    minibatches: int = 4
    """Optimiser steps per batch."""
    micro_tokens: int = 2048
    """Tokens of one forward pass, packed without padding."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the arithmetic and of the published weights; master weights are fp32."""
    checkpoint_every: int = 10
    """Versions between checkpoints (0: only at the end)."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    keep_best: str = ""
    """Keep also the one with the highest value of this metric of its step (reward_mean, …)."""
    anchor_every: int = 10
    """Versions between full publications; the others are deltas."""


def check(config: TrainerConfig) -> None:
    """Refuse what contradicts itself.

    Raises:
        ValueError: naming the field, as `loss.name`, and the reason.
    """
    loss, advantage = config.loss, config.advantage
    if loss.name not in LOSS_NAMES and ":" not in loss.name:
        raise ValueError(f"loss.name {loss.name!r} is none of {', '.join(LOSS_NAMES)} and no package.module:function")
    if not 0 <= loss.clip_low <= 1 or loss.clip_high < 0:
        raise ValueError(
            f"loss.clip_low {loss.clip_low} must be in [0, 1], loss.clip_high {loss.clip_high} not below 0"
        )
    if loss.dual_clip and loss.dual_clip <= 1:
        raise ValueError(
            f"loss.dual_clip {loss.dual_clip} would remove every negative advantage; above 1, or 0 for off"
        )
    if min(loss.kl, loss.entropy, loss.m2_threshold) < 0 or min(loss.sapo_positive, loss.sapo_negative) <= 0:
        raise ValueError("loss.kl, loss.entropy and loss.m2_threshold are not negative, SAPO's temperatures above 0")
    if loss.aggregate == "constant" and loss.aggregate_tokens < 1:
        raise ValueError(f"loss.aggregate_tokens {loss.aggregate_tokens} must be above 0")
    ordered = loss.reject_low >= 0 and (not loss.reject_high or loss.reject_low < loss.reject_high)
    if not 0 <= loss.correction_low < loss.correction_high or not ordered:
        raise ValueError("loss.correction_low and loss.reject_low must be below loss.correction_high and reject_high")
    rejects = loss.reject_low > 0 or loss.reject_high > 0
    if not loss.proximal and (loss.correction != "full" or rejects):
        raise ValueError("loss.correction and loss.reject_low/high compare with loss.proximal: set that too")
    if loss.kl_in_reward and not loss.kl:
        raise ValueError("loss.kl_in_reward needs a loss.kl above 0")
    for name, optim in (("", config), ("critic.", config.critic)):
        if optim.schedule != "constant" and optim.schedule_steps <= optim.warmup_steps:
            raise ValueError(f"{name}schedule_steps {optim.schedule_steps} must be above {name}warmup_steps")
    if config.critic.enabled and advantage.estimator != "gae":
        raise ValueError(f"critic.enabled: the estimator {advantage.estimator!r} uses no values; set gae or no critic")
    if not 0 <= advantage.gamma <= 1 or not 0 <= advantage.lam <= 1:
        raise ValueError("advantage.gamma and advantage.lam must be in [0, 1]")
