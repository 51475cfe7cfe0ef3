"""The default backend: one policy on one device, any Hugging Face causal language model, plain torch.

A batch is cut into mini-batches, each of which is one optimiser step: its rows are packed as prefix trees, forwarded in
micro-batches, and the clipped surrogate of `losses` is summed with weights fixed by the mini-batch. Behaviour
log-probabilities come with the samples; nothing is sampled here and dropout is off, so the backend draws no random
numbers and its state is masters, moments and step count.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from astraflow.dataflow import TrainBatch

from .batch import Example, examples
from .interface import PolicySpec, StepResult, TrainerConfig
from .losses import clipped_surrogate, kl_k3, ratio_range, second_moments, token_weights
from .metrics import MinibatchRecord, StepRecord
from .model import Inputs, head_weight, load_model, micro_logprobs
from .optim import MasterAdamW
from .packing import micro_batches, minibatches

STATE_FILE = "training.safetensors"
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


class TorchBackend:
    """`TrainerBackend` on torch; see the interface for the contract of each method."""

    def __init__(self, spec: PolicySpec, config: TrainerConfig, /) -> None:
        self.spec, self._config = spec, config
        self._device, self._dtype = torch.device(spec.device), getattr(torch, config.dtype)
        self._model = load_model(spec.model, dtype=self._dtype, device=spec.device)
        self._reference: nn.Module | None = None
        if config.loss.kl:
            reference = load_model(spec.reference or spec.model, dtype=self._dtype, device=spec.device)
            self._reference = reference.requires_grad_(False)
        parameters = dict(self._model.named_parameters())
        self._optimizer = MasterAdamW(parameters, config)
        # Input and output embedding get leaves of their own: the sums of a (tied) embedding's dense gradients are
        # the largest tensors of a backward pass, and only a few of its rows are read.
        embedding = self._model.get_input_embeddings()  # type: ignore[operator]
        if isinstance(embedding, nn.Embedding) and self._device.type == "cpu":
            embedding.sparse = True
        head = head_weight(self._model)
        self._vocab_size = len(head)
        self._head = self._optimizer.leaf(next(name for name, tensor in parameters.items() if tensor is head))

    def step(self, batch: TrainBatch, /) -> StepResult:
        record = StepRecord(batch.version)
        samples = examples(batch, self.spec.model_id, self._vocab_size, self._config.advantage)
        parts = minibatches(samples, self._config.minibatches)
        with record.timed("reference"):
            references = self._reference_logprobs([example for part in parts for example in part])
        start = 0
        for part in parts:
            size = sum(example.trained.size for example in part)
            reference = None if references is None else references[start : start + size]
            record.minibatch(self._minibatch(part, reference, record))
            start += size
        return StepResult(metrics=record.metrics(samples, len(batch.samples), self._optimizer.lr))

    def weights(self) -> Mapping[str, Tensor]:
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self._model.state_dict().items():
            unique.setdefault(tensor.data_ptr(), (name, tensor))
        return dict(unique.values())

    def save(self, directory: Path, /) -> None:
        save_file(self._optimizer.state(), directory / STATE_FILE)

    def load(self, directory: Path, /) -> None:
        self._optimizer.restore(load_file(directory / STATE_FILE, device="cpu"))

    def export(self, directory: Path, /) -> None:
        for path in sorted(Path(self.spec.model).iterdir()):
            if path.is_file() and path.suffix in {".json", ".jinja", ".txt", ".model"} and "index" not in path.name:
                shutil.copyfile(path, directory / path.name)
        self._model.config.save_pretrained(directory)  # type: ignore[operator, union-attr]
        save_file(dict(self.weights()), directory / WEIGHTS_FILE, metadata={"format": "pt"})
        # safetensors makes its files private; who may read the directory's other files may read this one.
        (directory / WEIGHTS_FILE).chmod((directory / CONFIG_FILE).stat().st_mode)

    def gradients(
        self, samples: Sequence[Example], budget: int | None = None, *, share: bool = True
    ) -> MinibatchRecord:
        """Sum the gradients of one mini-batch's loss, without a reference, and make no step (tests, benchmarks)."""
        micros = self._pack(samples, budget or self._config.micro_tokens, share)
        return self._accumulate(samples, micros, None, StepRecord(0))

    @property
    def optimizer(self) -> MasterAdamW:
        return self._optimizer

    def _minibatch(self, samples: Sequence[Example], reference: Tensor | None, record: StepRecord) -> MinibatchRecord:
        """One optimiser step on `samples`, whose trained tokens' reference log-probabilities are `reference` [N]."""
        with record.timed("pack"):
            micros = self._pack(samples, self._config.micro_tokens)
        result = self._accumulate(samples, micros, reference, record)
        with record.timed("optimizer"):
            result.grad_norm = self._optimizer.step()
        return result

    def _accumulate(
        self, samples: Sequence[Example], micros: Sequence[Inputs], reference: Tensor | None, record: StepRecord
    ) -> MinibatchRecord:
        config = self._config.loss
        lengths = torch.tensor([example.trained.size for example in samples])
        old = torch.cat([torch.from_numpy(example.logprobs) for example in samples]).to(self._device)
        advantages = torch.tensor([example.advantage for example in samples]).repeat_interleave(lengths).float()
        advantages, weights = advantages.to(self._device), token_weights(samples, config).to(self._device)
        result = MinibatchRecord.empty(old, advantages, torch.cat([torch.from_numpy(e.versions) for e in samples]))
        result.forward_tokens = sum(inputs.tokens.numel() for inputs in micros)
        bounds = None
        if config.name == "m2po" and len(micros) > 1:
            with record.timed("statistic"):
                bounds = ratio_range(config, self._logprobs(self._model, self._head, micros), old, advantages)
        for inputs in micros:
            index = inputs.index
            with record.timed("forward"):
                logprobs, entropy = micro_logprobs(self._model, self._head, inputs)
            if bounds is None:  # the whole mini-batch is here, or the range is a constant
                bounds = ratio_range(config, logprobs.detach(), old[index], advantages[index])
            tokens = clipped_surrogate(
                logprobs, old[index], advantages[index], bounds.low, bounds.high, config.dual_clip
            )
            terms = tokens.loss
            if reference is not None:
                divergence = kl_k3(logprobs, reference[index])
                terms = terms + config.kl * divergence
                result.kl[index] = divergence.detach()
            loss = (weights[index] * terms).sum()
            with record.timed("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            result.logprobs[index], result.entropy[index] = logprobs.detach(), entropy
            result.ratio[index], result.clipped[index] = tokens.ratio, tokens.clipped.float()
            result.loss += float(loss.detach())
        assert bounds is not None
        moments = second_moments(result.logprobs, old, advantages)
        result.range = bounds._replace(second_moment=float(moments.mean()) if moments.numel() else 0.0)
        return result

    def _pack(self, samples: Sequence[Example], budget: int, share: bool = True) -> list[Inputs]:
        packed = micro_batches(samples, budget, share=share)
        return [Inputs.of(micro, self._device, self._dtype) for micro in packed]

    def _logprobs(self, model: nn.Module, head: Tensor, micros: Sequence[Inputs]) -> Tensor:
        """Log-probabilities of all trained tokens [N] in the order of the samples, without gradient."""
        result = torch.empty(sum(inputs.index.numel() for inputs in micros), device=self._device)
        with torch.no_grad():
            for inputs in micros:
                result[inputs.index] = micro_logprobs(model, head, inputs)[0]
        return result

    def _reference_logprobs(self, samples: Sequence[Example]) -> Tensor | None:
        """The reference policy's log-probabilities of the whole batch at once: the more rows, the more they share."""
        if self._reference is None:
            return None
        micros = self._pack(samples, self._config.micro_tokens)
        return self._logprobs(self._reference, head_weight(self._reference), micros)
