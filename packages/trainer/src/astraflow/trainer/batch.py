"""From a `TrainBatch` off the wire to the examples that packing and losses work on.

Invariant: after `examples` nothing downstream validates again: ids are inside the vocabulary, at least one token of
every example is trained, numbers are finite, and samples without a reward are gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from astraflow.dataflow import TrainBatch, TrainSample

from .interface import BadBatch


@dataclass(frozen=True, slots=True)
class Example:
    """One rewarded sequence. `trained` int64 [K] are ascending positions >= 1 into `tokens` int64 [L]; `logprobs`
    float32 [K] and `versions` int32 [K] are the behaviour policy's, of those tokens; `group_*` are its group's reward
    statistics, `weight` multiplies its loss, and tokens whose ratio to the behaviour policy leaves `ratio_range` have
    none."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: float
    reward: float
    group_mean: float
    group_std: float
    group_size: int
    weight: float
    group_id: str
    ratio_range: tuple[float, float] | None = None


def examples(batch: TrainBatch, model_id: str, vocab_size: int) -> list[Example]:
    """The batch's samples that have a reward, in order.

    Raises:
        BadBatch: the batch is for another model, malformed, or nothing in it can be trained.
    """
    if batch.model_id != model_id:
        raise BadBatch(f"batch {batch.batch_id} is for {batch.model_id!r}, this trainer trains {model_id!r}")
    for sample in batch.samples:
        _check(batch.batch_id, sample, vocab_size)
    kept = [sample for sample in batch.samples if sample.sequence.reward is not None]
    kept = [sample for sample in kept if sample.sequence.loss_mask.numpy().any()]
    if not kept:
        raise BadBatch(f"batch {batch.batch_id}: none of {len(batch.samples)} samples has a reward and a trained token")
    return [_example(sample) for sample in kept]


def _check(batch_id: str, sample: TrainSample, vocab_size: int) -> None:
    sequence, where = sample.sequence, f"batch {batch_id}, sample {sample.sample_id}"
    try:
        sequence.check()
    except ValueError as error:
        raise BadBatch(f"{where}: {error}") from error
    largest = int(sequence.tokens.numpy().max())
    if largest >= vocab_size:
        raise BadBatch(f"{where}: token id {largest}, the vocabulary has {vocab_size}")
    if not sequence.temperature > 0:
        raise BadBatch(f"{where}: sampled at temperature {sequence.temperature}; only > 0 can be trained")
    if not np.isfinite([sample.group_mean, sample.group_std, sample.weight]).all():
        raise BadBatch(f"{where}: group statistics or weight are not finite")
    if sample.ratio_range is not None and not 0 <= sample.ratio_range[0] <= 1 <= sample.ratio_range[1]:
        raise BadBatch(f"{where}: the ratio's range {sample.ratio_range} does not contain 1")


def _example(sample: TrainSample) -> Example:
    sequence = sample.sequence
    trained = np.flatnonzero(sequence.loss_mask.numpy())
    assert sequence.reward is not None
    return Example(
        tokens=sequence.tokens.numpy().astype(np.int64),
        trained=trained,
        logprobs=sequence.logprobs.numpy()[trained],
        versions=sequence.versions.numpy()[trained],
        temperature=sequence.temperature,
        reward=sequence.reward,
        group_mean=sample.group_mean,
        group_std=sample.group_std,
        group_size=sample.group_size,
        weight=sample.weight,
        group_id=sample.group_id,
        ratio_range=sample.ratio_range,
    )
