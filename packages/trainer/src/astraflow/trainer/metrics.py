"""What a training step reports: figures per token while it runs, means at its end.

Invariant: a figure that has no tokens to be taken over is left out, never reported as 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .batch import Example
from .losses import RatioRange

UNSET_RANGE = RatioRange(1.0, 1.0, 0.0)


@dataclass(slots=True)
class MinibatchRecord:
    """One optimiser step, per trained token [N] in the order of the samples. `old` are the behaviour policy's
    log-probabilities, `logprobs` the trainer's before the step; `kl` is to the reference."""

    old: Tensor
    advantages: Tensor
    versions: Tensor
    logprobs: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor
    range: RatioRange = UNSET_RANGE
    loss: float = 0.0
    grad_norm: float = math.nan
    forward_tokens: int = 0

    @classmethod
    def empty(cls, old: Tensor, advantages: Tensor, versions: Tensor) -> MinibatchRecord:
        zeros = [torch.zeros_like(old) for _ in range(5)]
        logprobs, entropy, ratio, clipped, kl = zeros
        return cls(old, advantages, versions, logprobs, entropy, ratio, clipped, kl)


@dataclass(slots=True)
class StepRecord:
    """One batch: its mini-batches' records and where the seconds went. `version` is the one the batch was cut at."""

    version: int
    records: list[MinibatchRecord] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def minibatch(self, record: MinibatchRecord) -> None:
        self.records.append(record)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to `part`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def metrics(self, samples: Sequence[Example], received: int, lr: float) -> dict[str, float]:
        """Means over the batch's trained tokens, except where the name says otherwise.

        `mismatch_*`: |trainer's - behaviour's log-probability| in the first mini-batch, before any update, over
        tokens of the current version (engine and trainer then hold the same weights); `mismatch_all_mean` over all
        of its tokens. `sharing`: tokens of the sequences per token forwarded. `loss`, `m2`, `clip_low`, `clip_high`
        and `grad_norm` are means over mini-batches; `skipped` counts mini-batches without an update.
        """
        seconds = time.perf_counter() - self.started
        tokens = sum(example.tokens.size for example in samples)
        trained = sum(example.trained.size for example in samples)
        forwarded = sum(record.forward_tokens for record in self.records)
        ratio = self._all("ratio")
        norms = [record.grad_norm for record in self.records]
        finite = [norm for norm in norms if math.isfinite(norm)]
        staleness = np.concatenate([self.version - example.versions for example in samples])
        values = {
            "loss": sum(record.loss for record in self.records) / len(self.records),
            "ratio_mean": float(ratio.mean()),
            "ratio_max": float(ratio.max()),
            "clip_share": float(self._all("clipped").mean()),
            "clip_low": sum(record.range.low for record in self.records) / len(self.records),
            "clip_high": sum(record.range.high for record in self.records) / len(self.records),
            "m2": sum(record.range.second_moment for record in self.records) / len(self.records),
            "kl": float(self._all("kl").mean()),
            "kl_behaviour": float((self._all("old") - self._all("logprobs")).mean()),
            "entropy": float(self._all("entropy").mean()),
            "advantage_mean": float(self._all("advantages").mean()),
            "reward_mean": sum(example.reward for example in samples) / len(samples),
            "staleness": float(staleness.mean()),
            "staleness_max": float(staleness.max()),
            "samples": float(len(samples)),
            "masked": float(received - len(samples)),
            "tokens": float(trained),
            "sequence_tokens": float(tokens),
            "forward_tokens": float(forwarded),
            "sharing": tokens / forwarded,
            "tokens_per_s": tokens / seconds,
            "skipped": float(len(norms) - len(finite)),
            "lr": lr,
            "seconds": seconds,
        }
        if finite:
            values["grad_norm"] = sum(finite) / len(finite)
        return values | self._mismatch() | {f"seconds_{part}": spent for part, spent in self.seconds.items()}

    def _mismatch(self) -> dict[str, float]:
        first = self.records[0]
        difference = (first.logprobs - first.old).abs().cpu()
        current = difference[first.versions == self.version]
        values = {"mismatch_all_mean": float(difference.mean())}
        if current.numel():
            values |= {"mismatch_mean": float(current.mean()), "mismatch_max": float(current.max())}
        return values

    def _all(self, name: str) -> Tensor:
        return torch.cat([getattr(record, name) for record in self.records])
