"""What a training step reports: figures per token while it runs, means at its end.

Invariant: a figure that has no tokens to be taken over is left out, never reported as 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog
import torch
from torch import Tensor

from .batch import Example
from .columns import Columns
from .hardware import peak_flops, peak_memory
from .losses import RatioRange
from .mismatch import mismatch

log = structlog.get_logger(__name__)

UNSET_RANGE = RatioRange(1.0, 1.0, 0.0)


@dataclass(slots=True)
class MinibatchRecord:
    """One optimiser step, per trained token [N] in the order of the samples, `table` being its columns. `logprobs` and
    `entropy` are the trainer's before the step; `kl` is to the reference; `value_loss` the critic's."""

    table: Columns
    logprobs: Tensor
    entropy: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor
    range: RatioRange = UNSET_RANGE
    loss: float = 0.0
    value_loss: float | None = None
    grad_norm: float = math.nan
    forward_tokens: int = 0

    @classmethod
    def empty(cls, table: Columns) -> MinibatchRecord:
        zeros = [torch.zeros_like(table.old) for _ in range(5)]
        logprobs, entropy, ratio, clipped, kl = zeros
        return cls(table, logprobs, entropy, ratio, clipped, kl)


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

    def metrics(self, samples: Sequence[Example], table: Columns, received: int, lr: float) -> dict[str, float]:
        """Means over the batch's trained tokens, except where the name says otherwise.

        `mismatch_*`: |trainer's - behaviour's log-probability| before any update, over tokens of the current version
        (engine and trainer then hold the same weights): of the first mini-batch, or of the whole batch where proximal
        log-probabilities were made; `mismatch_share` of them differ by more than `mismatch.BOUND`;
        `mismatch_all_mean` over tokens of every version. `ratio_*`, `clip_*`: see `losses`. `effective_samples`:
        samples with an advantage, times Kish's (sum w)^2 / (n sum w^2) over token ratios w. `sharing`: tokens of the
        sequences per token forwarded. `loss`, `m2`, `clip_low`, `clip_high` and `grad_norm` are means over
        mini-batches; `skipped` counts mini-batches without an update.
        """
        seconds = time.perf_counter() - self.started
        tokens = sum(example.tokens.size for example in samples)
        forwarded = sum(record.forward_tokens for record in self.records)
        norms = [record.grad_norm for record in self.records]
        finite = [norm for norm in norms if math.isfinite(norm)]
        staleness = (self.version - table.versions).float()
        values = {
            "loss": sum(record.loss for record in self.records) / len(self.records),
            "kl": float(self._all("kl").mean()),
            "kl_behaviour": float((table.behaviour - self._all("logprobs")).mean()),
            "entropy": float(self._all("entropy").mean()),
            "reward_mean": sum(example.reward for example in samples) / len(samples),
            "staleness": float(staleness.mean()),
            "staleness_min": float(staleness.min()),
            "staleness_max": float(staleness.max()),
            "samples": float(len(samples)),
            "masked": float(received - len(samples)),
            "tokens": float(len(table.old)),
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
        seconds_of = {f"seconds_{part}": spent for part, spent in self.seconds.items()}
        return values | self._ratios(table) | self._mismatch(table) | self._values(table) | seconds_of

    def cost(self, flops: float, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
        """What the step cost: `flops` of model arithmetic a second, `mfu` as a share of what a large matrix product
        reaches on this device, `peak_memory` in bytes."""
        seconds = time.perf_counter() - self.started
        return {
            "flops_per_s": flops / seconds,
            "mfu": flops / seconds / peak_flops(device.type, dtype),
            "peak_memory": float(peak_memory(device)),
        }

    def _ratios(self, table: Columns) -> dict[str, float]:
        ratio, advantages = self._all("ratio").double(), table.advantages
        with_advantage = int((advantages.abs() > 0).sum()) / len(advantages) * len(table.lengths)
        return {
            "ratio_mean": float(ratio.mean()),
            "ratio_min": float(ratio.min()),
            "ratio_max": float(ratio.max()),
            "ratio_std": float(ratio.std(correction=0)),
            "clip_share": float(self._all("clipped").mean()),
            "clip_low": sum(record.range.low for record in self.records) / len(self.records),
            "clip_high": sum(record.range.high for record in self.records) / len(self.records),
            "m2": sum(record.range.second_moment for record in self.records) / len(self.records),
            "advantage_mean": float(advantages.mean()),
            "advantage_std": float(advantages.std(correction=0)),
            "effective_samples": with_advantage * float(ratio.sum() ** 2 / (len(ratio) * ratio.square().sum())),
        }

    def _mismatch(self, table: Columns) -> dict[str, float]:
        first = self.records[0]
        proximal = table.old is not table.behaviour
        logprobs = table.old if proximal else first.logprobs
        engine, versions = table.behaviour[: len(logprobs)], table.versions[: len(logprobs)]
        values = {"mismatch_all_mean": float((logprobs - engine).abs().mean())}
        if proximal:
            values |= {
                "correction_mean": float(table.weights.mean()),
                "correction_masked": float(table.masked.float().mean()),
                "correction_rejected": float(table.rejected.float().mean()),
            }
        current = versions == self.version
        found = mismatch(logprobs.cpu()[current].numpy(), engine.cpu()[current].numpy())
        if found is None:
            return values
        if found.cause:
            log.warning(
                "engine and trainer disagree",
                share=round(found.share, 3), mean=round(found.mean, 3), max=round(found.max, 3), likely=found.cause,
            )  # fmt: skip
        return values | {
            "mismatch_mean": found.mean, "mismatch_max": found.max, "mismatch_share": found.share,
        }  # fmt: skip

    def _values(self, table: Columns) -> dict[str, float]:
        if table.values is None:
            return {}
        losses = [record.value_loss for record in self.records if record.value_loss is not None]
        spread = table.returns.var(correction=0)
        unexplained = (table.returns - table.values).var(correction=0)
        return {
            "value_loss": sum(losses) / len(losses),
            "value_mean": float(table.values.mean()),
            "explained_variance": float(1 - unexplained / spread) if float(spread) else 0.0,
        }

    def _all(self, name: str) -> Tensor:
        return torch.cat([getattr(record, name) for record in self.records])
