"""The default backend: one policy on one device, any Hugging Face causal language model, plain torch.

A batch is cut into mini-batches, each of which is one optimiser step: its rows are packed as prefix trees, forwarded in
micro-batches, and the loss is summed with weights fixed by the mini-batch. Behaviour log-probabilities come with the
samples; nothing is sampled here and dropout is off, so the backend draws no random numbers and its state is masters,
moments and step count.
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
from .columns import Columns, columns
from .config import TrainerConfig, check
from .critic import Critic
from .hardware import model_flops
from .interface import PolicySpec, StepResult
from .losses import LossInputs, RatioRange, kl_estimate, load_loss, mean_moment, token_weights
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
        check(config)
        self.spec, self._config = spec, config
        self._loss = load_loss(config.loss)
        self._device, self._dtype = torch.device(spec.device), getattr(torch, config.dtype)
        self._model = load_model(spec.model, dtype=self._dtype, device=spec.device)
        self._reference: nn.Module | None = None
        if config.loss.kl:
            reference = load_model(spec.reference or spec.model, dtype=self._dtype, device=spec.device)
            self._reference = reference.requires_grad_(False)
        self._critic: Critic | None = None
        if config.critic.enabled:
            self._critic = Critic(spec.model, config.critic, dtype=self._dtype, device=spec.device)
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
        samples = examples(batch, self.spec.model_id, self._vocab_size)
        parts = minibatches(samples, self._config.minibatches)
        table = self._columns(samples, record)
        first = 0
        for part in parts:
            record.minibatch(self._minibatch(part, table.cut(first, len(part)), record))
            first += len(part)
        forwarded = sum(minibatch.forward_tokens for minibatch in record.records)
        flops = model_flops(self._model, forwarded)
        metrics = record.metrics(samples, table, len(batch.samples), self._optimizer.lr)
        return StepResult(metrics=metrics | record.cost(flops, self._device, self._dtype))

    def weights(self) -> Mapping[str, Tensor]:
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self._model.state_dict().items():
            unique.setdefault(tensor.data_ptr(), (name, tensor))
        return dict(unique.values())

    def save(self, directory: Path, /) -> None:
        critic = self._critic.state() if self._critic else {}
        save_file(self._optimizer.state() | critic, directory / STATE_FILE)

    def load(self, directory: Path, /) -> None:
        state = load_file(directory / STATE_FILE, device="cpu")
        self._optimizer.restore(state)
        if self._critic:
            self._critic.restore(state)

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
        table = columns(samples, self._config.loss, self._config.advantage, device=self._device)
        return self._accumulate(table, micros, StepRecord(0))

    @property
    def optimizer(self) -> MasterAdamW:
        return self._optimizer

    def _columns(self, samples: Sequence[Example], record: StepRecord) -> Columns:
        """What the losses of all mini-batches need, from the models as they are before the first step.

        The whole batch is packed at once: the more rows, the more they share.
        """
        proximal = values = reference = None
        if self._reference is not None or self._critic is not None or self._config.loss.proximal:
            with record.timed("pack"):
                micros = self._pack(samples, self._config.micro_tokens)
            if self._reference is not None:
                with record.timed("reference"):
                    reference = self._logprobs(self._reference, head_weight(self._reference), micros)
            if self._config.loss.proximal:
                with record.timed("proximal"):
                    proximal = self._logprobs(self._model, self._head, micros)
            if self._critic is not None:
                with record.timed("values"):
                    values = self._critic.values(micros)
        return columns(
            samples,
            self._config.loss,
            self._config.advantage,
            device=self._device,
            reference=reference,
            proximal=proximal,
            values=values,
        )

    def _minibatch(self, samples: Sequence[Example], table: Columns, record: StepRecord) -> MinibatchRecord:
        """One optimiser step on `samples`, whose columns are `table`."""
        with record.timed("pack"):
            micros = self._pack(samples, self._config.micro_tokens)
        result = self._accumulate(table, micros, record)
        with record.timed("optimizer"):
            result.grad_norm = self._optimizer.step()
        if self._critic is not None:
            assert table.values is not None
            with record.timed("critic"):
                weights = token_weights(table.lengths, table.samples, self._config.loss).to(self._device)
                result.value_loss, _ = self._critic.step(micros, table.values, table.returns, weights)
        return result

    def _accumulate(self, table: Columns, micros: Sequence[Inputs], record: StepRecord) -> MinibatchRecord:
        """Sum the gradients of the mini-batch's loss."""
        weights = token_weights(table.lengths, table.samples, self._config.loss).to(self._device) * table.weights
        result = MinibatchRecord.empty(table)
        result.forward_tokens = sum(inputs.tokens.numel() for inputs in micros)
        bounds: RatioRange | None = None
        if self._loss.whole_minibatch and len(micros) > 1:
            with record.timed("statistic"):
                logprobs = self._logprobs(self._model, self._head, micros)
            bounds = self._loss.range(logprobs, table.old, table.advantages)
        sequences = table.sequences()
        for inputs in micros:
            index = inputs.index
            with record.timed("forward"):
                logprobs, entropy = micro_logprobs(self._model, self._head, inputs)
            if bounds is None:  # the whole mini-batch is here, or the range is a constant
                bounds = self._loss.range(logprobs.detach(), table.old[index], table.advantages[index])
            ids = torch.unique(sequences[index], return_inverse=True)[1]
            inputs_of_loss = LossInputs(logprobs, table.old[index], table.advantages[index], ids)
            terms, ratio, clipped = self._loss.tokens(inputs_of_loss, bounds)
            inside = table.inside(logprobs, index)
            if inside is not None:
                terms, clipped = terms * inside, clipped | ~inside
            terms = terms + self._regularisers(logprobs, entropy, table, index, result)
            loss = (weights[index] * terms).sum()
            with record.timed("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            result.logprobs[index], result.entropy[index] = logprobs.detach(), entropy.detach()
            result.ratio[index], result.clipped[index] = ratio, clipped.float()
            result.loss += float(loss.detach())
        assert bounds is not None
        result.range = bounds._replace(second_moment=mean_moment(result.logprobs, table.old, table.advantages))
        return result

    def _regularisers(
        self, logprobs: Tensor, entropy: Tensor, table: Columns, index: Tensor, result: MinibatchRecord
    ) -> Tensor:
        """The divergence from the reference and the entropy bonus, per token."""
        config, terms = self._config.loss, torch.zeros_like(logprobs)
        if table.reference is not None:
            divergence = kl_estimate(config.kl_estimate, logprobs, table.reference[index])
            result.kl[index] = divergence.detach()
            if not config.kl_in_reward:
                terms = terms + config.kl * divergence
        return terms - config.entropy * entropy if config.entropy else terms

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
