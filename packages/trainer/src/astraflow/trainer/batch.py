"""From a `TrainBatch` off the wire to the examples that packing and losses work on.

Invariant: after `examples` nothing downstream validates again: ids are inside the vocabulary, at least one token of
every example is trained, numbers are finite, and samples without a reward are gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from astraflow.dataflow import TrainBatch, TrainSample

from .advantages import advantages
from .interface import AdvantageConfig, BadBatch


@dataclass(frozen=True, slots=True)
class Example:
    """One rewarded sequence. `trained` int64 [K] are ascending positions >= 1 into `tokens` int64 [L]; `logprobs`
    float32 [K] and `versions` int32 [K] are the behaviour policy's, of those tokens."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: float
    advantage: float
    reward: float
    weight: float
    group_id: str


def examples(batch: TrainBatch, model_id: str, vocab_size: int, config: AdvantageConfig) -> list[Example]:
    """The batch's samples that have a reward, in order, with their advantages.

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
    values = advantages(
        config,
        np.array([sample.sequence.reward for sample in kept], np.float64),
        np.array([sample.group_mean for sample in kept], np.float64),
        np.array([sample.group_std for sample in kept], np.float64),
        np.array([sample.group_size for sample in kept], np.int64),
        np.array([sample.sequence.loss_mask.numpy().sum() for sample in kept], np.int64),
    )
    return [_example(sample, float(value)) for sample, value in zip(kept, values, strict=True)]


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


def _example(sample: TrainSample, advantage: float) -> Example:
    sequence = sample.sequence
    trained = np.flatnonzero(sequence.loss_mask.numpy())
    assert sequence.reward is not None
    return Example(
        tokens=sequence.tokens.numpy().astype(np.int64),
        trained=trained,
        logprobs=sequence.logprobs.numpy()[trained],
        versions=sequence.versions.numpy()[trained],
        temperature=sequence.temperature,
        advantage=advantage,
        reward=sequence.reward,
        weight=sample.weight,
        group_id=sample.group_id,
    )
