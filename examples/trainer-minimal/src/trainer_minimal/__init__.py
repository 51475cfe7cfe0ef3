"""The smallest trainer backend: plain torch SGD, one row at a time.

REINFORCE with an importance weight. Of the configuration it reads `lr`, `clip_norm`, `dtype` and `advantage`.
"""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from astraflow.dataflow import TrainBatch
from astraflow.trainer import (
    Example,
    Groups,
    PolicySpec,
    StepResult,
    TrainerConfig,
    examples,
    normalized,
    token_advantages,
)


class MinimalTrainer:
    def __init__(self, spec: PolicySpec, config: TrainerConfig, /) -> None:
        self.spec, self.config = spec, config
        self.model: Any = AutoModelForCausalLM.from_pretrained(spec.model, dtype=torch.float32, local_files_only=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config.lr)

    def step(self, batch: TrainBatch, /) -> StepResult:
        started = time.perf_counter()
        rows = examples(batch, self.spec.model_id, self.model.config.vocab_size)  # raises BadBatch
        lengths = np.array([row.trained.size for row in rows])
        raw, _ = token_advantages(self.config.advantage, Groups.of(rows), lengths)
        advantages = torch.from_numpy(normalized(self.config.advantage, raw, lengths)).float().split(lengths.tolist())
        loss, ratios, entropies, differences = 0.0, [], [], []
        for row, advantage in zip(rows, advantages, strict=True):
            logprobs, entropy = self.logprobs(row)
            ratio = (logprobs - torch.from_numpy(row.logprobs)).clamp(-20, 20).exp()
            row_loss = -(ratio * advantage * row.weight).sum() / int(lengths.sum())
            row_loss.backward()
            loss += row_loss.item()
            ratios.append(ratio.detach())
            entropies.append(entropy)
            differences.append((logprobs.detach() - torch.from_numpy(row.logprobs))[row.versions == batch.version])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        if torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        metrics = {
            "loss": loss,
            "ratio_mean": torch.cat(ratios).mean().item(),
            "entropy": torch.cat(entropies).mean().item(),
            "reward_mean": float(np.mean([row.reward for row in rows])),
            "tokens": float(lengths.sum()),
            "tokens_per_s": sum(row.tokens.size for row in rows) / (time.perf_counter() - started),
            "skipped": float(not torch.isfinite(norm)),
        }
        if torch.isfinite(norm):
            metrics["grad_norm"] = norm.item()
        if (current := torch.cat(differences).abs()).numel():
            metrics |= {"mismatch_mean": current.mean().item(), "mismatch_max": current.max().item()}
        return StepResult(metrics={name: value for name, value in metrics.items() if np.isfinite(value)})

    def logprobs(self, row: Example) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of a row's trained tokens, at the temperature they were sampled with."""
        logits = self.model(torch.from_numpy(row.tokens)[None]).logits[0, row.trained - 1]
        table = torch.log_softmax(logits / row.temperature, -1)
        return table[range(len(row.trained)), row.tokens[row.trained]], -(table.exp() * table).sum(-1).detach()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().to(getattr(torch, self.config.dtype)) for name, p in self.model.named_parameters()}

    def save(self, directory: Path, /) -> None:
        save_file({name: p.detach() for name, p in self.model.named_parameters()}, directory / "model.safetensors")

    def load(self, directory: Path, /) -> None:
        self.model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)

    def export(self, directory: Path, /) -> None:
        for path in Path(self.spec.model).glob("*.json"):
            shutil.copy(path, directory)
        self.model.config.save_pretrained(directory)
        save_file(self.weights(), directory / "model.safetensors", metadata={"format": "pt"})
