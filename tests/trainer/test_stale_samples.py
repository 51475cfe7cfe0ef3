"""What the dataflow says of stale samples is honoured: their weight, and the range of their importance ratio."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from astraflow.dataflow import TrainBatch, TrainSample
from astraflow.trainer import BadBatch, LossConfig, PolicySpec, TrainerConfig
from astraflow.trainer.batch import examples
from astraflow.trainer.torch_backend import TorchBackend

CONFIG = TrainerConfig(loss=LossConfig(kl=0.0), dtype="float32")


def gradients(spec: PolicySpec, batch: TrainBatch, budget: int = 4096) -> tuple[torch.Tensor, int]:
    """The gradients of the batch as one mini-batch, and how many tokens have none."""
    backend = TorchBackend(spec, CONFIG)
    record = backend.gradients(examples(batch, "p", 61), budget)
    return torch.cat([g.flatten() for g in backend.learner.gradients().values()]), int(record.clipped.sum())


def with_half(batch: TrainBatch, **fields: object) -> TrainBatch:
    """The batch with these fields in every other sample."""
    replace = msgspec.structs.replace
    samples = (replace(s, **fields) if i % 2 else s for i, s in enumerate(batch.samples))
    return replace(batch, samples=tuple(samples))


@pytest.mark.parametrize("budget", [4096, 20])
def test_tokens_outside_their_samples_range_have_no_loss(
    spec: PolicySpec, make_batch: Callable[..., TrainBatch], budget: int
) -> None:
    batch = make_batch()
    plain, _ = gradients(spec, batch)
    assert torch.equal(gradients(spec, with_half(batch, ratio_range=(0.0, 1e9)))[0], plain)
    weightless, _ = gradients(spec, with_half(batch, weight=0.0))
    outside, clipped = gradients(spec, with_half(batch, ratio_range=(1.0, 1.0)), budget)
    assert clipped >= sum(int(s.sequence.loss_mask.numpy().sum()) for s in batch.samples[1::2])
    assert (outside - weightless).norm() <= 1e-5 * weightless.norm()
    assert (outside - plain).norm() > 0.1 * plain.norm()


def test_a_range_without_1_is_refused(spec: PolicySpec, make_sample: Callable[..., TrainSample]) -> None:
    sample = msgspec.structs.replace(make_sample([5, 6], [7, 2]), ratio_range=(1.1, 2.0))
    batch = TrainBatch(batch_id="b", model_id="p", version=0, samples=(sample,))
    with pytest.raises(BadBatch, match=r"the ratio's range \(1.1, 2.0\) does not contain 1"):
        TorchBackend(spec, CONFIG).step(batch)
