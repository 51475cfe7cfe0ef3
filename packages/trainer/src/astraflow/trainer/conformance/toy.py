"""A model of 60 thousand parameters on disk, and batches for it made by hand."""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from astraflow.dataflow import Array, Sequence, TrainBatch, TrainSample

VOCAB = 61
MODEL_ID = "p"


def make_model(directory: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A Llama with random weights, far from uniform, so that gradients and ratios are not tiny."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_sample(
    prompt: list[int],
    completion: list[int],
    *,
    reward: float | None = 1.0,
    logprob: float | list[float] = -2.0,
    version: int = 0,
    group: str = "g",
    mean: float = 0.5,
    std: float = 0.5,
    size: int = 8,
    name: str = "s",
    temperature: float = 1.0,
    model_id: str = MODEL_ID,
) -> TrainSample:
    """A sequence whose completion was sampled with `logprob`, in a group with these reward statistics."""
    tokens = np.array([*prompt, *completion], np.int32)
    mask = np.arange(tokens.size) >= len(prompt)
    logprobs = np.zeros(tokens.size, np.float32)
    logprobs[mask] = logprob
    sequence = Sequence(
        model_id=model_id,
        role="r",
        tokens=Array.of(tokens),
        loss_mask=Array.of(mask),
        logprobs=Array.of(logprobs),
        versions=Array.of(np.where(mask, version, -1).astype(np.int32)),
        temperature=temperature,
        finish_reason="stop",
        reward=reward,
    )
    return TrainSample(
        sequence=sequence, sample_id=name, group_id=group, group_mean=mean, group_std=std, group_size=size
    )


def make_batch(
    version: int = 0, *, groups: int = 4, n: int = 8, seed: int = 0, template: int = 5, prompt: int = 6
) -> TrainBatch:
    """Groups that share a template and a prompt, with short answers of which some are equal; two temperatures."""
    rng = np.random.default_rng(1000 * seed + version)
    start = rng.integers(3, VOCAB, template).tolist()
    samples = []
    for g in range(groups):
        question = start + rng.integers(3, VOCAB, prompt).tolist()
        rewards = rng.integers(0, 2, n).astype(float)
        for s in range(n):
            answer = [*rng.integers(3, 6, rng.integers(1, 4)).tolist(), 2]
            samples.append(
                make_sample(
                    question,
                    answer,
                    reward=float(rewards[s]),
                    logprob=(-np.abs(rng.normal(2.0, 1.0, len(answer)))).tolist(),
                    version=version,
                    group=f"g{g}",
                    mean=float(rewards.mean()),
                    std=float(rewards.std(ddof=1)),
                    size=n,
                    name=f"g{g}.{s}",
                    temperature=[1.0, 0.7][g % 2],
                )
            )
    return TrainBatch(batch_id=f"b{seed}.{version}", model_id=MODEL_ID, version=version, samples=tuple(samples))


class Engine:
    """Log-probabilities by the library's own attention, from a directory or from published weights."""

    def __init__(self, directory: Path | str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def load(self, weights: dict[str, Any]) -> None:
        """Published weights: torch tensors or numpy arrays by name, tied ones once."""
        state = {name: torch.as_tensor(tensor).float() for name, tensor in weights.items()}
        missing, unexpected = self._model.load_state_dict(state, strict=False)
        assert not unexpected, f"no such tensors in the model: {unexpected}"
        assert not missing or missing == ["lm_head.weight"], f"not published: {missing}"

    @torch.no_grad()
    def logprobs(self, tokens: Items[int], temperature: float = 1.0) -> torch.Tensor:
        """[L, V]: row i is the distribution of token i + 1."""
        return torch.log_softmax(self._model(torch.tensor([list(tokens)])).logits[0] / temperature, -1)


def on_policy(engine: Engine, batch: TrainBatch) -> TrainBatch:
    """The same batch with the log-probabilities that `engine` gives."""
    samples = []
    for sample in batch.samples:
        sequence = sample.sequence
        tokens = sequence.tokens.numpy().tolist()
        table = engine.logprobs(tokens, sequence.temperature)
        logprobs = np.zeros(len(tokens), np.float32)
        logprobs[1:] = table[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()
        logprobs[~sequence.loss_mask.numpy()] = 0
        exact = msgspec.structs.replace(sequence, logprobs=Array.of(np.minimum(logprobs, 0)))
        samples.append(msgspec.structs.replace(sample, sequence=exact))
    return msgspec.structs.replace(batch, samples=tuple(samples))


def answered(
    engine: Engine, version: int, generator: torch.Generator, *, prompts: int = 4, n: int = 8
) -> tuple[TrainBatch, float]:
    """Prompts answered `n` times with one token sampled from `engine`; a quarter of all tokens is rewarded. Also the
    mean reward."""
    samples, total = [], 0.0
    for g in range(prompts):
        prompt = [10 + g, 11, 12]
        scores = engine.logprobs(prompt)[-1]
        drawn = torch.multinomial(scores.exp(), n, replacement=True, generator=generator).tolist()
        rewards = [float(token % 4 == 3) for token in drawn]
        total += sum(rewards)
        for s, (token, reward) in enumerate(zip(drawn, rewards, strict=True)):
            samples.append(
                make_sample(
                    prompt,
                    [token],
                    reward=reward,
                    logprob=min(float(scores[token]), 0.0),
                    version=version,
                    group=f"{g}",
                    mean=float(np.mean(rewards)),
                    std=float(np.std(rewards, ddof=1)),
                    size=n,
                    name=f"{g}.{s}",
                )
            )
    batch = TrainBatch(batch_id=f"b{version}", model_id=MODEL_ID, version=version, samples=tuple(samples))
    return batch, total / (prompts * n)
