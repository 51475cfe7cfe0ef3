"""Everything a batch's losses need, per trained token, as tensors: made once before the batch's first step.

Invariant: row n of every column is the same token: examples in order, tokens in order; so a mini-batch is a slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .advantages import Groups, normalized, token_advantages
from .batch import Example
from .config import AdvantageConfig, LossConfig
from .losses import bounded_ratio, correction, kl_estimate

TOKEN_COLUMNS = (
    "versions", "behaviour", "old", "advantages", "returns", "weights", "masked", "rejected", "reference", "values",
    "bounds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Columns:
    """A batch or mini-batch of S examples with N trained tokens.

    lengths int64 [S], samples float32 [S] (importance weights), versions int32 [N], on the CPU. On the model's device,
    float32 [N]: `behaviour` (the engine's log-probabilities), `old` (what the ratio is to: behaviour, or the trainer's
    before the batch), `advantages`, `weights` (correction, 1 without), `returns`, and where used `reference`
    (log-probabilities) and `values` (the critic's). masked, rejected bool [N]: see `losses.Correction`. `bounds`
    float32 [N, 2], if any example has them: the least and largest ratio to the behaviour policy of a token that counts.
    """

    lengths: Tensor
    samples: Tensor
    versions: Tensor
    behaviour: Tensor
    old: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor
    masked: Tensor
    rejected: Tensor
    reference: Tensor | None = None
    values: Tensor | None = None
    bounds: Tensor | None = None

    def cut(self, first: int, count: int) -> Columns:
        """Of examples `first` to `first` + `count`."""
        start = int(self.lengths[:first].sum())
        tokens = slice(start, start + int(self.lengths[first : first + count].sum()))
        examples = slice(first, first + count)
        parts: dict[str, Any] = {
            name: None if (column := getattr(self, name)) is None else column[tokens] for name in TOKEN_COLUMNS
        }
        return replace(self, lengths=self.lengths[examples], samples=self.samples[examples], **parts)

    def inside(self, logprobs: Tensor, index: Tensor) -> Tensor | None:
        """bool [M]: whether the ratio of each of the tokens `index`, whose log-probabilities are `logprobs` [M], is
        within its bounds; None where there are no bounds."""
        if self.bounds is None:
            return None
        ratio, bounds = bounded_ratio(logprobs.detach(), self.behaviour[index]), self.bounds[index]
        return (ratio >= bounds[:, 0]) & (ratio <= bounds[:, 1])

    def sequences(self) -> Tensor:
        """int64 [N]: which example a token belongs to, on the device."""
        ids = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        return ids.to(self.old.device)


def columns(
    examples: Sequence[Example],
    loss: LossConfig,
    advantage: AdvantageConfig,
    *,
    device: torch.device,
    reference: Tensor | None = None,
    proximal: Tensor | None = None,
    values: Tensor | None = None,
) -> Columns:
    """The columns of a batch. `reference`, `proximal` (log-probabilities) and `values` are float32 [N] or not there."""
    lengths = np.array([example.trained.size for example in examples], np.int64)
    behaviour = torch.cat([torch.from_numpy(example.logprobs) for example in examples]).to(device)
    old = behaviour if proximal is None else proximal
    groups = Groups.of(examples)
    penalties = None
    if loss.kl_in_reward and reference is not None:
        penalties = loss.kl * kl_estimate(loss.kl_estimate, old, reference).double().cpu().numpy()
    raw, returns = token_advantages(
        advantage,
        groups,
        lengths,
        values=None if values is None else values.double().cpu().numpy(),
        penalties=penalties,
    )
    flags = torch.zeros(len(behaviour), dtype=torch.bool, device=device)
    result = Columns(
        lengths=torch.from_numpy(lengths),
        samples=torch.tensor([example.weight for example in examples]),
        versions=torch.cat([torch.from_numpy(example.versions) for example in examples]),
        behaviour=behaviour,
        old=old,
        advantages=torch.from_numpy(normalized(advantage, raw, lengths)).float().to(device),
        returns=torch.from_numpy(returns).float().to(device),
        weights=torch.ones_like(behaviour),
        masked=flags,
        rejected=flags,
        reference=reference,
        values=values,
        bounds=_bounds(examples, torch.from_numpy(lengths), device),
    )
    if proximal is None:
        return result
    weights, masked, rejected = correction(proximal, behaviour, result.sequences(), loss)
    return replace(result, weights=weights, masked=masked, rejected=rejected)


def _bounds(examples: Sequence[Example], lengths: Tensor, device: torch.device) -> Tensor | None:
    if all(example.ratio_range is None for example in examples):
        return None
    ranges = torch.tensor([example.ratio_range or (0.0, math.inf) for example in examples])
    return ranges.repeat_interleave(lengths, dim=0).to(device)
