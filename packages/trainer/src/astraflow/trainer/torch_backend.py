"""The default backend: one policy on one device or, under torchrun, on several; plain torch.

Any Hugging Face causal language model. A batch is cut into mini-batches, each of which is one optimiser step: its rows
are packed as prefix trees, forwarded in micro-batches, and the loss is summed with weights fixed by the mini-batch.
Behaviour log-probabilities come with the samples; nothing is sampled here and dropout is off, so the backend draws no
random numbers and its state is masters, moments and step count.

With several ranks each forwards its share of a mini-batch's rows, balanced by tokens; per-token results are added up,
so that advantages, ranges and figures are computed from the whole mini-batch on every rank alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from astraflow.dataflow import TrainBatch
from astraflow.weightsync import Piece

from .batch import Example, examples
from .columns import Columns, columns
from .config import TrainerConfig, check
from .critic import Critic
from .hardware import model_flops
from .interface import PolicySpec, StepResult
from .learner import Frozen, Learner, LocalLearner, Scorer
from .losses import LossInputs, RatioRange, kl_estimate, load_loss, mean_moment, token_weights
from .metrics import MinibatchRecord, StepRecord
from .model import Inputs
from .packing import micro_batches, minibatches
from .ranks import Ranks
from .sharded import ShardedFrozen, ShardedLearner
from .state_files import read_state, write_state

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


class TorchBackend:
    """`TrainerBackend` on torch; see the interface for the contract of each method, which all ranks call together."""

    def __init__(self, spec: PolicySpec, config: TrainerConfig, /) -> None:
        check(config)
        self.spec, self._config = spec, config
        self._loss = load_loss(config.loss)
        self._device, self._dtype = torch.device(spec.device), getattr(torch, config.dtype)
        self.ranks = Ranks(self._device)
        if self.ranks.size > 1 and config.critic.enabled:
            raise ValueError("critic.enabled: a value model is trained in one process only")
        self._learner = self._load()
        self._reference = self._load_reference() if config.loss.kl else None
        self._critic: Critic | None = None
        if config.critic.enabled:
            self._critic = Critic(spec.model, config.critic, dtype=self._dtype, device=spec.device)

    def _load(self) -> Learner:
        where = {"dtype": self._dtype, "device": self.spec.device}
        if self.ranks.size > 1:
            return ShardedLearner(self.spec.model, self._config, self.ranks, **where)
        return LocalLearner(self.spec.model, self._config, **where)

    def _load_reference(self) -> Scorer:
        directory, where = self.spec.reference or self.spec.model, {"dtype": self._dtype, "device": self.spec.device}
        return ShardedFrozen(directory, self.ranks, **where) if self.ranks.size > 1 else Frozen(directory, **where)

    def step(self, batch: TrainBatch, /) -> StepResult:
        record = StepRecord(batch.version)
        samples = examples(batch, self.spec.model_id, self._learner.vocab_size)
        parts = minibatches(samples, self._config.minibatches)
        table = self._columns(samples, record)
        first = 0
        for part in parts:
            record.minibatch(self._minibatch(part, table.cut(first, len(part)), record))
            first += len(part)
        forwarded = sum(minibatch.forward_tokens for minibatch in record.records)
        flops = model_flops(self._learner.model, forwarded)
        metrics = record.metrics(samples, table, len(batch.samples), self._learner.lr)
        return StepResult(metrics=metrics | record.cost(flops, self._device, self._dtype))

    def weights(self) -> Mapping[str, Tensor]:
        return self._learner.weights()

    def pieces(self) -> list[Piece]:
        """This rank's rows of the weights to publish, where there are several ranks."""
        assert isinstance(self._learner, ShardedLearner)
        return self._learner.pieces()

    def save(self, directory: Path, /) -> None:
        write_state(directory, self._state(), self._learner.spans(), self.ranks.rank, self.ranks.size)

    def snapshot(self) -> Callable[[Path], None]:
        state = {name: tensor.to("cpu", copy=True) for name, tensor in self._state().items()}
        spans, rank, size = self._learner.spans(), self.ranks.rank, self.ranks.size
        return lambda directory: write_state(directory, state, spans, rank, size)

    def load(self, directory: Path, /) -> None:
        spans = self._learner.spans()
        self._learner.restore(read_state(directory, {name: spans.get(name) for name in self._learner.state()}))
        if self._critic:
            self._critic.restore(read_state(directory, dict.fromkeys(self._critic.state())))

    def export(self, directory: Path, /) -> None:
        weights = self.weights()  # by all ranks
        if self.ranks.rank:
            return
        for path in sorted(Path(self.spec.model).iterdir()):
            if path.is_file() and path.suffix in {".json", ".jinja", ".txt", ".model"} and "index" not in path.name:
                shutil.copyfile(path, directory / path.name)
        self._learner.model.config.save_pretrained(directory)
        save_file(dict(weights), directory / WEIGHTS_FILE, metadata={"format": "pt"})
        # safetensors makes its files private; who may read the directory's other files may read this one.
        (directory / WEIGHTS_FILE).chmod((directory / CONFIG_FILE).stat().st_mode)

    def gradients(
        self, samples: Sequence[Example], budget: int | None = None, *, share: bool = True
    ) -> MinibatchRecord:
        """Sum the gradients of one mini-batch's loss, without a reference, and make no step (tests, benchmarks)."""
        micros = self._pack(samples, budget, share)
        table = columns(samples, self._config.loss, self._config.advantage, device=self._device)
        return self._accumulate(table, micros, StepRecord(0))

    @property
    def learner(self) -> Learner:
        return self._learner

    def _state(self) -> dict[str, Tensor]:
        return self._learner.state() | (self._critic.state() if self._critic else {})

    def _columns(self, samples: Sequence[Example], record: StepRecord) -> Columns:
        """What the losses of all mini-batches need, from the models as they are before the first step.

        The whole batch is packed at once: the more rows, the more they share.
        """
        proximal = values = reference = None
        tokens = sum(example.trained.size for example in samples)
        if self._reference is not None or self._critic is not None or self._config.loss.proximal:
            with record.timed("pack"):
                micros = self._pack(samples)
            if self._reference is not None:
                with record.timed("reference"):
                    reference = self._logprobs(self._reference, micros, tokens)
            if self._config.loss.proximal:
                with record.timed("proximal"):
                    proximal = self._logprobs(self._learner, micros, tokens)
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
            micros = self._pack(samples)
        result = self._accumulate(table, micros, record)
        with record.timed("optimizer"):
            result.grad_norm = self._learner.step()
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
        if self._loss.whole_minibatch and (len(micros) > 1 or self.ranks.size > 1):
            with record.timed("statistic"):
                logprobs = self._logprobs(self._learner, micros, len(table.old))
            bounds = self._loss.range(logprobs, table.old, table.advantages)
        sequences = table.sequences()
        for inputs in micros:
            index = inputs.index
            with record.timed("forward"):
                logprobs, entropy = self._learner.score(inputs)
            if not index.numel():  # another rank has more passes: gathering a layer takes all ranks
                (logprobs.sum() * 0).backward()  # type: ignore[no-untyped-call]
                continue
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
        self._add_up(result)
        if bounds is None:  # nothing of this mini-batch was this rank's
            bounds = self._loss.range(result.logprobs, table.old, table.advantages)
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

    def _add_up(self, result: MinibatchRecord) -> None:
        """What the ranks found for their own tokens, on every rank."""
        sums = torch.tensor([result.loss, float(result.forward_tokens)], device=self._device)
        self.ranks.sum(result.logprobs, result.entropy, result.ratio, result.clipped, result.kl, sums)
        result.loss, result.forward_tokens = float(sums[0]), round(float(sums[1]))

    def _pack(self, samples: Sequence[Example], budget: int | None = None, share: bool = True) -> list[Inputs]:
        """This rank's micro-batches, their `index` into the trained tokens of all samples.

        All ranks get equally many: where one has fewer, passes over a short row that belong to no token follow.
        """
        own = self.ranks.share([example.tokens.size for example in samples])
        first = sum(example.trained.size for example in samples[: own.start])
        packed = micro_batches(samples[own.start : own.stop], budget or self._config.micro_tokens, share=share)
        micros = [Inputs.of(micro, self._device, self._dtype).moved(first) for micro in packed]
        missing = self.ranks.most(len(micros), self._device) - len(micros)
        if missing:
            shortest = min(samples, key=lambda example: example.tokens.size)
            (idle,) = micro_batches([shortest], shortest.tokens.size)
            micros += [Inputs.of(idle, self._device, self._dtype).idle()] * missing
        return micros

    def _logprobs(self, scorer: Scorer, micros: Sequence[Inputs], tokens: int) -> Tensor:
        """Log-probabilities of all trained tokens [N] in the order of the samples, without gradient."""
        result = torch.zeros(tokens, device=self._device)
        with torch.no_grad():
            for inputs in micros:
                logprobs, _ = scorer.score(inputs)
                if inputs.index.numel():
                    result[inputs.index] = logprobs
        self.ranks.sum(result)
        return result
