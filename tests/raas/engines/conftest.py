"""A tiny Llama on disk, weights to change it to, and the log-probabilities a plain forward pass gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from astraflow.dataflow import Sampling
from astraflow.raas.engines.transformers import TransformersEngine
from astraflow.raas.interface import EngineSpec, GenerateRequest

Weights = Mapping[str, torch.Tensor]
VOCAB = 61


class Tiny:
    """Two layers, grouped keys, tied head, float32; `weights(v)` differ a lot from version to version."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.path = str(folder)
        self.vocab = VOCAB
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.15,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.model: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
        self.model.save_pretrained(folder)
        self._first = {name: tensor.clone() for name, tensor in self.model.named_parameters()}

    def weights(self, version: int) -> Weights:
        if version == 0:
            return self._first
        noise = torch.Generator().manual_seed(version)
        return {name: tensor + 0.1 * torch.randn(tensor.shape, generator=noise) for name, tensor in self._first.items()}

    def logprobs(self, ids: list[int], start: int, temperature: float, version: int = 0) -> torch.Tensor:
        """Log-probabilities float32 of `ids[start:]`, each given all before it, in one forward pass."""
        load(self.model, self.weights(version))
        logits = self.model(torch.tensor([ids])).logits[0, start - 1 : -1].float() / (temperature or 1.0)
        chosen: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
        return chosen

    def greedy(self, prompt: Sequence[int], budget: int) -> list[int]:
        """What the library's own generate answers, at version 0."""
        load(self.model, self._first)
        ids = torch.tensor([list(prompt)])
        answer = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=budget, do_sample=False)
        return [int(token) for token in answer[0, len(prompt) :]]


def load(model: Any, weights: Weights) -> None:
    for name, tensor in model.named_parameters():
        tensor.copy_(weights[name])


class MakeEngine(Protocol):
    def __call__(self, **changes: Any) -> AbstractAsyncContextManager[TransformersEngine]: ...


class MakeRequest(Protocol):
    def __call__(
        self, seed: int, prompt: list[int] | None = None, *, budget: int = 16, temperature: float = 1.0, stop: int = -1
    ) -> GenerateRequest: ...


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    torch.set_num_threads(1)
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(tiny: Tiny) -> MakeEngine:
    @asynccontextmanager
    async def make(**changes: Any) -> AsyncIterator[TransformersEngine]:
        fields: dict[str, Any] = {"max_running": 8, "max_context": 128, **changes}
        made = TransformersEngine(EngineSpec(model_id="tiny", model=tiny.path, dtype="float32", **fields))
        await made.start()
        try:
            yield made
        finally:
            await made.aclose()

    return make


@pytest.fixture
def request_of(tiny: Tiny) -> MakeRequest:
    """A request with a prompt of 3 to 12 tokens of its own, unless one is given."""

    def make(
        seed: int, prompt: list[int] | None = None, *, budget: int = 16, temperature: float = 1.0, stop: int = -1
    ) -> GenerateRequest:
        own = torch.randint(tiny.vocab, (3 + seed % 10,), generator=torch.Generator().manual_seed(seed)).tolist()
        return GenerateRequest(
            request_id=f"r{seed}",
            prompt=tuple(prompt or own),
            sampling=Sampling(max_new_tokens=budget, temperature=temperature),
            stop_token_ids=() if stop < 0 else (stop,),
            seed=seed,
        )

    return make


@pytest.fixture
def commit(tiny: Tiny) -> Callable[[TransformersEngine, int], Callable[[], None]]:
    """What a swap runs: an engine's tensors become those of a version."""

    def of(engine: TransformersEngine, version: int) -> Callable[[], None]:
        return lambda: load(engine._model, tiny.weights(version))

    return of


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - the engine's counters have no event
                await asyncio.sleep(0.001)

    return wait
