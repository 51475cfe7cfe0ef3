"""A tiny Llama on disk, and batches for it made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from astraflow.dataflow import Array, Sequence, TrainBatch, TrainSample
from astraflow.trainer import PolicySpec

VOCAB = 61


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[bool, int], Path] = {}

    def make(*, tied: bool = True, seed: int = 0) -> Path:
        if (tied, seed) not in made:
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
                initializer_range=0.2,  # far from uniform, so that gradients and ratios are not tiny
            )
            directory = tmp_path_factory.mktemp("model")
            LlamaForCausalLM(config).save_pretrained(directory)
            made[tied, seed] = directory
        return made[tied, seed]

    return make


@pytest.fixture
def spec(make_model: Callable[..., Path], tmp_path: Path) -> PolicySpec:
    return PolicySpec(model_id="p", model=str(make_model()), directory=str(tmp_path / "checkpoints"))


@pytest.fixture(scope="session")
def make_sample() -> Callable[..., TrainSample]:
    def make(
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
        model_id: str = "p",
    ) -> TrainSample:
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

    return make


@pytest.fixture(scope="session")
def make_batch(make_sample: Callable[..., TrainSample]) -> Callable[..., TrainBatch]:
    """Groups that share a template and a prompt, with short answers of which some are equal."""

    def make(
        version: int = 0, *, groups: int = 4, n: int = 8, seed: int = 0, template: int = 5, prompt: int = 6
    ) -> TrainBatch:
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
        return TrainBatch(batch_id=f"b{seed}.{version}", model_id="p", version=version, samples=tuple(samples))

    return make
