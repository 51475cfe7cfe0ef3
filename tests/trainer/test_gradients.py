"""Loss and gradients do not depend on packing, sharing or splitting, and equal those of rows of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from astraflow.dataflow import TrainBatch
from astraflow.trainer import AdvantageConfig, LossConfig, PolicySpec, TrainerConfig
from astraflow.trainer.batch import Example, examples
from astraflow.trainer.columns import columns
from astraflow.trainer.losses import LossInputs, load_loss, token_weights
from astraflow.trainer.torch_backend import TorchBackend

LOSSES = [
    LossConfig(kl=0.0),
    LossConfig(name="ppo", kl=0.0, dual_clip=3.0),
    LossConfig(name="grpo", kl=0.0),
    LossConfig(name="gspo", kl=0.0),
    LossConfig(name="sapo", kl=0.0),
    LossConfig(name="cispo", kl=0.0),
    LossConfig(name="ppo", kl=0.0, entropy=0.1, aggregate="constant", aggregate_tokens=4),
]


def config(loss: LossConfig) -> TrainerConfig:
    return TrainerConfig(loss=loss, dtype="float32")


def reference(directory: str, samples: list[Example], loss: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Each row through the library's own attention, one at a time, padded by nothing: log-probabilities, gradients."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    parts, entropies = [], []
    for sample in samples:
        logits = model(torch.from_numpy(sample.tokens)[None], use_cache=False).logits[0]
        table = torch.log_softmax(logits / sample.temperature, -1)
        rows = table[torch.from_numpy(sample.trained) - 1]
        entropies.append(-(rows.exp() * rows).sum(-1))
        parts.append(table[torch.from_numpy(sample.trained) - 1, torch.from_numpy(sample.tokens[sample.trained])])
    logprobs = torch.cat(parts)
    made = columns(samples, loss, AdvantageConfig(), device=torch.device("cpu"))
    function = load_loss(loss)
    bounds = function.range(logprobs.detach(), made.old, made.advantages)
    terms = function.tokens(LossInputs(logprobs, made.old, made.advantages, made.sequences()), bounds).loss
    terms = terms - loss.entropy * torch.cat(entropies)
    (terms * token_weights(made.lengths, made.samples, loss)).sum().backward()  # type: ignore[no-untyped-call]
    return logprobs.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.name}-{loss.aggregate}")
def test_any_split_gives_the_gradients_of_separate_rows(
    loss: LossConfig,
    tied: bool,
    make_model: Callable[..., Path],
    make_batch: Callable[..., TrainBatch],
) -> None:
    spec = PolicySpec(model_id="p", model=str(make_model(tied=tied)), directory="unused")
    backend = TorchBackend(spec, config(loss))
    samples = examples(make_batch(), "p", 61)
    logprobs, gradients = reference(spec.model, samples, loss)
    losses = []
    for budget, share in [(4096, True), (4096, False), (64, True), (64, False), (20, True), (1, True)]:
        record = backend.gradients(samples, budget, share=share)
        got = {name: tensor.clone() for name, tensor in backend.learner.gradients().items()}
        assert (record.logprobs - logprobs).abs().max() < 1e-4
        assert_same(got, gradients)
        losses.append(record.loss)
        backend.learner.forget()
    assert max(losses) - min(losses) <= 1e-5 * max(abs(losses[0]), 0.1)


def test_each_loss_clips_something_here(make_model: Callable[..., Path], make_batch: Callable[..., TrainBatch]) -> None:
    """Otherwise the test above would not see a range that differs between splits."""
    spec = PolicySpec(model_id="p", model=str(make_model()), directory="unused")
    samples = examples(make_batch(), "p", 61)
    for loss in (loss for loss in LOSSES if loss.name != "sapo"):  # which has no range
        record = TorchBackend(spec, config(loss)).gradients(samples)
        assert 0 < record.clipped.mean() < 1


def test_packed_rows_equal_separate_rows_in_float64(
    make_model: Callable[..., Path], make_batch: Callable[..., TrainBatch]
) -> None:
    from astraflow.trainer.model import Inputs, head_weight, load_model, micro_logprobs
    from astraflow.trainer.packing import micro_batches

    model = load_model(make_model(), dtype=torch.float64)
    samples = examples(make_batch(), "p", 61)
    results = []
    for share in (True, False):
        values = torch.zeros(sum(sample.trained.size for sample in samples))
        for micro in micro_batches(samples, 4096, share=share):
            inputs = Inputs.of(micro, torch.device("cpu"), torch.float64)
            with torch.no_grad():
                values[inputs.index] = micro_logprobs(model, head_weight(model), inputs)[0]
        results.append(values)
    # The library computes rotary embeddings and normalisation in fp32, so this is not 1e-12.
    assert (results[0] - results[1]).abs().max() < 1e-6


def test_bf16_gradients_are_near_the_fp32_ones(spec: PolicySpec, make_batch: Callable[..., TrainBatch]) -> None:
    samples = examples(make_batch(), "p", 61)
    loss = LossConfig(name="ppo", kl=0.0, clip_low=0.99, clip_high=1e9)
    exact, rough = (TorchBackend(spec, msgspec.structs.replace(config(loss), dtype=d)) for d in ("float32", "bfloat16"))
    exact.gradients(samples)
    rough.gradients(samples, 64)
    left = torch.cat([g.flatten() for g in exact.learner.gradients().values()])
    right = torch.cat([g.flatten() for g in rough.learner.gradients().values()])
    assert right.dtype == torch.float32
    assert torch.cosine_similarity(left, right, dim=0) > 0.995
