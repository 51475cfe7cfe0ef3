"""Token exactness across the packages: what the engine sampled is what the trainer computes, version by version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch

from astraflow.dataflow import Array, Sampling, Sequence, TrainBatch, TrainSample
from astraflow.raas import Engine, EngineSpec, GenerateRequest, Generation, load_engine, load_tokenizer
from astraflow.recipes.math_multi_agent import RECIPE, TINY
from astraflow.recipes.models import resolve_model
from astraflow.trainer import LossConfig, PolicySpec, TrainerBackend, TrainerConfig, load_backend
from astraflow.weightsync import MemoryStore, Publisher, Puller

pytestmark = pytest.mark.slow

MODEL_ID = "solver"
DType = Literal["bfloat16", "float32"]


@pytest.fixture(scope="module")
def model() -> Path:
    torch.set_num_threads(1)
    return resolve_model("package:tiny")


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    made = MemoryStore("test-exactness")
    yield made
    made.close()


def make_engine(model: Path, dtype: DType) -> Engine:
    spec = EngineSpec(model_id=MODEL_ID, model=str(model), dtype=dtype, max_running=16, max_context=128)
    return load_engine("transformers", spec)


def make_backend(model: Path, tmp_path: Path, dtype: DType, lr: float = 1e-3) -> TrainerBackend:
    spec = PolicySpec(model_id=MODEL_ID, model=str(model), directory=str(tmp_path))
    config = TrainerConfig(dtype=dtype, minibatches=1, lr=lr, loss=LossConfig(kl=0.0))
    return load_backend("torch")(spec, config)


def requests(model: Path, n: int, temperature: float = 1.0) -> list[GenerateRequest]:
    """The job's own prompts: samples of `n` tasks' first questions, answers of at most 6 tokens."""
    tokenizer = load_tokenizer(str(model))
    source = RECIPE.parts.source(TINY)
    made = []
    for index in range(n):
        prompt = source.next()
        assert prompt is not None
        text = tokenizer.render(prompt.messages) + str(prompt.metadata["opening"])
        made.append(
            GenerateRequest(
                request_id=f"r{index}",
                prompt=tokenizer.encode(text),
                sampling=Sampling(max_new_tokens=6, temperature=temperature),
                stop_token_ids=tokenizer.stop_token_ids,
                seed=index,
            )
        )
    return made


async def generate_all(engine: Engine, wanted: list[GenerateRequest]) -> list[Generation]:
    made: dict[int, Generation] = {}

    async def one(index: int) -> None:
        made[index] = await engine.generate(wanted[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(wanted)):
            tasks.start_soon(one, index)
    return [made[index] for index in range(len(wanted))]


def batch(wanted: list[GenerateRequest], made: list[Generation], version: int) -> TrainBatch:
    samples = []
    for index, (request, generation) in enumerate(zip(wanted, made, strict=True)):
        prompt, answer = len(request.prompt), len(generation.tokens)
        sequence = Sequence(
            model_id=MODEL_ID,
            role="solver",
            tokens=Array.of(np.array(request.prompt + generation.tokens, np.int32)),
            loss_mask=Array.of(np.array([False] * prompt + [True] * answer)),
            logprobs=Array.of(np.array([0.0] * prompt + list(generation.logprobs), np.float32)),
            versions=Array.of(np.array([-1] * prompt + list(generation.versions), np.int32)),
            temperature=request.sampling.temperature,
            finish_reason=generation.finish_reason,
            reward=float(index % 2),
        )
        sequence.check()
        samples.append(
            TrainSample(
                sequence=sequence,
                sample_id=f"s{index}",
                group_id="g",
                group_mean=0.5,
                group_std=0.5,
                group_size=len(wanted),
            )
        )
    return TrainBatch(batch_id=f"b{version}", model_id=MODEL_ID, version=version, samples=tuple(samples))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_engine_and_trainer_agree_to_1e5_in_fp32(model: Path, tmp_path: Path, temperature: float) -> None:
    engine = make_engine(model, "float32")
    await engine.start()
    try:
        wanted = requests(model, 400, temperature)
        made = await generate_all(engine, wanted)
    finally:
        await engine.aclose()
    assert sum(len(g.tokens) for g in made) >= 1000
    metrics = make_backend(model, tmp_path, "float32").step(batch(wanted, made, 0)).metrics
    # Of the 1,342 tokens one is ill-conditioned: each side is 5e-6 from the same model in float64. The next is at 3e-6.
    assert metrics["mismatch_max"] <= 1.5e-5
    assert metrics["mismatch_mean"] <= 1e-6


async def test_the_difference_in_bf16_is_small_and_reported(model: Path, tmp_path: Path) -> None:
    engine = make_engine(model, "bfloat16")
    await engine.start()
    try:
        wanted = requests(model, 400)
        made = await generate_all(engine, wanted)
    finally:
        await engine.aclose()
    metrics = make_backend(model, tmp_path, "bfloat16").step(batch(wanted, made, 0)).metrics
    print(f"bf16 mismatch: mean {metrics['mismatch_mean']:.4f}, max {metrics['mismatch_max']:.4f}")
    assert metrics["mismatch_mean"] < 0.04
    assert metrics["mismatch_max"] < 0.5


async def test_weights_that_change_in_mid_generation_leave_every_token_exact(
    model: Path, tmp_path: Path, store: MemoryStore
) -> None:
    """A real trainer publishes two versions while answers are generated; the tokens of each version have the
    log-probabilities that the trainer computes at that version, none is lost or repeated."""
    engine = make_engine(model, "float32")
    backend = make_backend(model, tmp_path, "float32")
    publisher = Publisher(store, stream=MODEL_ID, incarnation=1)
    await engine.start()
    try:
        puller = Puller(store, engine.sink())
        question = requests(model, 64)
        first = await generate_all(engine, question)
        wanted = requests(model, 400)
        asked: list[GenerateRequest] = []
        made: list[Generation] = []
        trained = anyio.Event()

        async def generate() -> None:
            """As often as it takes, and once with the last weights."""
            last = False
            while not last:
                last = trained.is_set()
                made.extend(await generate_all(engine, wanted))
                asked.extend(wanted)

        async def train() -> None:
            for version in (1, 2):
                await anyio.sleep(0.1)
                step = batch(question, first, 0)
                await anyio.to_thread.run_sync(backend.step, step)
                await publisher.publish(backend.weights(), version)
                snapshots[version] = {name: tensor.clone() for name, tensor in backend.weights().items()}
                staged = await puller.stage()
                assert staged is not None
                await engine.swap(staged.commit, version)  # type: ignore[arg-type]
            trained.set()

        snapshots = {0: {name: tensor.clone() for name, tensor in backend.weights().items()}}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            tasks.start_soon(train)
    finally:
        await engine.aclose()
    assert all(len(g.tokens) == len(g.logprobs) == len(g.versions) for g in made)
    assert all(len(g.tokens) == 6 for g in made if g.finish_reason == "length")
    assert all(list(g.versions) == sorted(g.versions) for g in made)
    assert {version for g in made for version in g.versions} == {0, 1, 2}
    assert any(g.versions[0] < g.versions[-1] for g in made), "no weights changed in mid-generation; ask for more"
    for version, weights in snapshots.items():
        assert mismatch(model, weights, asked, made, version) <= 1.5e-5  # see above


def mismatch(
    model: Path,
    weights: dict[str, torch.Tensor],
    wanted: list[GenerateRequest],
    made: list[Generation],
    version: int,
) -> float:
    """Largest |difference| of the log-probabilities recorded for `version` from a forward pass with its weights."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    reference.load_state_dict(weights, strict=False)
    reference.tie_weights()
    worst = 0.0
    with torch.inference_mode():
        for request, generation in zip(wanted, made, strict=True):
            ids = torch.tensor([request.prompt + generation.tokens])
            logits = reference(ids).logits[0, len(request.prompt) - 1 : -1]
            exact = torch.log_softmax(logits, -1).gather(1, torch.tensor(generation.tokens)[:, None])[:, 0].numpy()
            here = np.array(generation.versions) == version
            if here.any():
                worst = max(worst, float(np.abs(exact - np.array(generation.logprobs))[here].max()))
    return worst
